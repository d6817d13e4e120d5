"""What placement knows and what is asked of it: plain values."""

from __future__ import annotations

from typing import Literal

import msgspec

from opendsec.api.models import CreateSandbox, Node

MIB = 1024 * 1024


class PlacementPolicy(msgspec.Struct, kw_only=True, frozen=True):
    """The constants of placement."""

    #: Nodes sampled for one sandbox (the d of power of d choices).
    choices: int = 2
    #: Memory that must stay available on a node, in bytes. The edge has its own, final threshold.
    min_memory_available_bytes: int = 256 * MIB
    #: Free space that must stay on a node's data disk, in bytes.
    min_disk_free_bytes: int = 512 * MIB
    #: Memory pressure (PSI some, 10 s, percent) above which a node gets nothing new.
    max_memory_pressure_percent: float = 80.0
    #: Part of its memory limit that a new sandbox is expected to use.
    memory_fraction: float = 0.25
    #: Expected memory of a sandbox without a limit, in bytes.
    memory_default_bytes: int = 64 * MIB
    #: How long a placement that never reported back is believed in, in seconds.
    overlay_seconds: float = 60.0


class NodeView(msgspec.Struct, kw_only=True, frozen=True):
    """A node as of the watcher's last successful poll, and what the watcher concludes about it."""

    id: str
    state: Literal["ready", "draining", "suspect", "dead"]
    #: When the poll was sent, on the clock that is passed to the engine; later placements are not in it.
    seen_at: float
    backends: frozenset[str] = frozenset()
    runtimes: frozenset[str] = frozenset()
    sandboxes: int = 0
    creating: int = 0
    memory_total_bytes: int = 0
    memory_available_bytes: int = 0
    cpu_count: int = 1
    #: PSI ``some`` average over 10 s, in percent, by resource.
    pressure: dict[str, float] = {}
    disk_free_bytes: int = 0

    @classmethod
    def of(cls, node: Node, *, seen_at: float, state: Literal["ready", "draining", "suspect", "dead"]) -> NodeView:
        """Return the view of a node that answered a poll sent at ``seen_at``."""
        return cls(
            id=node.id,
            state=state,
            seen_at=seen_at,
            backends=frozenset(node.backends),
            runtimes=frozenset(node.runtimes),
            sandboxes=node.sandboxes,
            creating=node.creating,
            memory_total_bytes=node.memory_total_bytes,
            memory_available_bytes=node.memory_available_bytes,
            cpu_count=max(1, node.cpu_count),
            pressure=node.pressure,
            disk_free_bytes=node.disk_free_bytes,
        )


class Demand(msgspec.Struct, kw_only=True, frozen=True):
    """What one sandbox needs of its node."""

    backend: str = "container"
    #: Named runtime, or None for the node's default.
    runtime: str | None = None
    #: Memory it is expected to use, in bytes.
    memory_bytes: int = 0


def demand_of(request: CreateSandbox, policy: PlacementPolicy) -> Demand:
    """Return what a create asks of a node."""
    if request.memory_limit_mb is None:
        memory = policy.memory_default_bytes
    else:
        memory = int(request.memory_limit_mb * MIB * policy.memory_fraction)
    return Demand(backend=request.backend, runtime=request.runtime, memory_bytes=memory)
