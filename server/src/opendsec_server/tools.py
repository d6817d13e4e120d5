"""Where the programs that go into every sandbox lie: chronus and the platform's own static shells.

``make`` builds them into ``build/tools`` of the source checkout; an installation has them in ``<data_dir>/tools``.
The folder is bind-mounted read-only into every sandbox at ``/.opendsec``.
"""

from __future__ import annotations

from pathlib import Path

from opendsec.api.errors import UnsupportedCapability
from opendsec_server.platform.config import Config

#: What a tools folder must hold.
NAMES = ("chronus", "sh", "bash")

_CHECKOUT = Path(__file__).resolve().parents[3] / "build" / "tools"


def missing(folder: Path) -> list[str]:
    """Return the names of tools that ``folder`` lacks."""
    return [name for name in NAMES if not (folder / name).is_file()]


def candidates(config: Config) -> list[Path]:
    """Return the folders that are looked into, in order; a configured one is the only one."""
    if config.tools_dir:
        return [Path(config.tools_dir)]
    return [config.data / "tools", _CHECKOUT]


def locate(config: Config) -> Path:
    """Return the first complete tools folder: configured, installed under the data folder, or built in the checkout.

    Raises:
        UnsupportedCapability: no folder has all tools.
    """
    folders = candidates(config)
    for folder in folders:
        if not missing(folder):
            return folder.resolve()
    looked = "; ".join(f"{folder} lacks {', '.join(missing(folder))}" for folder in folders)
    raise UnsupportedCapability(f"no folder has chronus and the static shells ({looked}): run 'make build/tools'")
