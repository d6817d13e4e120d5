"""Commands: results are data, platform failures are typed errors, and a command runs exactly once."""

from __future__ import annotations

import asyncio
import pickle

import pytest

from opendsec import (
    CommandFailed,
    CommandTimedOut,
    ExecTimeout,
    OutcomeUnknown,
    SandboxGone,
    Unauthenticated,
    Unavailable,
)
from opendsec.testing import FakeServer


async def test_run_shell_gives_output_and_exit_code(sandbox):
    """The paper's call: output and exit code of a shell line."""
    result = await sandbox.run_shell("echo hello world")
    assert (result.stdout, result.stderr, result.exit_code, result.ok) == ("hello world\n", "", 0, True)
    assert result.stdout_bytes == b"hello world\n"
    assert result.stdout_total == 12


async def test_a_failing_command_is_a_result(sandbox):
    """An exit code is data."""
    result = await sandbox.run_shell("exit 3")
    assert (result.exit_code, result.ok) == (3, False)


async def test_check_raises_with_the_result(sandbox):
    """``check=True`` makes an error of it that carries the result and survives pickling."""
    with pytest.raises(CommandFailed) as caught:
        await sandbox.run_shell("exit 3", check=True)
    assert caught.value.result.exit_code == 3
    assert pickle.loads(pickle.dumps(caught.value)).result == caught.value.result


async def test_exec_passes_arguments_untouched(sandbox):
    """No shell looks at the arguments of ``exec``."""
    result = await sandbox.exec(["echo", "a  b", "$HOME", "*"])
    assert result.stdout == "a  b $HOME *\n"


async def test_exec_refuses_a_string(sandbox):
    """A string where a list belongs is a mistake worth naming."""
    with pytest.raises(TypeError, match="run_shell"):
        await sandbox.exec("echo hi")


async def test_output_that_is_no_utf8_is_kept(server, sandbox):
    """Text replaces what it cannot show; the bytes are there."""

    @server.on_command
    async def raw(command):
        command.write(b"a\xff\xfeb")
        return 0

    result = await sandbox.run_shell("raw")
    assert result.stdout == "a\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}b"
    assert result.stdout_bytes == b"a\xff\xfeb"


async def test_stdin_is_passed_and_empty_by_default(sandbox):
    """``cat`` ends at once if nobody gave it input."""
    assert (await sandbox.run_shell("cat", stdin="héllo")).stdout == "héllo"
    assert (await sandbox.run_shell("cat")).stdout == ""


async def test_timeout_is_data_with_partial_output(server, sandbox):
    """A command that ran out of its time has a result with what it wrote."""

    @server.on_command
    async def slow(command):
        command.write("partial")
        await asyncio.Event().wait()

    result = await sandbox.run_shell("slow", timeout=0.05)
    assert (result.timed_out, result.stdout, result.ok) == (True, "partial", False)
    with pytest.raises(ExecTimeout) as caught:
        await sandbox.run_shell("slow", timeout=0.05, check=True)
    assert isinstance(caught.value, CommandTimedOut | TimeoutError)
    assert caught.value.result.stdout == "partial"


async def test_fields_reach_the_platform(server, sandbox):
    """cwd, env, user and shell are fields, never glued into the line."""
    seen = []

    @server.on_command
    async def look(command):
        seen.append(command.request)
        return 0

    await sandbox.run_shell(
        "x", cwd="/a b", env={"K": "v"}, user="nobody:nogroup", shell_program="bash", grace=0.5, exec_id="mine"
    )
    request = seen[0]
    assert (request.cwd, request.env, request.user) == ("/a b", {"K": "v"}, "nobody:nogroup")
    assert (request.shell_program, request.grace_seconds, request.id) == ("bash", 0.5, "mine")


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_lost_connection_does_not_run_a_command_twice(server, sandbox, when):
    """The exec id makes the repeated request the same command."""
    runs = []

    @server.on_command
    async def count(command):
        runs.append(command.line)
        command.write("done")
        return 7

    server.break_connection("POST", "/execs$", when=when, times=2)
    result = await sandbox.run_shell("append >> file")
    assert (result.exit_code, result.stdout, runs) == (7, "done", ["append >> file"])


async def test_waiting_goes_on_after_the_first_answer(server, sandbox, monkeypatch):
    """A long command is waited for in several requests, and a broken one of them does no harm."""
    monkeypatch.setattr("opendsec._execs.WAIT_CHUNK", 0.01)
    gate = asyncio.Event()

    @server.on_command
    async def slow(command):
        await gate.wait()
        return 5

    server.break_connection("GET", "/execs/", when="before")
    task = asyncio.create_task(sandbox.run_shell("slow"))
    while server.seen["GET /v1/sandboxes/*/execs/*"] < 3:
        await asyncio.sleep(0)
    gate.set()
    assert (await task).exit_code == 5


async def test_a_retryable_refusal_is_repeated(server, sandbox):
    """``unavailable`` says that nothing happened."""
    server.fail("POST", "/execs$", Unavailable("restarting", retry_after=0.001), times=3)
    assert (await sandbox.run_shell("true")).ok
    assert server.seen["POST /v1/sandboxes/*/execs"] == 4


async def test_other_refusals_are_not_repeated(server, sandbox):
    """An error that the same request meets again is raised at once."""
    server.fail("POST", "/execs$", SandboxGone("it is over", cause="oom"))
    with pytest.raises(SandboxGone) as caught:
        await sandbox.run_shell("true")
    assert caught.value.detail["cause"] == "oom"
    assert server.seen["POST /v1/sandboxes/*/execs"] == 1


async def test_retries_end(server, args):
    """After ``retry_seconds`` the last error is raised."""
    async with server.client(retry_seconds=0.1) as client:
        sandbox = await client.run_container(args)
        server.fail("POST", "/execs$", Unavailable("down"), times=1000)
        with pytest.raises(Unavailable):
            await sandbox.run_shell("true")
    assert 2 <= server.seen["POST /v1/sandboxes/*/execs"] < 10


async def test_a_lost_exec_is_an_error_of_the_platform(server, sandbox):
    """An unknown outcome is never dressed as a result."""

    @server.on_command
    async def lose(command):
        record = server.sandboxes[sandbox.id].execs[command.request.id]
        record.view.state = "lost"
        record.wake()
        await asyncio.Event().wait()

    with pytest.raises(OutcomeUnknown) as caught:
        await sandbox.run_shell("lose")
    assert caught.value.is_infra


async def test_cancelling_kills_the_command(server, sandbox):
    """A cancelled call leaves no process behind."""
    started, killed = asyncio.Event(), asyncio.Event()

    @server.on_command
    async def forever(command):
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            killed.set()

    task = asyncio.create_task(sandbox.run_shell("forever"))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert killed.is_set()
    assert not server.sandboxes[sandbox.id].execs


async def test_a_detached_command_survives_cancellation(server, sandbox):
    """``detach`` lets it go on; its id finds it again."""
    started, gate = asyncio.Event(), asyncio.Event()

    @server.on_command
    async def forever(command):
        started.set()
        await gate.wait()
        return 4

    task = asyncio.create_task(sandbox.run_shell("forever", detach=True, exec_id="keep"))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    gate.set()
    assert (await sandbox.attach("keep").wait()).exit_code == 4


async def test_a_start_that_arrives_after_its_cancellation_is_killed(server, sandbox, client):
    """The kill is repeated while the platform does not know the command yet."""
    await sandbox._execs.kill_for_good("late")
    await sandbox.start("sleep 60", exec_id="late")
    await client.close()
    assert not server.sandboxes[sandbox.id].execs


async def test_a_wrong_key_is_refused(server, args):
    """No request passes without the key."""
    server.api_key = "another"
    async with server.client() as client:
        server.api_key = "the real one"
        with pytest.raises(Unauthenticated):
            await client.run_container(args)


async def test_no_server_is_named_at_once():
    """A client of nothing says so when it is opened."""
    async with FakeServer() as server:
        client = server.client()
    with pytest.raises(Unavailable, match="no server answers"):
        await client.open(timeout=0)


async def test_a_client_must_be_open(server, args):
    """Calls before ``open`` are a mistake of the program."""
    with pytest.raises(RuntimeError, match="not open"):
        await server.client().run_container(args)
