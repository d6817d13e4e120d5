"""The fast lane: small exchanges over plain HTTP/1.1, at a third of the CPU time of the HTTP library.

Every ``run_shell`` passes here. A connection carries one exchange at a time:
one write, one future, one parsed head. Answers that stream and TLS go through the HTTP library instead.

Uploads go here, too: a server that refuses one may answer and close while the body is still on its way. What it said is
read even if writing to it has already failed; the HTTP library would only report the broken pipe.

How it fails: ``ConnectFailed`` before anything was sent (nothing happened), ``Broken`` afterwards (the outcome is
unknown), ``Silent`` if no byte came for the idle time. An exchange that is cancelled closes its connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
from collections.abc import AsyncIterator, Callable
from typing import cast

_CONNECT_SECONDS = 10.0
#: Idle connections are dropped after this time, well before a server would.
_KEEP_SECONDS = 10.0
_CONNECTING = 64
_BUSY_DELAY = 0.002
_MAX_HEAD = 64 * 1024
_MAX_BODY = 2 * 1024**3

_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d+)", re.IGNORECASE)
_CHUNKED = re.compile(rb"\r\ntransfer-encoding:[ \t]*chunked", re.IGNORECASE)
_CLOSE = re.compile(rb"\r\nconnection:[ \t]*close", re.IGNORECASE)

Answer = tuple[int, bytes]


class ConnectFailed(ConnectionError):
    """No connection could be made."""


class Broken(ConnectionError):
    """The connection broke before the whole answer had come."""


class Silent(Broken):
    """No byte came for the idle time."""


class _Connection(asyncio.Protocol):
    """One connection.

    ``idle → waiting for the head → waiting for the body → idle``; whatever does not fit closes it.
    """

    __slots__ = ("_body", "_buffer", "_copy", "_expect", "_idle", "_keep", "_lost", "_status", "_timer", "_transport",
                 "_waiter", "_writable", "closed", "last_used")  # fmt: skip

    def __init__(self, lost: Callable[[_Connection], None]) -> None:
        self._lost = lost
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[Answer] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._buffer = bytearray()
        self._body = bytearray()
        self._status = 0
        #: Bytes of the body that are announced; -1: the head has not come; -2: chunked; -3: until the end.
        self._expect = -1
        self._keep = True
        self._idle = 0.0
        #: Second descriptor of the socket while an upload is under way.
        self._copy = -1
        self._writable: asyncio.Future[None] | None = None
        self.closed = False
        self.last_used = 0.0

    def exchange(self, loop: asyncio.AbstractEventLoop, request: bytes, idle: float) -> asyncio.Future[Answer]:
        """Send a request; the future has its answer."""
        self._waiter = waiter = loop.create_future()
        self._expect = -1
        self._idle = idle
        self.last_used = loop.time()
        self._timer = loop.call_later(idle, self._on_timer, loop)
        assert self._transport is not None  # noqa: S101 - for the type checker
        self._transport.write(request)
        return waiter

    async def upload(
        self, loop: asyncio.AbstractEventLoop, head: bytes, pieces: AsyncIterator[bytes], idle: float
    ) -> Answer:
        """Send a head and a body in pieces, and return the answer, also one that comes before the body is complete.

        Raises:
            Broken: the outcome is unknown.
            Exception: whatever ``pieces`` raises; the server then sees a body without an end.
        """
        transport = self._transport
        assert transport is not None  # noqa: S101 - for the type checker
        self._copy = os.dup(transport.get_extra_info("socket").fileno())
        waiter: asyncio.Future[Answer] = loop.create_future()
        self._waiter = waiter
        waiter.add_done_callback(lambda _waiter: self.resume_writing())
        self._expect = -1
        transport.write(head)
        async for piece in pieces:
            if waiter.done() or transport.is_closing():
                break
            if piece:
                transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))
                # Let the loop hear what the server says meanwhile.
                await (self._drained(idle) if self._writable is not None else asyncio.sleep(0))
        if waiter.done() or transport.is_closing():
            self._keep = False
        else:
            transport.write(b"0\r\n\r\n")
            self._idle, self.last_used = idle, loop.time()
            self._timer = loop.call_later(idle, self._on_timer, loop)
        return await waiter

    async def _drained(self, idle: float) -> None:
        try:
            async with asyncio.timeout(idle):
                if self._writable is not None:
                    await self._writable
        except TimeoutError as error:
            raise Silent(f"nothing was read for {idle:g} s") from error

    def release(self) -> bool:
        """End the exchange; return whether the connection can carry another."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        waiter, self._waiter = self._waiter, None
        self._close_copy()
        if waiter is not None and waiter.done() and not waiter.cancelled():
            waiter.exception()  # seen, also if the source of an upload failed first
        if waiter is None or not waiter.done() or waiter.cancelled() or not self._keep or self.closed:
            self.abort()
            return False
        return True

    def abort(self) -> None:
        """Close at once."""
        self.closed = True
        if self._transport is not None:
            self._transport.abort()

    # -- what the event loop calls ---------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the transport."""
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail whoever waits, unless the end is the end of the answer."""
        self.closed = True
        if exc is not None:
            self._read_rest()
        self._transport = None
        self._lost(self)
        if self._expect == -3 and exc is None:
            self._finish(bytes(self._body))
        else:
            self._fail(Broken(f"the connection broke before the answer came ({exc})" if exc else "it was closed"))

    def pause_writing(self) -> None:
        """Let an upload wait."""
        self._writable = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        """Let an upload go on."""
        writable, self._writable = self._writable, None
        if writable is not None and not writable.done():
            writable.set_result(None)

    def data_received(self, data: bytes) -> None:
        """Take bytes of the answer."""
        try:
            if self._expect == -1:
                self._on_head(data)
            else:
                self._on_body(data)
        except ValueError as error:
            self._fail(Broken(f"the server sent what is not HTTP: {error}"))
            self.abort()

    # -- inside ----------------------------------------------------------------------------------------------------

    def _read_rest(self) -> None:
        """Take what the server sent before writing to it failed."""
        if self._copy >= 0:
            with contextlib.suppress(OSError):
                while data := os.read(self._copy, 65536):
                    self.data_received(data)

    def _close_copy(self) -> None:
        if self._copy >= 0:
            os.close(self._copy)
            self._copy = -1

    def _on_head(self, data: bytes) -> None:
        if self._buffer:
            self._buffer += data
            data = bytes(self._buffer)
        end = data.find(b"\r\n\r\n")
        if end < 0:
            if len(data) > _MAX_HEAD:
                raise ValueError("the head is too long")
            self._buffer[:] = data
            return
        self._buffer.clear()
        if self._waiter is None or self._waiter.done():
            self.abort()  # nothing was asked, or nobody waits any more
            return
        head, rest = data[: end + 2], data[end + 4 :]
        if not head.startswith(b"HTTP/1."):
            raise ValueError("no status line")
        self._status = int(head[9:12])
        if self._status < 200:
            if rest:
                self._on_head(rest)
            return
        self._keep = head[7:8] == b"1" and _CLOSE.search(head) is None
        length = _LENGTH.search(head)
        if length is not None:
            self._expect = int(length[1])
            if self._expect > _MAX_BODY:
                raise ValueError("the body is too long")
        elif _CHUNKED.search(head) is not None:
            self._expect = -2
        else:
            self._expect = 0 if self._status in (204, 304) else -3
            self._keep = self._keep and self._expect == 0
        self._body.clear()
        if len(rest) == self._expect:
            self._finish(rest)
        else:
            self._on_body(rest)

    def _on_body(self, data: bytes) -> None:
        self._idle_since_now()
        if self._expect == -2:
            self._buffer += data
            if self._decode_chunks():
                self._finish(bytes(self._body))
            return
        self._body += data
        if len(self._body) > _MAX_BODY or 0 <= self._expect < len(self._body):
            raise ValueError("the body is longer than announced")
        if len(self._body) == self._expect:
            self._finish(bytes(self._body))

    def _decode_chunks(self) -> bool:
        """Move complete chunks from the buffer to the body; return whether the last one was there."""
        buffer, at = self._buffer, 0
        while True:
            line = buffer.find(b"\r\n", at)
            if line < 0:
                break
            size = int(bytes(buffer[at:line]).partition(b";")[0], 16)
            end = line + 2 + size + 2
            if size == 0:
                if len(buffer) < end:
                    break
                if buffer[line + 2 : end] != b"\r\n" or len(buffer) > end:
                    self._keep = False  # trailers, or more than was asked for: not worth another exchange
                return True
            if len(buffer) < end:
                break
            self._body += buffer[line + 2 : end - 2]
            if len(self._body) > _MAX_BODY:
                raise ValueError("the body is too long")
            at = end
        del buffer[:at]
        return False

    def _finish(self, body: bytes) -> None:
        self._expect = -1
        self._buffer.clear()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result((self._status, body))

    def _fail(self, error: Exception) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(error)

    def _idle_since_now(self) -> None:
        self.last_used = asyncio.get_running_loop().time()

    def _on_timer(self, loop: asyncio.AbstractEventLoop) -> None:
        left = self.last_used + self._idle - loop.time()
        if left > 0.001:
            self._timer = loop.call_later(left, self._on_timer, loop)
            return
        self._timer = None
        self._fail(Silent(f"no byte came for {self._idle:g} s"))
        self.abort()


class Lane:
    """Connections to one server.

    Args:
        path: its Unix socket, or None for TCP.
        host: name for the ``Host`` header, and to connect to.
        port: TCP port.
        headers: lines sent with every request, each with its line end.
    """

    def __init__(self, path: str | None, host: str, port: int, headers: str) -> None:
        self._path = path
        self._host = host
        self._port = port
        name = host if port == 80 or path is not None else f"{host}:{port}"
        self._head = f" HTTP/1.1\r\nHost: {name}\r\n{headers}Content-Length: "
        self._upload = f" HTTP/1.1\r\nHost: {name}\r\n{headers}Transfer-Encoding: chunked\r\n\r\n"
        self._idle: list[_Connection] = []
        self._open: set[_Connection] = set()
        self._connecting = asyncio.Semaphore(_CONNECTING)
        self._loop = asyncio.get_running_loop()

    async def exchange(self, method: str, target: str, body: bytes, idle: float) -> Answer:
        """Send a request and return status and body of the answer.

        Raises:
            ConnectFailed: nothing was sent.
            Broken: the outcome is unknown.
        """
        request = f"{method} {target}{self._head}{len(body)}\r\n\r\n".encode("ascii") + body
        connection = self._take() or await self._connect()
        try:
            return await connection.exchange(self._loop, request, idle)
        finally:
            if connection.release():
                self._idle.append(connection)

    async def upload(self, method: str, target: str, pieces: AsyncIterator[bytes], idle: float) -> Answer:
        """Send a body in pieces over a fresh connection; else like ``exchange``."""
        connection = await self._connect()
        try:
            return await connection.upload(self._loop, f"{method} {target}{self._upload}".encode("ascii"), pieces, idle)
        finally:
            if connection.release():
                self._idle.append(connection)

    def close(self) -> None:
        """Close all connections."""
        for connection in list(self._open):
            connection.abort()
        self._idle.clear()

    def _take(self) -> _Connection | None:
        """Return the connection used last, and drop those that were not used for long."""
        oldest = self._loop.time() - _KEEP_SECONDS
        while self._idle:
            connection = self._idle.pop()
            if not connection.closed and connection.last_used >= oldest:
                return connection
            connection.abort()
        return None

    async def _connect(self) -> _Connection:
        try:
            async with self._connecting, asyncio.timeout(_CONNECT_SECONDS):
                if self._path is None:
                    _, connection = await self._loop.create_connection(self._new, self._host, self._port)
                else:
                    _, connection = await self._loop.create_unix_connection(self._new, sock=await self._dial())
        except (OSError, TimeoutError) as error:
            raise ConnectFailed(getattr(error, "strerror", None) or str(error) or "no answer") from error
        self._open.add(connection)
        return connection

    def _new(self) -> _Connection:
        return _Connection(self._open.discard)

    async def _dial(self) -> socket.socket:
        """Connect to the Unix socket; a full queue (EAGAIN) is waited for, which asyncio would take for success."""
        path = self._path or ""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            while True:
                try:
                    sock.connect(path)
                except BlockingIOError:
                    await asyncio.sleep(_BUSY_DELAY)
                else:
                    return sock
        except BaseException:
            sock.close()
            raise
