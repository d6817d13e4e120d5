"""Workloads that run into their limits are told so, and nobody else notices."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.functional.stack import Stack

from opendsec import (
    CapacityUnavailable,
    DiskFull,
    DSecClient,
    DSecContainerRunArgs,
    OutcomeUnknown,
    Sandbox,
    SandboxGone,
    Unavailable,
)

pytestmark = [pytest.mark.root, pytest.mark.slow]

FORK_BOMB = "bomb() { bomb | bomb & }; bomb; sleep 2"
#: tail must hold a line that never ends.
MEMORY_BOMB = "tail /dev/zero"


async def test_a_memory_bomb_is_killed_and_named(client: DSecClient, stack: Stack) -> None:
    """The command was killed for memory and says so; chronus lives and the sandbox goes on."""
    args = DSecContainerRunArgs(container_image=stack.image, memory_limit_mb=64)
    async with await client.run_container(args) as sandbox:
        result = await sandbox.run_shell(MEMORY_BOMB, timeout=60)
        assert result.oom_killed
        assert not result.timed_out
        assert result.exit_code == 137
        after = await sandbox.run_shell("echo alive")
        assert (after.stdout, after.oom_killed) == ("alive\n", False)
        assert (await sandbox.metrics()).oom_kills >= 1
        assert "memory" in (await sandbox.stop()).limits_hit


async def test_a_fork_bomb_stays_in_its_sandbox(client: DSecClient, stack: Stack, sandbox: Sandbox) -> None:
    """The limit of processes holds, a neighbour works, and the sandbox can still be stopped."""
    args = DSecContainerRunArgs(container_image=stack.image, pids_limit=64, memory_limit_mb=128)
    bombed = await client.run_container(args)
    bomb = asyncio.create_task(bombed.run_shell(FORK_BOMB, timeout=30))
    for _ in range(20):
        assert (await sandbox.run_shell("true", timeout=20)).ok
    assert (await bombed.metrics()).pids <= 64
    info = await asyncio.wait_for(bombed.stop(), 30)
    assert info.state == "stopped"
    assert "pids" in info.limits_hit
    with pytest.raises((SandboxGone, OutcomeUnknown)):
        await bomb


async def test_a_command_that_ignores_term_is_killed_after_the_grace(sandbox: Sandbox) -> None:
    """The whole tree is gone and the output so far comes with the result."""
    begin = time.monotonic()
    script = "trap '' TERM; echo before; sh -c 'trap \"\" TERM; sleep 1000' & while :; do sleep 1000; done"
    result = await sandbox.run_shell(script, timeout=0.5, grace=0.5)
    assert result.timed_out
    assert result.signal == "SIGKILL"
    assert result.exit_code == 137
    assert result.stdout == "before\n"
    assert time.monotonic() - begin < 10
    assert "sleep" not in (await sandbox.run_shell("ps")).stdout


async def test_a_command_that_obeys_term_may_clean_up(sandbox: Sandbox) -> None:
    """Within the grace it ends by itself; still it is a timeout."""
    script = "trap 'echo bye; exit 3' TERM; while :; do sleep 0.1; done"
    result = await sandbox.run_shell(script, timeout=0.5, grace=20)
    assert (result.timed_out, result.exit_code, result.stdout) == (True, 3, "bye\n")


async def test_children_that_keep_the_pipes_do_not_hold_the_result(sandbox: Sandbox) -> None:
    """A foreground command ends when its main process ends; a child that ran on in the background goes on."""
    begin = time.monotonic()
    result = await sandbox.run_shell("sleep 1000 & echo started; exit 5", timeout=60)
    assert (result.exit_code, result.stdout, result.timed_out) == (5, "started\n", False)
    assert time.monotonic() - begin < 10
    assert "sleep 1000" in (await sandbox.run_shell("ps")).stdout


async def test_orphans_are_reaped(sandbox: Sandbox) -> None:
    """No zombie stays under pid 1."""
    await sandbox.run_shell("for i in 1 2 3 4 5; do (sleep 0.1 &) ; done; sleep 0.5")
    assert "Z" not in (await sandbox.run_shell("grep -h ^State: /proc/[0-9]*/status | cut -f2")).stdout


async def test_open_files_and_cpu_are_limited(client: DSecClient, stack: Stack) -> None:
    """The command sees its own limit of files; a loop gets no more CPU than allowed."""
    args = DSecContainerRunArgs(container_image=stack.image, open_files_limit=128, cpu_cores_limit=0.25)
    async with await client.run_container(args) as sandbox:
        assert (await sandbox.run_shell("ulimit -n")).stdout == "128\n"
        begin = time.monotonic()
        before = (await sandbox.metrics()).cpu_seconds
        await sandbox.run_shell("while :; do :; done", timeout=2, grace=0)
        used = (await sandbox.metrics()).cpu_seconds - before
        assert used <= 0.25 * (time.monotonic() - begin) + 0.25


async def test_an_idle_sandbox_is_stopped_and_says_why(client: DSecClient, stack: Stack) -> None:
    """Idle and hard limits of its life end it; a command that runs keeps it from being idle."""
    short = DSecContainerRunArgs(container_image=stack.image, ttl_running_stop=1)
    idle = await client.run_container(short)
    busy = await client.run_container(short)
    hard = await client.run_container(DSecContainerRunArgs(container_image=stack.image, ttl_hard=2))
    assert (await busy.run_shell("sleep 3; echo done")).stdout == "done\n"
    assert (await idle.refresh()).cause == "idle_ttl"
    assert (await hard.refresh()).cause == "hard_ttl"
    assert idle.info.state == "expired"
    assert not idle.info.is_infra


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Give a file system of 640 MiB (not tmpfs: EROFS does not mount from its files)."""
    image = tmp_path / "disk"
    with image.open("wb") as file:
        file.truncate(640 * 1024 * 1024)
    subprocess.run(["mkfs.ext4", "-q", image], check=True)
    with tempfile.TemporaryDirectory(prefix="opendsec-small-") as folder:
        subprocess.run(["mount", "-o", "loop", image, folder], check=True)
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.mark.timeout(180)
async def test_a_full_host_disk_is_said_and_passes(small_disk: Path) -> None:
    """Creates are refused below the threshold; running sandboxes keep answering; with room it works again."""
    settings = {"OPENDSEC_EDGE__MIN_DISK_FREE_BYTES": str(8 * 1024 * 1024), "OPENDSEC_SCRATCH__KIND": "folder"}
    with Stack(small_disk / "data", settings) as stack:
        stack.import_image()
        async with stack.client(retry_seconds=1) as client:
            args = DSecContainerRunArgs(container_image=stack.image)
            sandbox = await client.run_container(args)
            filler = small_disk / "filler"
            with filler.open("wb") as file:
                try:
                    while True:
                        file.write(b"x" * 65536)
                        file.flush()
                except OSError:
                    pass
            with pytest.raises((CapacityUnavailable, DiskFull, TimeoutError)):
                await client.run_container(args, timeout=3)
            with pytest.raises(DiskFull):
                await sandbox.files.write("/tmp/big", b"x" * 1024 * 1024)
            # A result that could not be kept is not begun; one that still fits is right.
            with contextlib.suppress(Unavailable, DiskFull):
                assert (await sandbox.run_shell("exit 3")).exit_code == 3
            filler.unlink()
            assert (await sandbox.run_shell("echo again")).stdout == "again\n"
            async with await client.run_container(args, timeout=30) as second:
                assert (await second.run_shell("true")).ok
            await sandbox.stop()
        stack.stop()
        assert stack.leaks() == {}


async def test_disk_limits_are_refused_where_they_cannot_be_kept(tmp_path: Path) -> None:
    """A plain folder as scratch has no limits, so asking for one fails."""
    from opendsec import UnsupportedCapability

    with Stack(settings={"OPENDSEC_SCRATCH__KIND": "folder"}) as stack:
        stack.import_image()
        async with stack.client() as client:
            with pytest.raises(UnsupportedCapability, match="disk"):
                await client.run_container(DSecContainerRunArgs(container_image=stack.image, disk_limit_mb=16))
            async with await client.run_container(DSecContainerRunArgs(container_image=stack.image)) as sandbox:
                assert (await sandbox.run_shell("echo x > /tmp/x; cat /tmp/x")).stdout == "x\n"
        stack.stop()
        assert stack.leaks() == {}
