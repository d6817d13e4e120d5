"""What every backend offers to the edge. The contract suite in ``opendsec_server.testing`` holds each to it.

A backend keeps no state of its own that matters: everything is found again from the kernel and the file system
after a crash (``inventory``). It never touches the journal. All methods are idempotent: repeating one after a
crash finishes what the first began.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import msgspec

from opendsec_server.channel.interface import Channel
from opendsec_server.core.spec import SandboxSpec, Usage


class Capabilities(msgspec.Struct, kw_only=True, frozen=True):
    """What a backend can do on this host."""

    name: str
    runtimes: tuple[str, ...]
    default_runtime: str
    #: ``disk_limit_mb`` can be enforced.
    disk_limits: bool
    #: Reasons for what is missing, by capability or runtime name.
    missing: Mapping[str, str] = {}


class Backend(Protocol):
    """Starts, finds, measures and removes sandboxes of one kind."""

    async def open(self) -> None:
        """Make the node ready (scratch file system, cgroup parents, layer mounts).

        Raises:
            UnsupportedCapability: the host lacks something that cannot be done without.
        """

    async def close(self) -> None:
        """Release what only this process holds; live sandboxes and their mounts stay."""

    def capabilities(self) -> Capabilities:
        """Return what this backend can do here."""

    async def start(self, spec: SandboxSpec) -> Channel:
        """Bring a sandbox up and return its open channel.

        On any error everything begun is removed before the error is raised.

        Raises:
            ImageUnavailable: a layer is missing.
            UnsupportedCapability: a limit or runtime cannot be had here.
            DiskFull: the node's disk is full.
            Unavailable: the runtime failed for a passing reason.
        """

    async def reconnect(self, sandbox_id: str) -> Channel:
        """Open a new channel to a live sandbox (after an edge restart or a lost connection).

        Raises:
            SandboxGone: its pid 1 has ended.
        """

    async def wait_dead(self, sandbox_id: str) -> None:
        """Return when pid 1 of the sandbox has ended."""

    async def remove(self, sandbox_id: str) -> None:
        """Kill and remove everything of a sandbox: processes, cgroups, mounts, runtime state, files.

        Returns only when all of it is gone. Unknown ids are fine.
        """

    async def usage(self, sandbox_id: str) -> Usage:
        """Return its resource use.

        Raises:
            SandboxGone: it does not exist.
        """

    def oom_kills(self, sandbox_id: str) -> int:
        """Return how many processes the kernel killed for the sandbox's memory limit; 0 if it is gone.

        Called on the exec path: must not block beyond one small read of a kernel file.
        """

    async def inventory(self) -> set[str]:
        """Return the ids of all sandboxes of which anything exists on this host."""

    async def alive(self, sandbox_id: str) -> bool:
        """Tell whether pid 1 of the sandbox runs."""
