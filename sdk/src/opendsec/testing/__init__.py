r"""An in-memory platform for tests of what uses the SDK.

::

    async with fake_client() as client:
        sandbox = await client.run_container(DSecContainerRunArgs(container_image="debian:bookworm"))
        assert (await sandbox.run_shell("echo hi")).stdout == "hi\n"
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from opendsec._client import DSecClient
from opendsec.testing._server import FakeServer
from opendsec.testing._state import FakeCommand, FakeExec, FakeSandbox, Handler

__all__ = ["FakeCommand", "FakeExec", "FakeSandbox", "FakeServer", "Handler", "fake_client"]


@asynccontextmanager
async def fake_client() -> AsyncIterator[DSecClient]:
    """Give an open client of a fresh ``FakeServer``."""
    async with FakeServer() as server, server.client() as client:
        yield client
