"""May this node take this sandbox? A pure question with a typed answer."""

from __future__ import annotations

from enum import StrEnum

from opendsec_server.placement.overlay import InFlight
from opendsec_server.placement.views import Demand, NodeView, PlacementPolicy


class Refusal(StrEnum):
    """Why a node cannot take a sandbox."""

    DEAD = "dead"
    DRAINING = "draining"
    BACKEND = "backend"
    RUNTIME = "runtime"
    MEMORY = "memory"
    DISK = "disk"
    PRESSURE = "pressure"
    EXCLUDED = "excluded"

    @property
    def permanent(self) -> bool:
        """Waiting does not help: the node lacks what is asked."""
        return self in (Refusal.BACKEND, Refusal.RUNTIME)


def refusal(view: NodeView, demand: Demand, inflight: InFlight, policy: PlacementPolicy) -> Refusal | None:
    """Return why ``view`` cannot take ``demand`` on top of what is in flight to it, or None if it can."""
    if demand.backend not in view.backends:
        return Refusal.BACKEND
    if demand.runtime is not None and demand.runtime not in view.runtimes:
        return Refusal.RUNTIME
    if view.state == "dead":
        return Refusal.DEAD
    if view.state == "draining":
        return Refusal.DRAINING
    available = view.memory_available_bytes - inflight.memory_bytes - demand.memory_bytes
    if available < policy.min_memory_available_bytes:
        return Refusal.MEMORY
    if view.disk_free_bytes < policy.min_disk_free_bytes:
        return Refusal.DISK
    if view.pressure.get("memory", 0.0) > policy.max_memory_pressure_percent:
        return Refusal.PRESSURE
    return None


def load(view: NodeView, inflight: InFlight) -> float:
    """Return how loaded a node is, 0 (idle) upwards.

    The sum of the memory in use with what is in flight (a fraction), the pressures (a fraction each: memory stalls
    count whole, cpu half, io a quarter), and starts under way per processor, of which sixteen count as much as
    all memory in use.
    """
    total = max(1, view.memory_total_bytes)
    memory = (total - view.memory_available_bytes + inflight.memory_bytes) / total
    pressure = view.pressure
    stalls = pressure.get("memory", 0.0) + pressure.get("cpu", 0.0) / 2 + pressure.get("io", 0.0) / 4
    return memory + stalls / 100 + (view.creating + inflight.count) / (16 * view.cpu_count)
