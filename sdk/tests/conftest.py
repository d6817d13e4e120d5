"""Fixtures: an in-memory platform and an open client of it."""

from __future__ import annotations

import pytest

from opendsec import DSecContainerRunArgs
from opendsec.testing import FakeServer


@pytest.fixture
async def server():
    async with FakeServer() as running:
        yield running


@pytest.fixture
async def client(server):
    async with server.client() as opened:
        yield opened


@pytest.fixture
def args():
    return DSecContainerRunArgs(container_image="debian:bookworm")


@pytest.fixture
async def sandbox(client, args):
    return await client.run_container(args)
