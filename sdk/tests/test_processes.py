"""Running commands: followed, fed, signalled, and found again after a broken connection."""

from __future__ import annotations

import asyncio

import pytest

from opendsec import Conflict, NotFound, WaitTimeout


async def test_output_comes_while_the_command_runs(server, sandbox):
    """Each piece is seen before the command goes on."""
    step = asyncio.Event()

    @server.on_command
    async def stepwise(command):
        command.write("one")
        await step.wait()
        command.write("two", stream="stderr")
        return 9

    process = await sandbox.start("stepwise")
    events = []
    async for event in process:
        events.append((event.stream, event.text, event.offset))
        step.set()
    assert events == [("stdout", "one", 0), ("stderr", "two", 0)]
    assert process.offsets == (3, 3)
    assert (await process.wait()).exit_code == 9


async def test_a_broken_stream_is_taken_up_without_loss_or_repetition(server, sandbox):
    """The iterator attaches again from its offsets, also when a line was cut in the middle."""
    server.break_connection("GET", "/output$", when="cut", times=3)
    server.break_connection("GET", "/output$", when="before", times=1)

    @server.on_command
    async def talk(command):
        for number in range(100):
            command.write(f"{number}\n")
            await asyncio.sleep(0)
        return 0

    process = await sandbox.start("talk")
    data = b"".join([event.data async for event in process])
    assert data == b"".join(b"%d\n" % number for number in range(100))
    assert server.seen["GET /v1/sandboxes/*/execs/*/output"] >= 5


async def test_a_silent_command_is_followed_for_as_long_as_it_takes(server, client, sandbox, monkeypatch):
    """A stream without a byte is attached again and again: silence is no failure."""
    original = client._transport.stream
    monkeypatch.setattr(client._transport, "stream", lambda *args, **more: original(*args, **{**more, "idle": 0.01}))
    client._transport.retry_seconds = 0.0
    gate = asyncio.Event()

    @server.on_command
    async def quiet(command):
        await gate.wait()
        command.write("at last")
        return 0

    process = await sandbox.start("quiet")
    task = asyncio.create_task(anext(aiter(process)))
    while server.seen["GET /v1/sandboxes/*/execs/*/output"] < 3:
        await asyncio.sleep(0.001)
    gate.set()
    assert (await task).text == "at last"


async def test_stdin_is_streamed_and_ended(sandbox):
    """What is written comes back from ``cat``, which ends when its input ends."""
    process = await sandbox.start(["cat"], stdin=True)
    await process.write_stdin("héllo ")
    await process.write_stdin(b"\xff" * 3_000_000)
    await process.close_stdin()
    result = await process.wait()
    assert result.stdout_bytes == "héllo ".encode() + b"\xff" * 3_000_000
    await process.close_stdin()
    with pytest.raises(Conflict):
        await process.write_stdin("late")


async def test_waiting_has_its_own_timeout(sandbox):
    """The caller stops waiting; the command goes on."""
    process = await sandbox.start("sleep 30")
    with pytest.raises(WaitTimeout) as caught:
        await process.wait(timeout=0.02)
    assert isinstance(caught.value, TimeoutError)
    assert (await process.info()).state == "running"
    await process.kill()
    result = await process.wait()
    assert (result.exit_code, result.signal) == (137, "SIGKILL")


async def test_killing_what_has_ended_does_no_harm(sandbox):
    """A signal to what has ended is refused, a kill is not."""
    process = await sandbox.start("true")
    await process.wait()
    await process.kill()
    with pytest.raises(NotFound):
        await process.signal("INT")


async def test_signals_reach_the_command(server, sandbox):
    """The command sees the signal and ends as it likes."""

    @server.on_command
    async def trap(command):
        command.write(await command.wait_signal())
        return 2

    process = await sandbox.start("trap")
    await process.signal("INT")
    assert (await process.wait()).stdout == "INT"


async def test_a_block_kills_its_command(sandbox):
    """What a block started ends with it."""
    async with await sandbox.start("sleep 30") as process:
        assert (await process.info()).state == "running"
    assert (await process.wait()).signal == "SIGKILL"


async def test_a_cancelled_start_leaves_nothing(server, sandbox):
    """Nobody would know the id of what it started."""
    hold = server.hold("POST", "/execs$")
    task = asyncio.create_task(sandbox.start("sleep 30"))
    await hold.reached.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not server.sandboxes[sandbox.id].execs


async def test_another_client_attaches_by_id(server, sandbox):
    """An exec id and offsets are all that is needed."""
    process = await sandbox.start("echo hello")
    await process.wait()
    async with server.client() as other:
        again = (await other.get(sandbox.id)).attach(process.id, offsets=(2, 0))
        assert [event.text async for event in again] == ["llo\n"]
        with pytest.raises(NotFound):
            await (await other.get(sandbox.id)).attach("unknown").wait()


async def test_output_without_following_stops_at_what_is_there(server, sandbox):
    """``follow=False`` reads what has been written so far."""
    gate = asyncio.Event()

    @server.on_command
    async def talk(command):
        command.write("so far")
        await gate.wait()
        return 0

    process = await sandbox.start("talk")
    assert [event.text async for event in process.output(follow=False)] == ["so far"]
    gate.set()


async def test_execs_are_listed(sandbox):
    """All commands on record, running or ended."""
    await sandbox.run_shell("true", exec_id="first")
    await sandbox.start("sleep 30", exec_id="second")
    assert [(one.id, one.state) for one in await sandbox.execs()] == [("first", "exited"), ("second", "running")]
