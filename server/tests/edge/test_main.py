"""What the program does before it serves."""

from __future__ import annotations

import os
import resource

import pytest

from opendsec.api.errors import Conflict
from opendsec_server.edge import main


async def test_two_edges_never_share_a_data_folder(tmp_path, monkeypatch):
    """The second is refused before it looks at any sandbox; a killed one's lock is free at once."""
    monkeypatch.setattr(main, "LOCK_TRIES", 2)
    first = await main.lock_node(tmp_path / "edge.lock")
    with pytest.raises(Conflict):
        await main.lock_node(tmp_path / "edge.lock")
    os.close(first)
    os.close(await main.lock_node(tmp_path / "edge.lock"))


def test_as_many_files_may_be_open_as_the_system_allows():
    """The soft limit is raised to the hard one."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, before[1]), before[1]))
    try:
        main.allow_many_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == before[1]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
