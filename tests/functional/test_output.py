"""Output and arguments of any size and content."""

from __future__ import annotations

import asyncio
import time

import psutil
import pytest
from tests.functional.stack import Stack

from opendsec import DSecClient, DSecContainerRunArgs, InvalidArgument, Sandbox

pytestmark = [pytest.mark.root, pytest.mark.slow]

GIB = 1024**3


async def test_output_need_not_be_text(sandbox: Sandbox) -> None:
    """Bytes come back as they were written."""
    result = await sandbox.run_shell(r"printf '\377\376\000\200ok'; printf '\301' >&2")
    assert result.stdout_bytes == b"\xff\xfe\x00\x80ok"
    assert result.stderr_bytes == b"\xc1"
    assert result.stdout.endswith("ok")


async def test_an_argument_may_have_100_000_bytes(sandbox: Sandbox) -> None:
    """As an argument, as a shell line and as an environment variable."""
    long = "x" * 100_000
    assert (await sandbox.exec(["/bin/echo", "-n", long])).stdout == long
    assert (await sandbox.run_shell(f"printf %s {long}")).stdout == long
    assert (await sandbox.run_shell('printf %s "$LONG"', env={"LONG": long})).stdout == long


async def test_an_argument_beyond_the_kernels_limit_is_refused(sandbox: Sandbox) -> None:
    """A single argument of 256 KiB cannot be passed on by Linux; the error says what can."""
    with pytest.raises(InvalidArgument, match="131071"):
        await sandbox.exec(["/bin/echo", "x" * 262_144])
    assert (await sandbox.run_shell("true")).ok


async def test_standard_input_goes_through_whole(sandbox: Sandbox) -> None:
    """Megabytes of bytes arrive in order and end where they end."""
    data = bytes(range(256)) * 20_000
    result = await sandbox.exec(["md5sum"], stdin=data)
    import hashlib

    assert result.stdout.split()[0] == hashlib.md5(data).hexdigest()
    assert (await sandbox.run_shell("cat | wc -c")).stdout.strip() == "0"


@pytest.mark.timeout(400)
async def test_ten_gigabytes_of_output_are_cut_and_counted(client: DSecClient, stack: Stack) -> None:
    """Head and newest rest are kept, the cut is marked and counted, the edge's memory stays bounded."""
    args = DSecContainerRunArgs(container_image=stack.image, memory_limit_mb=256)
    async with await client.run_container(args) as sandbox:
        edge = psutil.Process(stack.program("edge"))
        base = peak = edge.memory_info().rss
        begin = time.monotonic()
        script = "echo first; dd if=/dev/zero bs=1M count=10240 2>/dev/null; echo last"
        flood = asyncio.create_task(sandbox.run_shell(script, timeout=300))
        while not flood.done():
            await asyncio.wait({flood}, timeout=0.25)
            peak = max(peak, edge.memory_info().rss)
        result = await flood
        print(f"10 GiB in {time.monotonic() - begin:.0f} s, edge grew {(peak - base) / 2**20:.0f} MiB")
        assert result.exit_code == 0, result.stderr
        assert result.truncated
        assert result.stdout_total == 10 * GIB + len("first\nlast\n")
        assert result.stdout_bytes.startswith(b"first\n")
        assert result.stdout_bytes.endswith(b"last\n")
        assert b"bytes cut" in result.stdout_bytes
        assert len(result.stdout_bytes) <= 17 * 1024 * 1024
        assert peak - base <= 64 * 2**20


async def test_output_is_followed_from_an_offset(sandbox: Sandbox) -> None:
    """A second reader gets the same bytes; one that knows the beginning gets the rest."""
    process = await sandbox.start("for i in 1 2 3; do echo line$i; done; echo err >&2")
    result = await process.wait(30)
    assert (result.stdout, result.stderr) == ("line1\nline2\nline3\n", "err\n")
    again = sandbox.attach(process.id, offsets=(6, 0))
    out = b"".join([event.data async for event in again if event.stream == "stdout"])
    assert out == b"line2\nline3\n"


async def test_a_process_is_fed_signalled_and_followed(sandbox: Sandbox) -> None:
    """Standard input, output as it comes, and signals of one running command."""
    process = await sandbox.start(
        "trap 'echo got; exit 7' USR1; echo ready; read line; echo $line; while :; do sleep 1 & wait; done", stdin=True
    )
    seen = b""
    async for event in process:
        seen += event.data
        if seen == b"ready\n":
            await process.write_stdin("hello\n")
        if seen.endswith(b"hello\n"):
            await process.signal("USR1")
    assert seen == b"ready\nhello\ngot\n"
    assert (await process.wait(30)).exit_code == 7
