"""The in-memory twin of every backend: sandboxes that outlive the edge object but not the process.

Tests of the edge drive it: a second ``EdgeService`` over the same ``FakeBackend`` is a restarted edge.
"""

from __future__ import annotations

import asyncio
from collections import Counter

from opendsec.api.errors import PlatformError, SandboxGone, UnsupportedCapability
from opendsec_server.backends.protocol import Capabilities
from opendsec_server.channel.interface import Channel
from opendsec_server.core.spec import SandboxSpec, Usage
from opendsec_server.testing.fake_channel import FakeChannel
from opendsec_server.testing.guest import FakeGuest


class FakeBackend:
    """Implements ``backends.protocol.Backend`` in memory.

    Attributes:
        guests: live and dead sandboxes of which anything exists; add one to make a stray.
        start_gate: ``start`` waits for it half-way; set by default.
        start_error: raised by the next ``start`` half-way, once.
        remove_errors: raised by the next calls of ``remove``, one each, with everything still there.
        reconnect_errors: raised by the next calls of ``reconnect``, one each.
        disk_limits: whether ``disk_limit_mb`` can be enforced.
        calls: how often each method was called.
    """

    def __init__(self, name: str = "container") -> None:
        self.name = name
        self.guests: dict[str, FakeGuest] = {}
        self.specs: dict[str, SandboxSpec] = {}
        self.start_gate = asyncio.Event()
        self.start_gate.set()
        self.start_error: PlatformError | None = None
        self.remove_errors: list[Exception] = []
        self.reconnect_errors: list[PlatformError] = []
        self.disk_limits = True
        self.calls: Counter[str] = Counter()
        self._channels: dict[str, list[FakeChannel]] = {}

    # -- hooks for tests --

    def kill(self, sandbox_id: str, *, oom: bool = False) -> None:
        """End pid 1 of a sandbox from outside, if wanted for want of memory."""
        guest = self.guests[sandbox_id]
        guest.oom_kills += oom
        guest.die()

    def break_channels(self, sandbox_id: str) -> None:
        """Cut all connections to a sandbox; it goes on."""
        for channel in self._channels.pop(sandbox_id, []):
            channel.break_off()

    def count_oom(self, sandbox_id: str, times: int = 1) -> None:
        """Let the kernel have killed processes of a sandbox for its memory limit."""
        self.guests[sandbox_id].oom_kills += times

    # -- Backend --

    async def open(self) -> None:
        """Nothing to make ready."""
        self.calls["open"] += 1

    async def close(self) -> None:
        """Close the channels; sandboxes stay."""
        self.calls["close"] += 1
        for sandbox_id in list(self._channels):
            self.break_channels(sandbox_id)

    def capabilities(self) -> Capabilities:
        """Return what this twin claims to do."""
        missing = {"crun": "not in memory", "runsc": "not in memory"}
        if not self.disk_limits:
            missing["disk_limits"] = "switched off"
        return Capabilities(
            name=self.name,
            runtimes=("runc",),
            default_runtime="runc",
            disk_limits=self.disk_limits,
            missing=missing,
        )

    async def start(self, spec: SandboxSpec) -> Channel:
        """Bring a sandbox up."""
        self.calls["start"] += 1
        if spec.runtime != "runc":
            raise UnsupportedCapability(f"runtime {spec.runtime} is not in memory")
        if spec.limits.disk_mb is not None and not self.disk_limits:
            raise UnsupportedCapability("disk limits are switched off")
        guest = self.guests[spec.id] = FakeGuest()
        try:
            await self.start_gate.wait()
            self._fail_start()
        except BaseException:
            del self.guests[spec.id]
            raise
        self.specs[spec.id] = spec
        return self._connect(spec.id, guest)

    def _fail_start(self) -> None:
        error, self.start_error = self.start_error, None
        if error is not None:
            raise error

    def _connect(self, sandbox_id: str, guest: FakeGuest) -> FakeChannel:
        channel = FakeChannel(guest)
        self._channels.setdefault(sandbox_id, []).append(channel)
        return channel

    async def reconnect(self, sandbox_id: str) -> Channel:
        """Open a new channel to a live sandbox."""
        self.calls["reconnect"] += 1
        await asyncio.sleep(0)
        if self.reconnect_errors:
            raise self.reconnect_errors.pop(0)
        guest = self.guests.get(sandbox_id)
        if guest is None or not guest.alive:
            raise SandboxGone(f"pid 1 of sandbox {sandbox_id} has ended")
        return self._connect(sandbox_id, guest)

    async def wait_dead(self, sandbox_id: str) -> None:
        """Return when pid 1 has ended."""
        guest = self.guests.get(sandbox_id)
        if guest is not None:
            await guest.dead.wait()

    async def remove(self, sandbox_id: str) -> None:
        """Kill and remove everything of a sandbox."""
        self.calls["remove"] += 1
        await asyncio.sleep(0)
        if self.remove_errors:
            raise self.remove_errors.pop(0)
        guest = self.guests.pop(sandbox_id, None)
        if guest is not None:
            guest.die()
        self.specs.pop(sandbox_id, None)
        self._channels.pop(sandbox_id, None)

    async def usage(self, sandbox_id: str) -> Usage:
        """Return what the guest pretends to use."""
        guest = self.guests.get(sandbox_id)
        if guest is None:
            raise SandboxGone(f"there is no sandbox {sandbox_id}")
        return Usage(
            memory_bytes=2**20,
            memory_peak_bytes=2**21,
            pids=1,
            disk_bytes=guest.disk_bytes,
            oom_kills=guest.oom_kills,
            pids_refused=guest.pids_refused,
        )

    def oom_kills(self, sandbox_id: str) -> int:
        """Return the count of the guest; 0 if it is gone."""
        guest = self.guests.get(sandbox_id)
        return guest.oom_kills if guest is not None else 0

    async def inventory(self) -> set[str]:
        """Return the ids of all sandboxes of which anything exists."""
        return set(self.guests)

    async def alive(self, sandbox_id: str) -> bool:
        """Tell whether pid 1 of the sandbox runs."""
        guest = self.guests.get(sandbox_id)
        return guest is not None and guest.alive
