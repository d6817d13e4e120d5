"""runc as a program that fails, hangs or was left behind; the real one is driven by the contract suite."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from opendsec.api.errors import DiskFull, Unavailable, UnsupportedCapability
from opendsec_server.backends.container import runtime
from opendsec_server.backends.container.runtime import Runc


def program(folder: Path, script: str) -> Path:
    """Put a program called runc into a folder."""
    path = folder / "runc"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Return what makes a runc of a script; the third argument of the script's command line is ``--log``'s file."""

    def make(script: str) -> Runc:
        program(tmp_path, f'log=$4; while [ "$1" != --pid-file ]; do shift; done; pid=$2\n{script}')
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        return Runc(tmp_path / "state")

    return make


def start(runc: Runc, tmp_path: Path, *descriptors: int) -> int:
    bundle = tmp_path / "bundle"
    bundle.mkdir(exist_ok=True)
    return runc.start("box", bundle, descriptors)


def test_descriptors_arrive_from_three_on(fake, tmp_path):
    """Whatever their numbers are here, even when they are in each other's way."""
    runc = fake('cat <&3 >&4; echo 77 > "$pid"')
    source, sink = tmp_path / "in", tmp_path / "out"
    source.write_text("hello")
    with source.open("rb") as first, sink.open("wb") as second:
        assert start(runc, tmp_path, first.fileno(), second.fileno()) == 77
    assert sink.read_text() == "hello"


def test_a_failure_carries_the_runtimes_reason(fake, tmp_path):
    """Taken from its log, whatever else stands there."""
    runc = fake("""echo 'no json' > "$log"; echo '{"level":"error","msg":"it broke"}' >> "$log"; exit 1""")
    with pytest.raises(Unavailable, match="it broke"):
        start(runc, tmp_path)


def test_a_failure_without_a_log_has_its_exit_code(fake, tmp_path):
    """Better than nothing."""
    with pytest.raises(Unavailable, match="exit code 9"):
        start(fake("exit 9"), tmp_path)


def test_a_full_disk_is_named(fake, tmp_path):
    """The creator may free some and try again."""
    runc = fake("""echo '{"level":"error","msg":"write: no space left on device"}' > "$log"; exit 1""")
    with pytest.raises(DiskFull):
        start(runc, tmp_path)


def test_too_little_memory_to_start_is_named(fake, tmp_path):
    """The request is at fault, trying again is no use."""
    runc = fake("""echo '{"level":"error","msg":"container init was OOM-killed"}' > "$log"; exit 1""")
    with pytest.raises(UnsupportedCapability):
        start(runc, tmp_path)


def test_a_runtime_that_hangs_is_killed(fake, tmp_path, monkeypatch):
    """A create never waits for ever."""
    monkeypatch.setattr(runtime, "RUN_SECONDS", 0.2)
    with pytest.raises(Unavailable, match="did not start"):
        start(fake("exec sleep 1000"), tmp_path)


def test_runtimes_of_a_dead_edge_are_ended(tmp_path):
    """Told by their name and our state folder; others are let be."""
    # A configuration that never comes keeps a runtime waiting.
    os.mkfifo(tmp_path / "config.json")
    ours, other = (
        subprocess.Popen(["runc", "--root", str(tmp_path / name), "run", "--bundle", str(tmp_path), "box"])
        for name in ("state", "elsewhere")
    )
    Runc(tmp_path / "state").end_orphans()
    assert ours.wait() == -9
    assert other.poll() is None
    other.kill()
    other.wait()


def test_state_is_listed_and_forgotten(tmp_path, fake):
    """Unknown names are fine."""
    runc = fake("true")
    assert runc.names() == set()
    (tmp_path / "state/box").mkdir(parents=True)
    (tmp_path / "state/box/state.json").write_text("{}")
    assert runc.names() == {"box"}
    for _ in range(2):
        runc.forget("box")
    assert runc.names() == set()


def test_a_host_without_runc_is_told(monkeypatch, tmp_path):
    """Before anything is made."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UnsupportedCapability, match="runc is not installed"):
        Runc(tmp_path)
    assert set(runtime.missing_runtimes()) == {"crun", "runsc"}
