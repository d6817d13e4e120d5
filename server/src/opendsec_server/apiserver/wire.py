"""A lean HTTP/1.1 client for the link between apiserver and edge.

Every command of every sandbox passes this link, so its cost counts: a small exchange is one write, one future and one
parsed head, a fraction of aiohttp's CPU (figures: docs/decisions/0004-apiserver-http-client.md). Bodies of any size
stream both ways with backpressure. The peer is our own edge; sizes are bounded on read all the same.

A connection goes ``idle → head → small | stream → idle``; whatever does not fit closes it. How it fails: before the
first byte of a request was handed to the kernel the caller sees ``NotConnected`` (nothing happened); from then on until
the end of the answer it sees ``Broken`` (the outcome is unknown).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import cast

Headers = list[tuple[bytes, bytes]]

#: An answer of at most this many bytes is collected and handed over whole.
SMALL_BYTES = 256 * 1024
_MAX_HEAD_BYTES = 64 * 1024
_MAX_CHUNK_LINE = 256
_HIGH_WATER, _LOW_WATER = 512 * 1024, 128 * 1024
_HOP_BY_HOP = frozenset({b"connection", b"keep-alive", b"transfer-encoding", b"date", b"server", b"upgrade"})


class NotConnected(ConnectionError):
    """No connection could be made: nothing was sent."""


class Broken(ConnectionError):
    """The connection broke after the request was sent: the outcome is unknown."""


class Answer:
    """An answer: whole (``body``) or as a stream (``chunks``).

    Attributes:
        status: HTTP status.
        headers: lower-case names and values, without those of the hop.
        body: the whole body, or None if it is larger than ``SMALL_BYTES`` or of unknown length: then use ``chunks``.
    """

    __slots__ = ("_connection", "body", "headers", "status")

    def __init__(self, status: int, headers: Headers, body: bytes | None, connection: Connection) -> None:
        self.status = status
        self.headers = headers
        self.body = body
        self._connection = connection

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """Iterate over the body as it arrives; leaving early closes the connection.

        Raises:
            Broken: the stream ended before its end.
        """
        if self.body is not None:
            yield self.body
            return
        connection = self._connection
        try:
            while (chunk := await connection.next_chunk()) is not None:
                yield chunk
        finally:
            connection.finish()

    async def read(self, limit: int) -> bytes:
        """Return the whole body.

        Raises:
            Broken: it ended early, or has more than ``limit`` bytes.
        """
        if self.body is not None:
            return self.body
        parts = bytearray()
        async with contextlib.aclosing(self.chunks()) as chunks:
            async for chunk in chunks:
                parts += chunk
                if len(parts) > limit:
                    raise Broken(f"an answer has more than {limit} bytes")
        return bytes(parts)

    def close(self) -> None:
        """Give up the rest of the body."""
        if self.body is None:
            self._connection.finish()


class Connection(asyncio.Protocol):
    """One connection; carries one exchange at a time.

    Args:
        release: called when the connection is idle and may carry the next exchange.
        lost: called once it is closed.
    """

    __slots__ = (
        "_buffered",
        "_chunked",
        "_chunks",
        "_closed",
        "_data",
        "_drain",
        "_ended",
        "_expect",
        "_headers",
        "_in_trailer",
        "_keep",
        "_loop",
        "_lost",
        "_mode",
        "_paused_reading",
        "_pump",
        "_reader",
        "_release",
        "_status",
        "_transport",
        "_waiter",
        "idle_since",
    )

    def __init__(self, release: Callable[[Connection], None], lost: Callable[[Connection], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._release = release
        self._lost = lost
        self._transport: asyncio.Transport | None = None
        self._closed = False
        self._mode = "idle"
        self._data = b""
        self._waiter: asyncio.Future[Answer] | None = None
        self._drain: asyncio.Future[None] | None = None
        self._reader: asyncio.Future[None] | None = None
        self._pump: asyncio.Task[None] | None = None
        self._chunks: deque[bytes] = deque()
        self._buffered = 0
        self._paused_reading = False
        self._status = 0
        self._headers: Headers = []
        self._expect = 0
        self._chunked = False
        self._in_trailer = False
        self._keep = True
        self._ended = False
        self.idle_since = 0.0

    # -- what the pool and the client call -------------------------------------------------------------------------

    @property
    def usable(self) -> bool:
        """The connection is idle and open."""
        return not self._closed and self._mode == "idle" and self._transport is not None

    async def exchange(self, head: bytes, body: bytes | AsyncIterator[bytes], *, chunked: bool = False) -> Answer:
        """Send a request and return its answer.

        Args:
            head: request line and headers with the empty line at their end.
            body: the whole body, or chunks of it.
            chunked: send the chunks with ``transfer-encoding: chunked``.

        Raises:
            NotConnected: the connection was found closed before anything was sent.
            Broken: it broke before the whole head (small: the whole answer) had come.
        """
        transport = self._transport
        if transport is None or self._closed or transport.is_closing():
            raise NotConnected("the connection is closed")
        self._mode = "head"
        self._data = b""
        self._ended = False
        waiter: asyncio.Future[Answer] = self._loop.create_future()
        self._waiter = waiter
        if isinstance(body, bytes):
            transport.write(head + body)
        else:
            transport.write(head)
            self._pump = self._loop.create_task(self._send(body, chunked=chunked))
        try:
            return await waiter
        except BaseException:
            if self._waiter is waiter:  # no answer has begun
                self._waiter = None
                self.abort()
            elif not waiter.cancelled() and waiter.exception() is None:  # cancelled with an answer in hand
                waiter.result().close()
            raise

    async def next_chunk(self) -> bytes | None:
        """Return the next piece of a streamed body, None at its end."""
        while not self._chunks:
            if self._ended:
                return None
            if self._closed:
                raise Broken("the connection broke inside an answer")
            self._reader = self._loop.create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        chunk = self._chunks.popleft()
        self._buffered -= len(chunk)
        if self._paused_reading and self._buffered <= _LOW_WATER and self._transport is not None:
            self._paused_reading = False
            self._transport.resume_reading()
        return chunk

    def finish(self) -> None:
        """End the exchange: reuse the connection if the answer was read to its end, else close it."""
        pump, self._pump = self._pump, None
        unfinished = pump is not None and not pump.done()
        if pump is not None and unfinished:
            pump.cancel()
        if self._mode == "idle":
            return
        if self._ended and not self._chunks and self._keep and not self._closed and not unfinished:
            self._mode = "idle"
            self._release(self)
        else:
            self.abort()

    def abort(self) -> None:
        """Close at once."""
        self._closed = True
        self._chunks.clear()
        if self._pump is not None:
            self._pump.cancel()
            self._pump = None
        if self._transport is not None:
            self._transport.abort()

    # -- what the event loop calls ---------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the transport."""
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail whoever waits."""
        self._closed = True
        self._transport = None
        self._lost(self)
        if self._mode == "stream" and not self._chunked and self._expect < 0 and exc is None:
            self._ended = True  # a body that ends with its connection
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(Broken("the connection broke before the answer came"))
        self._wake(self._reader)
        self._wake(self._drain)

    def pause_writing(self) -> None:
        """Stop the sender."""
        self._drain = self._loop.create_future()

    def resume_writing(self) -> None:
        """Let the sender go on."""
        self._wake(self._drain)
        self._drain = None

    def data_received(self, data: bytes) -> None:
        """Take bytes of the answer."""
        try:
            if self._mode == "head":
                self._on_head(self._data + data if self._data else data)
            elif self._mode == "small":
                self._data += data
                self._on_small()
            elif self._mode == "stream":
                self._on_stream(data)
            else:
                self.abort()  # nothing was asked
        except ValueError:
            if self._waiter is not None and not self._waiter.done():
                self._waiter.set_exception(Broken("the edge sent what is not HTTP"))
            self.abort()

    # -- inside ----------------------------------------------------------------------------------------------------

    def _on_head(self, data: bytes) -> None:
        end = data.find(b"\r\n\r\n")
        if end < 0:
            if len(data) > _MAX_HEAD_BYTES:
                raise ValueError("head too large")
            self._data = data
            return
        lines = data[:end].split(b"\r\n")
        rest = data[end + 4 :]
        if not lines[0].startswith(b"HTTP/1."):
            raise ValueError("no status line")
        status = int(lines[0][9:12])
        if 100 <= status < 200:
            self._data = b""
            self._on_head(rest)
            return
        length, chunked, keep = -1, False, lines[0].startswith(b"HTTP/1.1")
        headers: Headers = []
        for line in lines[1:]:
            name, _, value = line.partition(b":")
            name, value = name.lower(), value.strip()
            if name == b"content-length":
                length = int(value)
            elif name == b"transfer-encoding":
                chunked = value.lower() == b"chunked"
            elif name == b"connection":
                keep = value.lower() != b"close"
            if name not in _HOP_BY_HOP:
                headers.append((name, value))
        if status in (204, 304):
            length = 0
        self._status, self._headers, self._keep, self._expect, self._chunked = status, headers, keep, length, chunked
        if 0 <= length <= SMALL_BYTES and not chunked:
            self._mode, self._data = "small", rest
            self._on_small()
            return
        self._mode, self._data, self._in_trailer = "stream", b"", False
        if chunked:
            self._expect = 0
        self._resolve(Answer(status, headers, None, self))
        if rest:
            self._on_stream(rest)

    def _on_small(self) -> None:
        missing = self._expect - len(self._data)
        if missing > 0:
            return
        if missing < 0:
            raise ValueError("more body than announced")
        answer = Answer(self._status, self._headers, self._data, self)
        self._data = b""
        self._ended = True
        self._resolve(answer)
        self.finish()

    def _resolve(self, answer: Answer) -> None:
        """Hand the answer over; from here on the connection may already carry the next exchange."""
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(answer)

    def _on_stream(self, data: bytes) -> None:
        if self._chunked:
            self._decode_chunks(self._data + data if self._data else data)
        else:
            self._put(data)
            if self._expect >= 0:
                self._expect -= len(data)
                if self._expect < 0:
                    raise ValueError("more body than announced")
                self._ended = self._expect == 0
        if self._buffered > _HIGH_WATER and not self._paused_reading and self._transport is not None:
            self._paused_reading = True
            self._transport.pause_reading()
        self._wake(self._reader)

    def _decode_chunks(self, data: bytes) -> None:
        """Take chunked data; ``_expect`` is what is missing of the current chunk with its line end."""
        at, size = 0, len(data)
        while at < size and not self._ended:
            if self._expect:
                payload = min(size - at, max(0, self._expect - 2))
                if payload:
                    self._put(data[at : at + payload])
                taken = min(size - at, self._expect)
                at += taken
                self._expect -= taken
                continue
            end = data.find(b"\r\n", at)
            if end < 0:
                if size - at > _MAX_CHUNK_LINE:
                    raise ValueError("chunk line too long")
                break
            line, at = data[at:end], end + 2
            if self._in_trailer:
                self._ended = not line
                continue
            length = int(line.partition(b";")[0], 16)
            if length:
                self._expect = length + 2
            else:
                self._in_trailer = True
        self._data = data[at:]
        if self._ended and self._data:
            raise ValueError("more than the body")

    def _put(self, chunk: bytes) -> None:
        self._chunks.append(chunk)
        self._buffered += len(chunk)

    async def _send(self, body: AsyncIterator[bytes], *, chunked: bool) -> None:
        try:
            async for chunk in body:
                if not chunk:
                    continue
                if self._transport is None:
                    return
                self._transport.write(b"%x\r\n%b\r\n" % (len(chunk), chunk) if chunked else chunk)
                if self._drain is not None:
                    await self._drain
            if chunked and self._transport is not None:
                self._transport.write(b"0\r\n\r\n")
        except Exception as error:  # the source of the body failed: the request must not look complete
            if self._waiter is not None and not self._waiter.done():
                self._waiter.set_exception(error)
            self._pump = None
            self.abort()

    @staticmethod
    def _wake(future: asyncio.Future[None] | None) -> None:
        if future is not None and not future.done():
            future.set_result(None)
