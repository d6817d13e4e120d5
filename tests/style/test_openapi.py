"""The API documents that are checked in are those that the programs print."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["edge", "apiserver"])
def test_the_checked_in_document_is_current(name: str) -> None:
    """``scripts/openapi.sh`` writes both anew; the difference belongs into the same commit as the change."""
    argv = [sys.executable, "-m", f"opendsec_server.{name}.main", "--openapi"]
    printed = subprocess.run(argv, capture_output=True, check=True).stdout
    checked_in = ROOT / "openapi" / f"{name}.json"
    assert checked_in.is_file(), "run scripts/openapi.sh"
    assert printed == checked_in.read_bytes(), "the API has changed: run scripts/openapi.sh"
