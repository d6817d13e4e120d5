"""Commands: start, output, input, end."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from opendsec.api.errors import InvalidArgument, NotFound
from opendsec_server.channel.client import connect
from opendsec_server.testing.channel import RecordingSink, run, shell, spec


async def test_streams_and_exit_code_are_told_apart(channel):
    """Both streams and the code arrive, in order, with their offsets."""
    sink = await run(channel, shell("echo out; echo err >&2; exit 3"))
    assert (sink.stdout, sink.stderr) == (b"out\n", b"err\n")
    assert sink.exit.exit_code == 3
    assert (sink.exit.stdout_bytes, sink.exit.stderr_bytes) == (4, 4)
    assert sink.events[0] == "started"
    assert sink.events[-2:] == ["exited", "closed"]


async def test_output_is_bytes(channel):
    """What is not text survives."""
    sink = await run(channel, shell(r"printf '\377\000\n\200'"))
    assert sink.stdout == b"\xff\x00\n\x80"


async def test_signal_is_told(channel):
    """A command ended by a signal has 128 + n and the number."""
    sink = await run(channel, shell("kill -9 $$"))
    assert (sink.exit.exit_code, sink.exit.signal) == (137, 9)


@pytest.mark.parametrize(
    ("program", "code"), [("no-such-program", 127), ("/no/such", 127), ("/etc/passwd", 126), ("/", 126)]
)
async def test_a_program_that_cannot_run_is_data(channel, program, code):
    """127 or 126 with the reason on stderr, as a shell has it."""
    sink = await run(channel, spec(program))
    assert sink.exit.exit_code == code
    assert sink.exit.start_error
    assert program.encode() in sink.stderr
    assert "started" not in sink.events


async def test_cwd_that_does_not_exist_is_data(channel):
    """A wrong directory is the command's failure."""
    sink = await run(channel, spec("true", cwd="/no/such"))
    assert sink.exit.exit_code == 126
    assert b"/no/such" in sink.stderr


async def test_environment_is_what_was_asked(channel):
    """Nothing of chronus' own environment leaks; HOME and USER come from passwd."""
    sink = await run(channel, spec("/usr/bin/env", env={"A": "1 2", "PATH": "/bin"}, id="marked"))
    lines = set(sink.stdout.decode().splitlines())
    assert lines == {"A=1 2", "PATH=/bin", "HOME=/root", "USER=root", "LOGNAME=root", "OPENDSEC_EXEC_ID=marked"}


async def test_user_by_name_and_number(channel):
    """Ids and groups are set as asked, and a home without entry is the root."""
    by_name = await run(channel, spec("id", user="nobody"))
    assert by_name.stdout.startswith(b"uid=65534(nobody) gid=65534(nogroup)")
    by_number = await run(channel, shell("id -u; id -g; echo $HOME", user="4242:77"))
    assert by_number.stdout.split() == [b"4242", b"77", b"/"]


@pytest.mark.parametrize("user", ["no-such-user", "0:no-such-group", "99999999999", "-1"])
async def test_impossible_user_is_refused(channel, user):
    """A user that does not exist is the caller's mistake; nothing is recorded."""
    with pytest.raises(InvalidArgument):
        await channel.exec_start(spec("true", user=user), RecordingSink())
    assert await channel.exec_list() == []


@pytest.mark.parametrize(
    "fields",
    [
        {"argv": []},
        {"argv": [b"a\0b"]},
        {"env": {"A=B": "1"}},
        {"env": {"": "1"}},
        {"env": {"A": "\0"}},
        {"rlimits": {"nonsense": (1, 1)}},
        {"rlimits": {"nofile": (5, 2)}},
        {"id": "not an id"},
        {"id": "x" * 101},
    ],
)
async def test_malformed_commands_are_refused(channel, fields):
    """Each malformed field has a typed error, and the connection goes on."""
    import msgspec

    with pytest.raises(InvalidArgument):
        await channel.exec_start(msgspec.structs.replace(spec("true"), **fields), RecordingSink())
    await channel.ping()


async def test_rlimits_and_umask(channel):
    """Limits asked for hold; the file mask is 022."""
    sink = await run(channel, shell("ulimit -n; ulimit -Hn; umask", rlimits={"nofile": (77, 99), "core": (-1, -1)}))
    assert sink.stdout.split() == [b"77", b"99", b"0022"]


async def test_child_inherits_no_descriptor_and_no_signal_state(channel):
    """Only the three standard streams are open; nothing is blocked or ignored."""
    sink = await run(channel, shell("ls /proc/$$/fd; grep -E 'Sig(Blk|Ign)' /proc/self/status", stdin=False))
    words = sink.stdout.split()
    assert words[:3] == [b"0", b"1", b"2"]
    assert words[3:] == [b"SigBlk:", b"0" * 16, b"SigIgn:", b"0" * 16]


async def test_shells_of_the_platform(channel):
    """@sh and @bash need no PATH."""
    sink = await run(channel, spec("@bash", "-c", "echo $BASH_VERSION $0", env={"PATH": "/nowhere"}))
    assert sink.stdout.strip().endswith(b"bash")


async def test_arguments_of_100000_bytes(channel):
    """Long arguments arrive; too long ones are the command's failure."""
    sink = await run(channel, spec("@sh", "-c", "echo ${#1}", "x", b"a" * 100_000))
    assert sink.stdout == b"100000\n"
    sink = await run(channel, spec("@sh", "-c", "true", b"a" * 200_000))
    assert sink.exit.exit_code == 126


async def test_stdin_is_empty_unless_asked(channel):
    """Reading standard input gives end of file."""
    sink = await run(channel, spec("cat"))
    assert sink.exit.exit_code == 0
    assert sink.stdout == b""


async def test_stdin_streams_with_backpressure(channel):
    """Megabytes pass through a command that reads slowly, in order; end of file ends it."""
    data = os.urandom(1_000_000)
    command = spec("cat", stdin=True)
    sink = RecordingSink()
    await channel.exec_start(command, sink)
    await channel.exec_stdin(command.id, data[:400_000])
    await channel.exec_stdin(command.id, data[400_000:])
    await channel.exec_stdin_close(command.id)
    await sink.wait_for("closed")
    assert sink.stdout == data


async def test_stdin_that_nobody_reads_blocks_only_its_writer(channel):
    """A stuck writer waits; others go on; when the command ends the writer is freed."""
    command = spec("sleep", "1000", stdin=True)
    sink = RecordingSink()
    await channel.exec_start(command, sink)
    writer = asyncio.ensure_future(channel.exec_stdin(command.id, bytes(1_000_000)))
    assert (await run(channel, shell("echo fine"))).stdout == b"fine\n"
    assert not writer.done()
    await channel.exec_signal(command.id, signal.SIGKILL)
    await sink.wait_for("closed")
    with pytest.raises(NotFound):
        await writer


async def test_signal_reaches_the_command(channel):
    """A trapped signal is seen by the command; one to an ended command is an error."""
    command = shell("trap 'echo got; exit 9' USR1; echo ready; while :; do sleep 0.02; done")
    sink = RecordingSink()
    await channel.exec_start(command, sink)
    await sink.wait_for("output")
    await channel.exec_signal(command.id, signal.SIGUSR1)
    exit_ = await sink.result()
    assert exit_.exit_code == 9
    assert sink.stdout == b"ready\ngot\n"
    with pytest.raises(NotFound):
        await channel.exec_signal(command.id, signal.SIGUSR1)
    with pytest.raises(InvalidArgument):
        await channel.exec_signal(command.id, 99)


async def test_foreground_ends_with_its_main_process(channel):
    """Children that hold the pipes do not delay the end; their output follows; then the streams close."""
    command = shell("(read line < /proc/$$/root/dev/stdin; sleep 0.2; echo late) & echo early")
    sink = RecordingSink()
    await channel.exec_start(command, sink)
    exit_ = await sink.result()
    assert exit_.exit_code == 0
    assert sink.stdout[: exit_.stdout_bytes] == b"early\n"
    await sink.wait_for("closed")
    assert sink.stdout == b"early\nlate\n"
    assert sink.events[-1] == "closed"
    assert "exited" in sink.events


async def test_starting_twice_attaches(channel):
    """The same id never runs twice; output comes again from the start."""
    command = shell("echo $$; sleep 1000")
    first = RecordingSink()
    await channel.exec_start(command, first)
    await first.wait_for("output")
    second = RecordingSink()
    await channel.exec_start(command, second)
    assert first.events[-1] == "lost"
    await second.wait_for("output")
    assert second.stdout == first.stdout
    assert second.pid == first.pid
    await channel.exec_stop(command.id, 0)
    await second.wait_for("closed")


async def test_attach_from_offsets_after_reconnect(socket_path):
    """A new connection continues where the old one stopped, and hears of an end that it missed."""
    channel = await connect(socket_path)
    command = shell("echo one; read x; echo two; exit 5", stdin=True)
    first = RecordingSink()
    await channel.exec_start(command, first)
    await first.wait_for("output")
    await channel.aclose()
    assert first.events[-1] == "lost"
    again = await connect(socket_path)
    assert await again.exec_list() == [command.id]
    second = RecordingSink()
    assert await again.exec_attach(command.id, (4, 0), second)
    await again.exec_stdin(command.id, b"\n")
    await second.wait_for("closed")
    assert second.stdout == b"two\n"
    assert second.exit.exit_code == 5
    third = RecordingSink()
    assert await again.exec_attach(command.id, (0, 0), third)
    await third.wait_for("closed")
    assert third.exit.exit_code == 5
    assert third.stdout.endswith(b"two\n")
    again.exec_forget(command.id)
    assert not await again.exec_attach(command.id, (0, 0), RecordingSink())
    assert not await again.exec_attach("never-heard", (0, 0), RecordingSink())
    await again.aclose()


async def test_exit_is_kept_while_nobody_is_connected(socket_path):
    """A command that ends while the host is away has its result and output when the host is back."""
    channel = await connect(socket_path)
    command = shell("read x; echo done; exit 7", stdin=True)
    sink = RecordingSink()
    await channel.exec_start(command, sink)
    await channel.exec_stdin(command.id, b"\n")
    await channel.aclose()
    again = await connect(socket_path)
    second = RecordingSink()
    assert await again.exec_attach(command.id, (0, 0), second)
    await second.wait_for("closed")
    assert second.stdout == b"done\n"
    assert second.exit.exit_code == 7
    await again.aclose()


async def test_half_dead_connection_does_not_block_a_new_one(socket_path):
    """A connection that reads nothing, and one that never says hello, leave others alone."""
    silent = [await asyncio.open_unix_connection(str(socket_path)) for _ in range(3)]
    channel = await connect(socket_path)
    assert (await run(channel, shell("echo fine"))).stdout == b"fine\n"
    await channel.aclose()
    for _, writer in silent:
        writer.close()
        await writer.wait_closed()


async def test_many_at_once(channel):
    """Two hundred commands at a time each get their own result."""

    async def one(n: int) -> None:
        sink = await run(channel, shell(f"echo {n}; exit {n % 100}"))
        assert sink.stdout == b"%d\n" % n
        assert sink.exit.exit_code == n % 100

    await asyncio.gather(*(one(n) for n in range(200)))
    assert await channel.exec_list() == []
