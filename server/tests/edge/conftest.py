"""An edge's service over the in-memory backend; its data folder and backend outlive it, as a host does."""

from __future__ import annotations

import contextlib

import pytest

from opendsec.api.models import CreateSandbox, ExecRequest
from opendsec_server.edge.journal import Journal
from opendsec_server.edge.service import EdgeService
from opendsec_server.platform.config import Config, EdgeConfig
from opendsec_server.testing.backend import FakeBackend
from opendsec_server.testing.images import FakeImageStore


class Host:
    """What outlives an edge: the data folder, the sandboxes, the images."""

    def __init__(self, folder, **edge):
        limits = {"min_memory_available_bytes": 0, "min_disk_free_bytes": 0, "max_memory_pressure_percent": 100.0}
        self.config = Config(
            data_dir=str(folder / "data"), run_dir=str(folder / "run"), edge=EdgeConfig(**{**limits, **edge})
        )
        self.config.data.mkdir(exist_ok=True)
        self.backend = FakeBackend()
        self.images = FakeImageStore()
        self.images.add("base:1")
        self.service: EdgeService | None = None

    async def boot(self) -> EdgeService:
        """Start an edge."""
        journal = Journal(self.config.data / "journal.db")
        self.service = EdgeService(self.config, journal, self.backend, self.images)
        await self.service.open()
        return self.service

    async def kill(self) -> None:
        """End the edge as SIGKILL does: nothing more is written, connections break."""
        service, self.service = self.service, None
        assert service is not None
        service.journal.close()
        for life in service.lives.by_id.values():
            for task in (life._watching, life._acting, life.ending):
                if task is not None:
                    task.cancel()
            for task in list(life.execs._feeding or ()):
                task.cancel()
        for task in service._tasks:
            task.cancel()
        for guest in self.backend.guests.values():
            for exec_ in guest.execs.values():
                exec_.sink = None
        for channels in self.backend._channels.values():
            for channel in channels:
                channel._sinks.clear()
                channel.break_off()
        self.backend._channels.clear()

    async def reboot(self) -> EdgeService:
        """Kill the edge and start another."""
        await self.kill()
        return await self.boot()

    async def close(self) -> None:
        """Shut the edge down politely and remove the sandboxes."""
        if self.service is not None:
            with contextlib.suppress(Exception):
                await self.service.close()
        for guest in list(self.backend.guests.values()):
            guest.die()


@pytest.fixture
async def host(tmp_path):
    """A host without a running edge."""
    host = Host(tmp_path)
    yield host
    await host.close()


@pytest.fixture
async def edge(host):
    """A running edge."""
    return await host.boot()


@pytest.fixture
def make_host(tmp_path):
    """Makes hosts whose edge is configured otherwise."""
    return lambda **edge: Host(tmp_path, **edge)


def create(**fields) -> CreateSandbox:
    """A request for a sandbox."""
    return CreateSandbox(**{"container_image": "base:1", **fields})


def shell(line: str, **fields) -> ExecRequest:
    """A request to run a line and wait."""
    return ExecRequest(**{"shell": line, "wait_seconds": 10, **fields})
