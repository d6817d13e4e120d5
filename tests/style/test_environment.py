"""The environment is read in one place of each distribution."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
#: Who may look at the process environment, and why.
ALLOWED = {
    "server/src/opendsec_server/platform/config.py": "the configuration",
    "server/src/opendsec_server/supervisor.py": "passes it on to the programs it starts",
    "server/src/opendsec_server/commands/serving.py": "passes it on to the program it becomes",
    "server/src/opendsec_server/testing/local.py": "passes it on to the server it starts",
    "server/src/opendsec_server/backends/container/scratch.py": "passes it on to the tools it starts",
    "sdk/src/opendsec/_endpoint.py": "address and key of the platform",
}


def test_only_the_named_modules_read_the_environment() -> None:
    """A value that steers the program from elsewhere would be found by nobody."""
    found = {
        path.relative_to(ROOT).as_posix()
        for part in ("sdk/src", "server/src")
        for path in (ROOT / part).rglob("*.py")
        if re.search(r"os\.environ|os\.getenv|getenv\(", path.read_text())
    }
    assert found <= set(ALLOWED), sorted(found - set(ALLOWED))
