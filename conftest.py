"""What all tests share: tests that need root and kernel features say so, and run wherever they can."""

from __future__ import annotations

import os
import shutil

import pytest


def _lacking() -> str | None:
    """Return why tests marked ``root`` cannot run here, or None if they can."""
    if os.geteuid() != 0:
        return "needs root"
    absent = [name for name in ("runc", "mkfs.erofs", "mkfs.btrfs") if shutil.which(name) is None]
    return f"needs {', '.join(absent)} ('opendsec doctor' says how to get it)" if absent else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what this host cannot run; on the project's kind of machine nothing is skipped."""
    reason = _lacking()
    if reason is None:
        return
    for item in items:
        if item.get_closest_marker("root") is not None:
            item.add_marker(pytest.mark.skip(reason=reason))
