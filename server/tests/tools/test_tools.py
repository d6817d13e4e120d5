"""Where chronus and the static shells are found."""

from __future__ import annotations

from pathlib import Path

import pytest

from opendsec.api.errors import UnsupportedCapability
from opendsec_server import tools
from opendsec_server.platform.config import Config


def fill(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).write_bytes(b"")
    return folder


def test_a_configured_folder_wins(tmp_path: Path) -> None:
    """``tools_dir`` is used even if the data folder has tools too."""
    fill(tmp_path / "tools", *tools.NAMES)
    chosen = fill(tmp_path / "mine", *tools.NAMES)
    assert tools.locate(Config(data_dir=str(tmp_path), tools_dir=str(chosen))) == chosen


def test_tools_under_the_data_folder_are_found(tmp_path: Path) -> None:
    """An installation needs no configuration."""
    folder = fill(tmp_path / "tools", *tools.NAMES)
    assert tools.locate(Config(data_dir=str(tmp_path))) == folder


def test_a_checkout_serves_when_nothing_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An incomplete data folder is passed over for the checkout's build folder."""
    fill(tmp_path / "data/tools", "sh")
    built = fill(tmp_path / "build", *tools.NAMES)
    monkeypatch.setattr(tools, "_CHECKOUT", built)
    assert tools.locate(Config(data_dir=str(tmp_path / "data"))) == built


def test_an_incomplete_configured_folder_is_an_error_that_names_what_lacks(tmp_path: Path) -> None:
    """Nothing else is tried in its place."""
    folder = fill(tmp_path / "mine", "sh", "bash")
    with pytest.raises(UnsupportedCapability, match="lacks chronus"):
        tools.locate(Config(data_dir=str(tmp_path), tools_dir=str(folder)))
