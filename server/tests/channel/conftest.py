"""A real chronus for each test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from opendsec_server.channel.interface import Channel
from opendsec_server.testing.channel import chronus_channel, running_chronus


@pytest.fixture
async def channel() -> AsyncIterator[Channel]:
    """Channel to a chronus of its own."""
    async with chronus_channel() as opened:
        yield opened


@pytest.fixture
async def pid1() -> AsyncIterator[Channel]:
    """Channel to a chronus that is process 1 of its own namespace."""
    async with chronus_channel(pid_namespace=True) as opened:
        yield opened


@pytest.fixture
def socket_path() -> Any:
    """Socket of a running chronus."""
    with running_chronus() as path:
        yield path


@pytest.fixture
def folder(tmp_path: Path) -> bytes:
    """A scratch folder as bytes."""
    return str(tmp_path).encode()
