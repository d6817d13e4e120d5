"""Fixtures across components: a running server for a module of tests, checked for leaks at its end."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:  # style tests must not pay for the whole server
    from tests.functional.stack import Stack

    from opendsec import DSecClient, Sandbox


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    """Start a server for the tests of one module; at the end nothing may be left on the host."""
    from tests.functional.stack import Stack

    with Stack() as running:
        running.import_image()
        yield running
        running.stop()
        assert running.leaks() == {}, running.log_tail()


@pytest.fixture
async def client(stack: Stack) -> AsyncIterator[DSecClient]:
    """Open a client; at the end every live sandbox is stopped, so that tests do not see each other's."""
    async with stack.client() as opened:
        yield opened
        for sandbox in await opened.list(states=["requested", "preparing", "running", "stopping"]):
            await sandbox.stop()


@pytest.fixture
async def sandbox(client: DSecClient, stack: Stack) -> Sandbox:
    """Create a sandbox."""
    from opendsec import DSecContainerRunArgs

    return await client.run_container(DSecContainerRunArgs(container_image=stack.image), timeout=60)
