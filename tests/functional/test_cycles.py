"""Many lives one after the other leave the host as it was; a flood in one sandbox does not disturb another."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import psutil
import pytest
from tests.functional.stack import Stack

from opendsec import DSecContainerRunArgs

CYCLES = int(os.environ.get("OPENDSEC_CYCLES", "1000"))
CONCURRENCY = 6


def host_state(stack: Stack) -> dict[str, int]:
    """Count everything on the host that a sandbox is made of."""
    cgroups = sum(1 for _ in Path("/sys/fs/cgroup").glob("*/opendsec*/**/"))
    return {
        "mounts": len(Path("/proc/self/mountinfo").read_text().splitlines()),
        "cgroups": cgroups,
        "loop_devices": sum(1 for loop in Path("/sys/block").glob("loop*/loop/backing_file")),
        "subvolumes": len(stack.subvolumes()),
        "run_files": sum(1 for _ in stack.run_dir.rglob("*")),
        "edge_fds": len(list(Path(f"/proc/{stack.program('edge')}/fd").iterdir())),
    }


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_a_thousand_lives_leave_the_host_as_it_was(stack: Stack) -> None:
    """Processes, mounts, cgroups, namespaces, loop devices, subvolumes and files are as before."""
    async with stack.client() as client:
        args = DSecContainerRunArgs(container_image=stack.image, memory_limit_mb=128)

        async def life() -> None:
            sandbox = await client.run_container(args, timeout=60)
            result = await sandbox.run_shell("echo alive > /tmp/x; cat /tmp/x")
            assert result.stdout == "alive\n", result
            await sandbox.stop()

        async def lives(count: int) -> None:
            gate = asyncio.Semaphore(CONCURRENCY)

            async def one() -> None:
                async with gate:
                    await life()

            async with asyncio.TaskGroup() as group:
                for _ in range(count):
                    group.create_task(one())

        await lives(20)
        before = host_state(stack)
        await lives(CYCLES)
        after = host_state(stack)
    # The pool of worker threads and connections may differ by a few descriptors, never by one per life.
    assert abs(after.pop("edge_fds") - before.pop("edge_fds")) <= CONCURRENCY * 4
    assert after == before
    assert stack.leaks() == {}


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_a_flood_in_one_sandbox_leaves_memory_and_neighbours_alone(stack: Stack) -> None:
    """``yes`` for 20 s: edge memory grows by at most 64 MiB, and the neighbour works on (times: benchmarks/flood)."""
    async with stack.client() as client:
        args = DSecContainerRunArgs(container_image=stack.image, memory_limit_mb=128)
        noisy, quiet = await client.run_container(args), await client.run_container(args)
        await quiet.run_shell("true")
        edge = psutil.Process(stack.program("edge"))
        base = edge.memory_info().rss
        flood = asyncio.create_task(noisy.run_shell("yes", timeout=20))
        peak, count = base, 0
        while not flood.done() or count < 200:
            assert (await quiet.run_shell("true")).exit_code == 0
            count += 1
            peak = max(peak, edge.memory_info().rss)
        result = await flood
        assert result.timed_out
        assert result.truncated
        assert peak - base <= 64 * 2**20
        await noisy.stop()
        await quiet.stop()
