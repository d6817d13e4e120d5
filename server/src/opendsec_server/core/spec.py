"""What an edge has decided about a sandbox before a backend starts it: plain values, no I/O."""

from __future__ import annotations

import msgspec

from opendsec.api.models import ImageConfig, Limits


class SandboxSpec(msgspec.Struct, kw_only=True, frozen=True):
    """Everything a backend needs to prepare and start one sandbox; stored in the journal as JSON."""

    id: str
    backend: str
    runtime: str
    #: Digests of the layers, base first, each workspace and toolkit above the one before.
    layers: tuple[str, ...]
    #: Merged image config (env, user, workdir) with the request's own values on top.
    config: ImageConfig
    limits: Limits
    hostname: str
    allow_new_privileges: bool = False


class Usage(msgspec.Struct, kw_only=True, frozen=True):
    """Resource use as the backend's accounting has it."""

    memory_bytes: int = 0
    memory_peak_bytes: int = 0
    cpu_seconds: float = 0.0
    pids: int = 0
    disk_bytes: int | None = None
    oom_kills: int = 0
    #: Forks refused because of the process limit.
    pids_refused: int = 0
