"""The in-memory backend keeps what an edge relies on."""

from __future__ import annotations

import pytest

from opendsec.api.errors import DiskFull, NotFound, SandboxGone, Unavailable
from opendsec.api.models import ImageConfig, Limits
from opendsec_server.backends.protocol import Backend
from opendsec_server.channel.interface import Channel, ExecSpec
from opendsec_server.core.spec import SandboxSpec
from opendsec_server.testing.backend import FakeBackend
from opendsec_server.testing.channel import RecordingSink

ID = "local-aaaaaaaaaaaa"


def spec(sandbox_id: str = ID) -> SandboxSpec:
    return SandboxSpec(
        id=sandbox_id,
        backend="container",
        runtime="runc",
        layers=(),
        config=ImageConfig(),
        limits=Limits(),
        hostname=sandbox_id,
    )


def shell(line: str, exec_id: str = "e", **more) -> ExecSpec:
    return ExecSpec(id=exec_id, argv=[b"@sh", b"-c", line.encode()], env={}, cwd="/", user="0", **more)


@pytest.fixture
async def backend():
    return FakeBackend()


@pytest.fixture
async def channel(backend):
    return await backend.start(spec())


async def test_it_is_a_backend_with_channels(backend, channel):
    """Both protocols are met in names and kinds."""
    for protocol, thing in ((Backend, backend), (Channel, channel)):
        for name in (name for name in dir(protocol) if not name.startswith("_")):
            assert hasattr(thing, name), name


async def test_output_and_exit_code_of_a_line(channel):
    """Each stream is told apart and the code is the line's."""
    sink = RecordingSink()
    await channel.exec_start(shell("echo out; echo err >&2; exit 3"), sink)
    assert (await sink.result()).exit_code == 3
    await sink.wait_for("closed")
    assert (sink.stdout, sink.stderr) == (b"out\n", b"err\n")


async def test_an_unknown_program_cannot_be_started(channel):
    """The end comes without a start."""
    sink = RecordingSink()
    await channel.exec_start(ExecSpec(id="e", argv=[b"/nope"], env={}, cwd="/", user="0"), sink)
    assert sink.exit is not None
    assert sink.exit.exit_code == 127
    assert "started" not in sink.events


async def test_a_repeated_start_attaches(backend, channel):
    """The id is started once and its output told again."""
    first, second = RecordingSink(), RecordingSink()
    await channel.exec_start(shell("echo a; hold x"), first)
    await first.wait_for("output")
    await channel.exec_start(shell("echo a; hold x"), second)
    backend.guests[ID].release("x")
    assert (await second.result()).exit_code == 0
    assert second.stdout == b"a\n"
    assert backend.guests[ID].starts == {"e": 1}


async def test_a_lost_connection_ends_nothing(backend, channel):
    """A new channel continues at the offset."""
    first, second = RecordingSink(), RecordingSink()
    await channel.exec_start(shell("echo a; hold x; echo b"), first)
    await first.wait_for("output")
    backend.break_channels(ID)
    assert first.events[-1] == "lost"
    with pytest.raises(Unavailable):
        await channel.ping()
    again = await backend.reconnect(ID)
    assert await again.exec_attach("e", (2, 0), second)
    backend.guests[ID].release("x")
    await second.wait_for("closed")
    assert second.stdout == b"b\n"


async def test_forgotten_execs_are_dropped_when_closed(channel):
    """The record goes once the host has it and the streams are at their end."""
    sink = RecordingSink()
    await channel.exec_start(shell("true"), sink)
    await sink.wait_for("closed")
    assert await channel.exec_list() == ["e"]
    channel.exec_forget("e")
    assert await channel.exec_list() == []


async def test_a_time_limit_ends_even_the_stubborn(channel):
    """TERM, then KILL."""
    sink = RecordingSink()
    await channel.exec_start(shell("stubborn x", timeout_ms=1, grace_ms=1), sink)
    exit_ = await sink.result()
    assert (exit_.signal, exit_.timed_out) == (9, True)


async def test_standard_input_reaches_cat(channel):
    """Bytes and their end."""
    sink = RecordingSink()
    await channel.exec_start(shell("cat", stdin=True), sink)
    await channel.exec_stdin("e", b"abc")
    await channel.exec_stdin_close("e")
    await sink.result()
    assert sink.stdout == b"abc"
    with pytest.raises(NotFound):
        await channel.exec_stdin("e", b"more")


async def test_death_is_seen_and_final(backend, channel):
    """Waiters return, the channel closes, a new one cannot be had."""
    backend.kill(ID, oom=True)
    await backend.wait_dead(ID)
    await channel.wait_closed()
    assert not await backend.alive(ID)
    assert backend.oom_kills(ID) == 1
    with pytest.raises(SandboxGone):
        await backend.reconnect(ID)
    await backend.remove(ID)
    assert await backend.inventory() == set()


async def test_a_failed_start_leaves_nothing(backend):
    """The error comes once, then starting works."""
    backend.start_error = DiskFull("full")
    with pytest.raises(DiskFull):
        await backend.start(spec())
    assert await backend.inventory() == set()
    await backend.start(spec())


async def test_files_are_kept(channel):
    """Write, read a range, list, move, remove."""

    async def data():
        yield b"hello "
        yield b"world"

    assert await channel.write_file(b"/a/b", data(), parents=True) == 11
    assert b"".join([part async for part in channel.read_file(b"/a/b", offset=6)]) == b"world"
    assert [info.path async for info in channel.list_dir(b"/", recursive=True)] == ["a", "a/b", "tmp"]
    archive = b"".join([part async for part in channel.tar_out(b"/a")])

    async def tar():
        yield archive

    await channel.tar_in(b"/c", tar())
    assert (await channel.stat(b"/c/b")).size == 11
    await channel.move(b"/a", b"/d")
    await channel.remove(b"/d", recursive=True)
    with pytest.raises(NotFound):
        await channel.stat(b"/d/b")
