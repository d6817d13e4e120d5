"""chronus where processes, memory and descriptors run out; what it is to the kernel."""

from __future__ import annotations

import asyncio
import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from opendsec.api.errors import Unavailable
from opendsec_server.channel.client import connect
from opendsec_server.testing.channel import RecordingSink, probe_binary, run, running_chronus, shell, spec


def process_of(path: Path) -> int:
    """The chronus that serves a socket."""
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        words = entry.read_bytes().split(b"\0")
        if words[0].endswith(b"/chronus") and str(path.parent).encode() in b" ".join(words):
            return int(entry.parent.name)
    raise AssertionError("no chronus")


@contextlib.contextmanager
def cgroup(controller: str, name: str) -> Iterator[Path]:
    """A cgroup of our own for one controller, v1 or v2."""
    parent = Path("/sys/fs/cgroup") / controller
    group = (parent if parent.is_dir() else parent.parent) / f"opendsec-test-{name}"
    group.mkdir()
    try:
        yield group
    finally:
        group.rmdir()


async def test_no_descriptor_left_is_a_typed_refusal(socket_path):
    """Commands and file calls are refused as a passing lack; later they work again."""
    channel = await connect(socket_path)
    pid = process_of(socket_path)
    old = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (11, old[1]))
    with pytest.raises(Unavailable):
        await channel.exec_start(spec("true"), RecordingSink())
    with pytest.raises(Unavailable):
        _ = [entry async for entry in channel.list_dir(b"/etc")]
    second = await connect(socket_path)
    third = await connect(socket_path)
    await third.ping()
    resource.prlimit(pid, resource.RLIMIT_NOFILE, old)
    await second.aclose()
    await channel.aclose()
    channel = third
    assert (await run(channel, shell("echo fine"))).stdout == b"fine\n"
    await channel.aclose()


async def test_no_process_left_is_a_typed_refusal(tmp_path):
    """At a process limit a start is refused as a passing lack; what needs no process still works."""
    with cgroup("pids", tmp_path.name) as group, running_chronus() as path:
        channel = await connect(path)
        (group / "cgroup.procs").write_text(str(process_of(path)))
        (group / "pids.max").write_text("1")
        with pytest.raises(Unavailable):
            await channel.exec_start(spec("true"), RecordingSink())
        assert (await channel.stat(b"/etc")).kind == "directory"
        (group / "pids.max").write_text("max")
        assert (await run(channel, shell("echo fine"))).stdout == b"fine\n"
        await channel.aclose()


async def test_a_memory_bomb_dies_and_chronus_lives(tmp_path):
    """At the memory limit the kernel takes the workload, again and again, never process 1."""
    with cgroup("memory", tmp_path.name) as group, running_chronus(pid_namespace=True) as path:
        channel = await connect(path)
        limits = [name for name in ("memory.limit_in_bytes", "memory.max") if (group / name).exists()]
        (group / limits[0]).write_text(str(24 << 20))
        (group / "cgroup.procs").write_text(str(process_of(path)))
        bomb = str(probe_binary())
        for _ in range(3):
            sinks = await asyncio.gather(*(run(channel, spec(bomb, "eat", "200")) for _ in range(4)))
            assert {sink.exit.signal for sink in sinks} == {9}
        assert (await run(channel, shell("echo fine"))).stdout == b"fine\n"
        await channel.aclose()


async def test_idle_memory_is_as_promised(socket_path):
    """At most 1.5 MiB resident, and 0.6 MiB of its own; also after thousands of commands and megabytes of output."""
    channel = await connect(socket_path)

    def figures() -> tuple[int, int]:
        text = Path(f"/proc/{process_of(socket_path)}/smaps_rollup").read_text()
        values = {line.split()[0]: int(line.split()[1]) for line in text.splitlines()[1:]}
        return values["Rss:"], values["Pss_Anon:"]

    resident, anonymous = figures()
    assert resident <= 1536
    assert anonymous <= 200
    for _ in range(300):
        await run(channel, shell("echo x"))
    await run(channel, shell("head -c 20000000 /dev/zero"))
    resident, anonymous = figures()
    assert resident <= 1536
    assert anonymous <= 600
    await channel.aclose()


async def test_child_capabilities_are_limited_but_not_those_of_process_1():
    """With --child-caps root's commands have only the mask; chronus itself can still change users and signal."""
    mask = 0x3 | 1 << 5
    with running_chronus(pid_namespace=True, arguments=("--child-caps", f"{mask:x}")) as path:
        channel = await connect(path)
        sink = await run(channel, spec(str(probe_binary()), "caps"))
        found = dict(line.split(":\t") for line in sink.stdout.decode().splitlines())
        assert int(found["CapBnd"], 16) == mask
        assert int(found["CapEff"], 16) == mask
        assert int(found["CapPrm"], 16) == mask
        assert (int(found["CapInh"], 16), int(found["CapAmb"], 16)) == (0, 0)
        other = await run(channel, spec("id", "-u", user="4242"))
        assert other.stdout == b"4242\n"
        owner = await run(channel, shell("stat -c %u /proc/1/fd"))
        assert owner.stdout == b"0\n"
        await channel.aclose()


async def test_children_are_dumpable_and_hold_only_three_descriptors(pid1):
    """Exec makes a child ordinary again."""
    dumpable = await run(pid1, spec(str(probe_binary()), "dumpable"))
    assert dumpable.stdout == b"1\n"
    descriptors = await run(pid1, spec(str(probe_binary()), "fds"))
    assert descriptors.stdout == b"0\n1\n2\n"


async def test_works_in_an_empty_root(tmp_path):
    """No passwd, no shell, no /dev, /tmp or /proc: a static program runs, and files work."""
    root = tmp_path / "root"
    root.mkdir()
    probe = root / "probe"
    probe.write_bytes(probe_binary().read_bytes())
    probe.chmod(0o755)
    with running_chronus(pid_namespace=True, root=root) as path:
        channel = await connect(path)
        sink = await run(channel, spec("/probe", "env", env={}))
        assert sink.exit.exit_code == 0
        assert b'"HOME"="/"' in sink.stdout
        assert (await run(channel, spec("/probe", "output", "100000", user="1000"))).stdout == b"x" * 100_000
        missing = await run(channel, spec("sh", env={}))
        assert missing.exit.exit_code == 127
        command = spec("/probe", "hold", "1000000", timeout_ms=50, grace_ms=10)
        assert (await run(channel, command)).exit.timed_out
        assert [entry.path async for entry in channel.list_dir(b"/")] == ["/chronus", "/probe"]
        await channel.aclose()
