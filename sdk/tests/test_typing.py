"""The annotations hold."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_public_api_is_typed():
    """Mypy (strict) agrees with every ``assert_type`` and finds every mistake that is marked as one."""
    command = [sys.executable, "-m", "mypy", "--config-file", "pyproject.toml", "sdk/tests/typing_api.py"]
    done = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
