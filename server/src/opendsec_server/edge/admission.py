"""Whether this node takes one more sandbox: memory, pressure, disk, count, draining. The edge's word is final."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

from opendsec.api.errors import CapacityUnavailable
from opendsec_server.platform.config import EdgeConfig

#: Readings of the host are taken anew after this time, in seconds.
FRESH_SECONDS = 0.25


class HostLoad:
    """Memory, pressure and disk of the host, read at most every ``FRESH_SECONDS``."""

    def __init__(self, data: Path, proc: Path = Path("/proc")) -> None:
        self._data = data
        self._proc = proc
        self._read_at = -1.0
        self.memory_total = 0
        self.memory_available = 0
        self.disk_free = 0
        self.pressure: dict[str, float] = {}

    def refresh(self) -> HostLoad:
        """Read again if the last reading is old."""
        now = time.monotonic()
        if now - self._read_at > FRESH_SECONDS:
            self._read_at = now
            self._read()
        return self

    def _read(self) -> None:
        for line in (self._proc / "meminfo").read_text().splitlines():
            name, _, rest = line.partition(":")
            if name == "MemTotal":
                self.memory_total = int(rest.split()[0]) * 1024
            elif name == "MemAvailable":
                self.memory_available = int(rest.split()[0]) * 1024
                break
        disk = os.statvfs(self._data)
        self.disk_free = disk.f_bavail * disk.f_frsize
        for resource in ("cpu", "memory", "io"):
            # A kernel without PSI has no such file: then pressure is not a reason.
            with contextlib.suppress(OSError, ValueError, IndexError):
                first = (self._proc / "pressure" / resource).read_text().split(maxsplit=2)[1]
                self.pressure[resource] = float(first.removeprefix("avg10="))


class Admission:
    """Decides on creates and bounds how many are under way at once."""

    def __init__(self, config: EdgeConfig, load: HostLoad) -> None:
        self._config = config
        self._load = load
        self._slots = asyncio.Semaphore(config.max_creating)
        self.draining = False
        self.creating = 0

    def check(self, live: int) -> None:
        """Refuse a create that the node has no room for.

        Raises:
            CapacityUnavailable: with the reason, and ``retry_after`` in seconds.
        """
        config, load = self._config, self._load.refresh()
        if self.draining:
            raise CapacityUnavailable(f"node {config.node} is draining", reason="draining", retry_after=30)
        if live >= config.max_sandboxes:
            raise CapacityUnavailable(
                f"node {config.node} has {live} sandboxes, its limit", reason="count", retry_after=5
            )
        if load.memory_available < config.min_memory_available_bytes:
            raise CapacityUnavailable(f"node {config.node} is low on memory", reason="memory", retry_after=5)
        if load.disk_free < config.min_disk_free_bytes:
            raise CapacityUnavailable(f"node {config.node} is low on disk space", reason="disk", retry_after=30)
        if load.pressure.get("memory", 0.0) > config.max_memory_pressure_percent:
            raise CapacityUnavailable(f"node {config.node} is under memory pressure", reason="pressure", retry_after=5)

    @contextlib.asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Hold one of the places for creates under way; waits for one."""
        self.creating += 1
        try:
            async with self._slots:
                yield
        finally:
            self.creating -= 1
