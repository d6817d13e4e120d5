"""Clients and our own processes die at bad moments: no wrong result, nothing lost, nothing left."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import textwrap
import time

import pytest
from tests.functional.stack import Stack

from opendsec import DSecClient, DSecContainerRunArgs, OutcomeUnknown, Sandbox, SandboxGone
from opendsec_server.testing.local import ProgramName

pytestmark = [pytest.mark.root, pytest.mark.slow]

#: A client that creates (or runs something in) a sandbox and tells when it has begun.
CREATOR = """
import asyncio, sys
from opendsec import DSecClient, DSecContainerRunArgs
async def main():
    async with DSecClient(sys.argv[1], sys.argv[2], lease_seconds=1.5) as client:
        args = DSecContainerRunArgs(container_image=sys.argv[3], labels={"by": "victim"})
        print("begun", flush=True)
        await asyncio.gather(*(client.run_container(args) for _ in range(8)))
        await asyncio.sleep(1000)
asyncio.run(main())
"""
RUNNER = """
import asyncio, sys
from opendsec import DSecClient
async def main():
    async with DSecClient(sys.argv[1], sys.argv[2]) as client:
        sandbox = await client.get(sys.argv[3])
        line = "touch /tmp/begun; sleep 1; echo result; exit 9"
        task = asyncio.create_task(sandbox.run_shell(line, exec_id="orphan"))
        while not await sandbox.files.exists("/tmp/begun"):
            pass
        print("begun", flush=True)
        await task
asyncio.run(main())
"""


async def start_client(program: str, *argv: str) -> asyncio.subprocess.Process:
    """Start a client process and wait until it says that it has begun."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", textwrap.dedent(program), *argv, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    assert await asyncio.wait_for(process.stdout.readline(), 60) == b"begun\n"
    return process


async def until(condition, seconds: float = 30.0) -> None:
    """Wait until an async condition holds."""
    deadline = time.monotonic() + seconds
    while not await condition():
        assert time.monotonic() < deadline, "the condition never came true"
        await asyncio.sleep(0.05)


async def test_sandboxes_of_a_client_killed_mid_create_are_reaped(client: DSecClient, stack: Stack) -> None:
    """What nobody claimed is stopped when its lease ends; nothing has to be known about it."""
    victim = await start_client(CREATOR, stack.url, stack.api_key, stack.image)
    victim.kill()
    await victim.wait()

    async def gone() -> bool:
        return (
            await client.list(labels={"by": "victim"}, states=["requested", "preparing", "running", "stopping"]) == []
        )

    await asyncio.sleep(0.3)  # creates that are under way may still come
    await until(gone)
    ended = await client.list(labels={"by": "victim"})
    assert {sandbox.info.cause for sandbox in ended} <= {"unclaimed", "deleted", "create_failed"}


async def test_a_command_outlives_its_client(client: DSecClient, sandbox: Sandbox, stack: Stack) -> None:
    """Another client finds the real result under the same id."""
    victim = await start_client(RUNNER, stack.url, stack.api_key, sandbox.id)
    victim.kill()
    await victim.wait()
    result = await sandbox.attach("orphan").wait(30)
    assert (result.exit_code, result.stdout) == (9, "result\n")


async def test_cancelling_a_call_kills_its_command(sandbox: Sandbox) -> None:
    """Nothing of it runs on, not even a child in a session of its own."""
    task = asyncio.create_task(sandbox.run_shell("touch /tmp/begun; setsid sleep 777 & sleep 777"))

    async def begun() -> bool:
        return await sandbox.files.exists("/tmp/begun")

    await until(begun)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    async def gone() -> bool:
        return "sleep 777" not in (await sandbox.run_shell("ps")).stdout

    await until(gone)


@pytest.mark.parametrize("name", ["edge", "apiserver"])
async def test_a_killed_program_changes_no_result(
    client: DSecClient, sandbox: Sandbox, stack: Stack, name: ProgramName
) -> None:
    """A command that runs meanwhile gives its real exit code and every byte once; the sandbox keeps its state."""
    await sandbox.run_shell("echo kept > /tmp/kept")
    script = (
        "i=0; while [ $i -lt 3000 ]; do echo line $i; i=$((i+1)); [ $((i % 100)) = 0 ] && sleep 0.05; done; exit 42"
    )
    running = asyncio.create_task(sandbox.run_shell(script))
    followed = await sandbox.start(script)
    seen: list[bytes] = []

    async def follow() -> None:
        async for event in followed:
            assert event.lost == 0
            seen.append(event.data)

    follower = asyncio.create_task(follow())
    for _ in range(3):
        await asyncio.sleep(0.25)
        os.kill(await stack.wait_program(name), signal.SIGKILL)
        await stack.wait_program(name)
    result = await running
    await follower
    expected = "".join(f"line {i}\n" for i in range(3000))
    assert result.exit_code == 42
    assert result.stdout == expected
    assert b"".join(seen).decode() == expected
    assert (await followed.wait(30)).exit_code == 42
    assert (await sandbox.run_shell("cat /tmp/kept")).stdout == "kept\n"


def chronus_of(stack: Stack, sandbox_id: str) -> int:
    """Return the host's process id of pid 1 of a sandbox, found by its cgroup."""
    from pathlib import Path

    for proc in Path("/proc").glob("[0-9]*"):
        try:
            if (
                sandbox_id in (proc / "cgroup").read_text()
                and (proc / "status").read_text().split("NSpid:")[1].split("\n")[0].split()[-1] == "1"
            ):
                return int(proc.name)
        except OSError:
            continue
    raise AssertionError(f"no pid 1 of {sandbox_id}")


async def test_a_killed_chronus_ends_the_sandbox_and_says_so(
    client: DSecClient, sandbox: Sandbox, stack: Stack
) -> None:
    """A running command ends with an error of the platform, never with an invented exit code."""
    running = asyncio.create_task(sandbox.run_shell("sleep 1000"))
    await sandbox.run_shell("true")
    os.kill(chronus_of(stack, sandbox.id), signal.SIGKILL)
    with pytest.raises((SandboxGone, OutcomeUnknown)):
        await running
    info = await sandbox.stop()  # it is ending already: this waits for it and changes nothing
    assert (info.state, info.cause) == ("failed", "chronus_lost")
    with pytest.raises(SandboxGone):
        await sandbox.run_shell("true")


async def test_a_sandbox_cannot_end_its_own_chronus(sandbox: Sandbox) -> None:
    """Root inside cannot kill, trace or read pid 1."""
    result = await sandbox.run_shell("kill -9 1; kill -STOP 1; cat /proc/1/mem; cat /proc/1/environ; echo tried")
    assert result.stdout == "tried\n"
    assert (await sandbox.run_shell("echo alive")).stdout == "alive\n"


@pytest.mark.timeout(180)
async def test_sandboxes_live_on_while_the_server_is_away() -> None:
    """Stopped politely or killed: the next start adopts what runs, results included, and cleans up the rest."""
    with Stack() as stack:
        stack.import_image()
        async with stack.client() as client:
            sandbox = await client.run_container(DSecContainerRunArgs(container_image=stack.image))
            await sandbox.run_shell("echo kept > /tmp/kept")
            process = await sandbox.start("sleep 3; echo late; exit 4")
        stack.stop()
        stack.start()
        async with stack.client() as client:
            sandbox = await client.get(sandbox.id)
            assert sandbox.info.state == "running"
            assert (await sandbox.run_shell("cat /tmp/kept")).stdout == "kept\n"
            stack.kill()
            stack.start()
            result = await sandbox.attach(process.id).wait(60)
            assert (result.exit_code, result.stdout) == (4, "late\n")
            await sandbox.stop()
        stack.stop()
        assert stack.leaks() == {}
