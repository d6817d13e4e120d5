"""Groups in every hierarchy: v2 and hybrid on a folder that looks like one, v1 on this host's own."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from opendsec_server.linux.cgroups import Cgroups


def fill(folder: Path, **files: str) -> Path:
    """Make a group with files; ``__`` in a name stands for a dot."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    return folder


@pytest.fixture
def v2(tmp_path: Path) -> Cgroups:
    """A v2 host with one sandbox."""
    for folder in (tmp_path, tmp_path / "ours", tmp_path / "ours/node"):
        fill(folder, cgroup__controllers="cpuset cpu io memory pids", cgroup__subtree_control="")
    fill(
        tmp_path / "ours/node/box",
        memory__current="1000",
        memory__peak="2000",
        memory__events="low 0\nmax 3\noom 2\noom_kill 2\noom_group_kill 0\n",
        cpu__stat="usage_usec 1500000\nuser_usec 1\n",
        pids__current="4",
        pids__events="max 7\n",
        cgroup__procs="",
    )
    return Cgroups("ours/node", {"unified": tmp_path})


def test_a_v2_sandbox_is_measured(v2):
    """All figures come from the one group."""
    use = v2.usage("box")
    assert (use.memory_bytes, use.memory_peak_bytes, use.cpu_seconds) == (1000, 2000, 1.5)
    assert (use.pids, use.oom_kills, use.pids_refused) == (4, 2, 7)
    assert v2.oom_kills("box") == 2
    assert v2.names() == {"box"}
    assert v2.mode == "v2"


def test_a_group_that_is_not_there_has_no_kills_and_no_use(v2):
    """Asking on the exec path never fails."""
    assert v2.oom_kills("other") == 0
    with pytest.raises(FileNotFoundError):
        v2.usage("other")


def test_the_parent_on_v2_hands_controllers_down_and_is_bounded(v2, tmp_path):
    """Each level enables what is there; the bounds are the parent's."""
    v2.prepare(memory_bytes=123, pids=45)
    for folder in (tmp_path, tmp_path / "ours", tmp_path / "ours/node"):
        assert (folder / "cgroup.subtree_control").read_text() == "+cpu +cpuset +io +memory +pids"
    assert (tmp_path / "ours/node/memory.max").read_text() == "123"
    assert (tmp_path / "ours/node/pids.max").read_text() == "45"


def test_a_v2_group_is_killed_at_once(v2, tmp_path):
    """By its own file, so that no fork escapes."""
    (tmp_path / "ours/node/box/cgroup.kill").write_text("")
    v2.kill("box")
    assert (tmp_path / "ours/node/box/cgroup.kill").read_text() == "1"


def test_a_hybrid_host_is_read_by_its_v1_side(tmp_path):
    """The v2 mount holds no controllers that matter, but may hold groups of ours."""
    memory, pids, account = (fill(tmp_path / name / "p/box") for name in ("memory", "pids", "cpuacct"))
    fill(
        memory,
        memory__usage_in_bytes="5",
        memory__max_usage_in_bytes="6",
        memory__oom_control="under_oom 0\noom_kill 1",
    )
    fill(pids, pids__current="2", pids__events="max 0")
    fill(account, cpuacct__usage="2000000000")
    fill(tmp_path / "unified/p/stray")
    roots = {name: tmp_path / name for name in ("memory", "pids", "cpuacct", "unified")}
    cgroups = Cgroups("p", roots)
    assert cgroups.mode == "hybrid"
    use = cgroups.usage("box")
    assert (use.memory_bytes, use.cpu_seconds, use.oom_kills) == (5, 2.0, 1)
    assert cgroups.names() == {"box", "stray"}


@pytest.fixture
def real():
    """Groups below a parent of our own on this host."""
    cgroups = Cgroups(f"opendsec-test-{os.getpid()}")
    yield cgroups
    for name in cgroups.names():
        cgroups.kill(name)
        cgroups.remove(name)
    cgroups.remove_parent()
    assert not any((root / cgroups.parent).exists() for root in cgroups.hierarchies.values())


@pytest.mark.root
def test_processes_in_a_group_are_killed_and_the_group_removed(real):
    """Also one that ignores signals, and nested groups."""
    child = subprocess.Popen(["sh", "-c", "trap '' TERM INT; echo ready; sleep 1000"], stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"ready\n"
    for root in real.hierarchies.values():
        group = root / real.parent / "box"
        (group / "nested").mkdir(parents=True)
        if root.name in {"pids", "unified", "memory"} and "cpuset" not in root.name:
            (group / "cgroup.procs").write_text(str(child.pid))
    assert real.pids("box") == {child.pid}
    real.kill("box")
    assert child.wait() == -signal.SIGKILL
    child.stdout.close()
    real.remove("box")
    assert real.names() == set()
    real.remove("box")


@pytest.mark.root
def test_the_parent_is_bounded_on_this_host(real):
    """Preparing it twice is fine."""
    for _ in range(2):
        real.prepare(memory_bytes=2**30, pids=1000)
    assert real.group("", "pids").joinpath("pids.max").read_text().strip() == "1000"


@pytest.mark.root
def test_only_processes_of_the_group_are_killed(real):
    """A number that was given to another process meanwhile is let live."""
    child = subprocess.Popen(["sleep", "1000"])
    real._kill_one(child.pid, "box")
    assert child.poll() is None
    child.kill()
    child.wait()
