"""Stores and layer mounts in temporary folders."""

from __future__ import annotations

import pytest

from opendsec_server.images.layermounts import ErofsLayerMounts
from opendsec_server.images.store import LocalImageStore
from opendsec_server.linux import mounts
from opendsec_server.testing.tars import mounts_below


@pytest.fixture
def store(tmp_path):
    """A real store; after the test nothing may be left half made."""
    made = LocalImageStore(tmp_path / "data", min_free_bytes=0)
    yield made
    made.close()
    assert list((tmp_path / "data" / "images" / "tmp").iterdir()) == []


@pytest.fixture
def layer_mounts(tmp_path, store):
    """Real layer mounts over the real store; all unmounted after the test."""
    yield ErofsLayerMounts(tmp_path / "data", store.layer_path)
    for target in reversed(mounts_below(tmp_path)):
        mounts.umount(target, lazy=True)
