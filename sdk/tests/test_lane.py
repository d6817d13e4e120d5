"""The fast lane: whatever a server sends, an exchange gives its answer or a typed failure, never another's bytes."""

from __future__ import annotations

import asyncio

import pytest

from opendsec._lane import Broken, ConnectFailed, Lane, Silent

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"


class Script:
    """A server that answers each request with the next pieces of a script; None closes the connection."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.connections = 0
        self.requests = []

    async def serve(self, reader, writer):
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
                self.requests.append(head + await reader.readexactly(length))
                for piece in self.answers.pop(0):
                    if piece is None:
                        return
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@pytest.fixture
async def lane(tmp_path):
    """Return a function that serves a script and gives a lane to it."""
    servers, lanes = [], []

    async def start(script):
        server = await asyncio.start_unix_server(script.serve, tmp_path / "s")
        servers.append(server)
        lanes.append(Lane(str(tmp_path / "s"), "localhost", 80, "X-Key: k\r\n"))
        return lanes[0]

    yield start
    for one in lanes:
        one.close()
    for server in servers:
        server.close()
        await server.wait_closed()


async def test_one_connection_serves_many_exchanges(lane):
    """A connection is kept and used again; the request is what HTTP wants."""
    script = Script([OK], [OK], [OK])
    one = await lane(script)
    for _ in range(3):
        assert await one.exchange("POST", "/x?y=%20", b"body", 5) == (200, b"hi")
    assert script.connections == 1
    assert script.requests[0] == (
        b"POST /x?y=%20 HTTP/1.1\r\nHost: localhost\r\nX-Key: k\r\nContent-Length: 4\r\n\r\nbody"
    )


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ([bytes([byte]) for byte in OK], (200, b"hi")),
        ([b"HTTP/1.1 204 No Content\r\n\r\n"], (204, b"")),
        ([b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n1;x=y\r\nc\r\n0\r\n\r\n"], (200, b"abc")),
        (
            [bytes([byte]) for byte in b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\n\r\n!\r\n0\r\n\r\n"],
            (200, b"\r\n!"),
        ),
        ([b"HTTP/1.1 100 Continue\r\n\r\n" + OK], (200, b"hi")),
        ([b"HTTP/1.1 100 Continue\r\n\r\n", OK], (200, b"hi")),
        ([b"HTTP/1.1 503 No\r\ncontent-length: 300000\r\n\r\n", b"x" * 100_000, b"x" * 200_000], (503, b"x" * 300_000)),
        ([b"HTTP/1.1 200 OK\r\n\r\nuntil the end", None], (200, b"until the end")),
        ([b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nhi"], (200, b"hi")),
        ([b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nhi"], (200, b"hi")),
    ],
)
async def test_answers_of_every_shape(lane, answer, expected):
    """Length, chunks, interim answers, no body, until the end; in any pieces. The next exchange is sound, too."""
    one = await lane(Script(answer, [OK]))
    assert await one.exchange("GET", "/", b"", 5) == expected
    assert await one.exchange("GET", "/", b"", 5) == (200, b"hi")


@pytest.mark.parametrize(
    "answer",
    [
        [None],
        [OK[:-1], None],
        [b"SSH-2.0-x\r\n\r\n"],
        [b"HTTP/1.1 2xx\r\n\r\n"],
        [OK + b"more than was announced"],
        [b"x" * 100_000],
        [b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n"],
        [b"HTTP/1.1 200 OK\r\ncontent-length: 99999999999\r\n\r\n"],
    ],
)
async def test_what_is_no_answer_is_a_broken_exchange(lane, answer):
    """The outcome is unknown, and the connection is not used again."""
    script = Script(answer, [OK])
    one = await lane(script)
    with pytest.raises(Broken):
        await one.exchange("GET", "/", b"", 5)
    assert await one.exchange("GET", "/", b"", 5) == (200, b"hi")
    assert script.connections == 2


async def test_silence_has_an_end_and_bytes_prolong_it(lane):
    """The idle time counts from the last byte."""

    class Slow(Script):
        async def serve(self, reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n")
            for _ in range(4):
                writer.write(b"x")
                await asyncio.sleep(0.03)
            await reader.read()
            writer.close()

    one = await lane(Slow())
    loop = asyncio.get_running_loop()
    started = loop.time()
    with pytest.raises(Silent):
        await one.exchange("GET", "/", b"", 0.06)
    assert loop.time() - started > 0.1


async def test_a_cancelled_exchange_closes_its_connection(lane):
    """A late answer never reaches another request."""
    script = Script([], [OK])
    one = await lane(script)
    task = asyncio.create_task(one.exchange("GET", "/", b"", 5))
    while not script.requests:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await one.exchange("GET", "/", b"", 5) == (200, b"hi")
    assert script.connections == 2


async def test_nobody_there(tmp_path):
    """A refused connection says that nothing happened."""
    with pytest.raises(ConnectFailed, match="No such file"):
        await Lane(str(tmp_path / "none"), "localhost", 80, "").exchange("GET", "/", b"", 5)
    server = await asyncio.start_server(lambda _r, _w: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    with pytest.raises(ConnectFailed):
        await Lane(None, "127.0.0.1", port, "").exchange("GET", "/", b"", 5)


async def test_tcp(lane):
    """Hosts and ports work as sockets do."""
    script = Script([OK])
    server = await asyncio.start_server(script.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    one = Lane(None, "127.0.0.1", port, "")
    assert await one.exchange("GET", "/", b"", 5) == (200, b"hi")
    assert f"Host: 127.0.0.1:{port}\r\n".encode() in script.requests[0]
    one.close()
    server.close()
    await server.wait_closed()


async def pieces(*data):
    """Give pieces of a body."""
    for piece in data:
        yield piece
        await asyncio.sleep(0)


class Refusing:
    """A server that answers before it has read the body, and closes at once."""

    def __init__(self, answer):
        self.answer = answer
        self.closed = asyncio.Event()

    async def serve(self, reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(self.answer)
        await writer.drain()
        writer.close()
        self.closed.set()


async def test_an_upload_and_its_answer(lane):
    """A body in pieces, then the answer; the connection serves on."""

    class Counting(Script):
        async def serve(self, reader, writer):
            assert b"transfer-encoding: chunked" in (await reader.readuntil(b"\r\n\r\n")).lower()
            body = b""
            while size := int(await reader.readline(), 16):
                body += await reader.readexactly(size)
                await reader.readline()
            await reader.readline()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(str(len(body))), b"%d" % len(body)))
            await Script([OK]).serve(reader, writer)

    one = await lane(Counting())
    assert await one.upload("PUT", "/", pieces(b"x" * 3_000_000, b"", b"yz"), 5) == (200, b"3000002")
    assert await one.exchange("GET", "/", b"", 5) == (200, b"hi")


@pytest.mark.parametrize("late", [False, True])
async def test_a_refused_upload_gives_the_reason(lane, late):
    """The answer counts even if the connection broke while the body was on its way."""
    server = Refusing(b"HTTP/1.1 404 Not Found\r\nContent-Length: 4\r\n\r\nnone")
    one = await lane(server)

    async def body():
        yield b"x"
        if late:
            await server.closed.wait()
        while True:
            yield b"x" * 100_000

    assert await one.upload("PUT", "/", body(), 5) == (404, b"none")


async def test_an_upload_into_nothing_is_broken(lane):
    """Without an answer the outcome is unknown."""
    one = await lane(Refusing(b""))
    with pytest.raises(Broken):
        await one.upload("PUT", "/", pieces(*[b"x" * 100_000] * 50), 5)


async def test_a_server_that_does_not_read_is_given_up(lane):
    """Waiting for room has an end."""

    class Deaf(Script):
        async def serve(self, reader, writer):
            await asyncio.sleep(0.5)
            writer.close()

    one = await lane(Deaf())
    with pytest.raises(Silent):
        await one.upload("PUT", "/", pieces(*[b"x" * 1_000_000] * 20), 0.05)
