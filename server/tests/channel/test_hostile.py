"""A guest that breaks the protocol, and a host that does: each loses its connection, nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import tracemalloc
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest

from opendsec.api.errors import Unavailable
from opendsec_server.channel import codec
from opendsec_server.channel.client import connect
from opendsec_server.testing.channel import RecordingSink, run, running_chronus, shell, spec

HELLO = codec.frame(codec.HELLO, 0, msgspec.msgpack.encode(("chronus", 1, "x", "y")))


@contextlib.asynccontextmanager
async def guest(path: Path, answer: Callable[[bytes], bytes], hello: bytes = HELLO) -> AsyncIterator[Path]:
    """A fake guest that sends ``answer`` of whatever comes."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(hello)
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                writer.write(answer(data))
                await writer.drain()
        writer.close()

    server = await asyncio.start_unix_server(serve, str(path))
    try:
        yield path
    finally:
        server.close()
        await server.wait_closed()


@pytest.mark.parametrize(
    "hello",
    [
        b"x" * 100,
        codec.frame(codec.CLOSED, 1),
        codec.frame(codec.HELLO, 0, b"nonsense"),
        codec.frame(codec.HELLO, 0, msgspec.msgpack.encode(("other", 1, "x", "y"))),
        codec.frame(codec.HELLO, 0, msgspec.msgpack.encode(("chronus", 99, "x", "y"))),
        b"\xff\xff\xff\xff\x01\0\0\0\0",
    ],
)
async def test_bad_hello_is_unavailable(tmp_path, hello):
    """A peer that is not chronus, or of another version, is refused."""
    async with guest(tmp_path / "s", lambda _: b"", hello) as path:
        with pytest.raises(Unavailable):
            await connect(path)


async def test_silent_and_absent_guests_are_unavailable(tmp_path):
    """Nobody there, or nobody answering in time."""
    with pytest.raises(Unavailable):
        await connect(tmp_path / "nobody")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "silent"))
        listener.listen()
        with pytest.raises(Unavailable):
            await connect(tmp_path / "silent", timeout=0.05)


@pytest.mark.parametrize(
    "answer",
    [
        b"\xff\xff\xff\xff\x03\x01\0\0\0",
        codec.frame(77, 1),
        codec.frame(codec.REQUEST, 1),
        codec.frame(codec.RESPONSE, 1, b"\xc1"),
        codec.frame(codec.RESPONSE, 1, b"\x91\0"),
        codec.frame(codec.OUTPUT, 1, b"\x03" + bytes(8)),
        codec.frame(codec.OUTPUT, 1, b"\x01"),
        codec.frame(codec.STARTED, 1, b"\x01"),
        codec.frame(codec.EXIT, 1, b"\x90"),
        codec.frame(codec.DATA, 1, b"x"),
        codec.frame(codec.OUTPUT, 1, b"\x01" + bytes(8) + b"abc") + codec.frame(codec.OUTPUT, 1, b"\x01" + bytes(8)),
    ],
)
async def test_bad_frames_close_the_connection(tmp_path, answer):
    """Each violation ends this connection with ``Unavailable`` and tells the sink."""

    def once(data: bytes) -> bytes:
        # The host's own hello comes first, alone or with the request.
        return answer if len(data) > len(codec.hello()) or data != codec.hello() else b""

    async with guest(tmp_path / "s", once) as path:
        channel = await connect(path)
        sink = RecordingSink()
        with pytest.raises(Unavailable):
            await channel.exec_start(spec("true"), sink)
        await channel.wait_closed()
        assert not channel.is_open
        assert sink.events[-1] == "lost"
        with pytest.raises(Unavailable):
            await channel.ping()


async def test_data_beyond_the_window_closes_the_connection(tmp_path):
    """A guest cannot fill the host's memory: what was not allowed is not taken."""
    flood = codec.frame(codec.DATA, 1, bytes(codec.MAX_DATA)) * 6
    async with guest(tmp_path / "s", lambda data: flood if data != codec.hello() else b"") as path:
        channel = await connect(path)
        stream = channel.read_file(b"/x")
        assert await anext(stream)
        await channel.wait_closed()
        assert not channel.is_open
        await stream.aclose()


async def test_a_failing_sink_harms_nobody_else(channel, caplog):
    """An exception in a sink detaches that exec; others and the connection go on."""

    class Broken(RecordingSink):
        def output(self, stream: int, offset: int, data: bytes) -> None:
            raise OSError("disk")

    broken = Broken()
    command = shell("echo hi; echo ho; exit 3")
    await channel.exec_start(command, broken)
    assert (await run(channel, shell("echo fine"))).stdout == b"fine\n"
    await broken.wait_for("lost")
    assert "disk" in caplog.text
    again = RecordingSink()
    assert await channel.exec_attach(command.id, (0, 0), again)
    assert (await again.result()).exit_code == 3
    assert again.stdout == b"hi\nho\n"


async def test_random_bytes_of_a_host_close_only_its_connection():
    """Chronus cuts off a host that breaks the protocol, and serves others."""
    generator = random.Random(7)
    with running_chronus() as path:
        channel = await connect(path)
        for number in range(150):
            reader, writer = await asyncio.open_unix_connection(str(path))
            begin = codec.hello() if number % 3 else b""
            kind = generator.choice([codec.REQUEST, codec.DATA, codec.ACK, codec.CREDIT, codec.END, 200])
            body = generator.randbytes(generator.randrange(60))
            if number % 5 == 0:
                writer.write(begin + generator.randbytes(200))
            else:
                writer.write(begin + codec.frame(kind, generator.randrange(3), body))
            writer.write_eof()
            with contextlib.suppress(ConnectionError):
                await reader.read()
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
        assert (await run(channel, shell("echo fine"))).stdout == b"fine\n"
        await channel.aclose()


async def test_requests_in_single_bytes_work():
    """However slowly bytes come, a request is understood."""
    with running_chronus() as path:
        reader, writer = await asyncio.open_unix_connection(str(path))
        for byte in codec.hello() + codec.request(5, codec.OP_PING):
            writer.write(bytes([byte]))
            await writer.drain()
        splitter = codec.Splitter()
        kinds: list[int] = []
        while codec.RESPONSE not in kinds:
            kinds += [kind for kind, _, _ in splitter.feed(await reader.read(1000))]
        writer.close()
        await writer.wait_closed()


async def test_idle_channels_are_small(socket_path):
    """A connected channel that does nothing takes little of the host's heap."""
    warm = await connect(socket_path)
    tracemalloc.start()
    before = tracemalloc.take_snapshot()
    channels = [await connect(socket_path) for _ in range(6)]
    after = tracemalloc.take_snapshot()
    tracemalloc.stop()
    grown = sum(entry.size_diff for entry in after.compare_to(before, "filename") if "tracemalloc" not in str(entry))
    assert grown / len(channels) < 10 * 1024
    for channel in (*channels, warm):
        await channel.aclose()
