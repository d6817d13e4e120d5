"""One edge as the apiserver reaches it: a pool of keep-alive connections, and what its absence means to a caller.

An edge that is away (restarting) refuses connections: provably nothing happened, so the request waits. One prober for
each edge tries to connect with a short growing delay and wakes all waiting requests at the moment it succeeds; after
``connect_deadline_seconds`` they get ``unavailable``. A connection that breaks after the request was sent is never
repeated here: the caller may if the request is idempotent, else the outcome is unknown.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import TypeVar

import aiohttp
import msgspec
from yarl import URL

from opendsec.api.errors import ErrorBody, Internal, OutcomeUnknown, PlatformError, Unavailable, from_body
from opendsec_server.apiserver.wire import Answer, Broken, Connection, Headers, NotConnected

T = TypeVar("T")

#: Largest answer of a call that is decoded here, in bytes.
MAX_DECODED_BYTES = 256 * 1024 * 1024
#: Idle connections are closed after this time, in seconds: well before the edge would.
_IDLE_SECONDS = 10.0
_FIRST_DELAY, _DELAY_GROWTH, _MAX_DELAY = 0.005, 1.5, 0.1
#: Connections being made at once: a burst must not overflow the edge's listen queue.
_CONNECTING = 32


class LinkBroke(Unavailable):
    """The link broke after the request was sent; repeating the request is safe, at the same node."""


def broken(node: str, *, idempotent: bool) -> PlatformError:
    """Return what a caller is told when the link to ``node`` broke in the middle of its request."""
    if idempotent:
        return LinkBroke(f"node {node} broke the connection; the request may be repeated", node=node)
    return OutcomeUnknown(
        f"node {node} broke the connection; whether it did what was asked is unknown", node=node, outcome="unknown"
    )


def error_of(status: int, body: bytes) -> PlatformError:
    """Rebuild the error an edge answered with."""
    try:
        return from_body(msgspec.json.decode(body, type=ErrorBody))
    except msgspec.MsgspecError:
        return Internal(f"an edge answered {status} without a reason")


class EdgeClient:
    """Reaches one edge.

    Args:
        address: ``unix:<path>`` or ``host:port``.
        name: for messages until the node's own name is known.
        connect_deadline_seconds: how long requests wait for an edge that refuses connections.
    """

    def __init__(self, address: str, name: str, *, connect_deadline_seconds: float = 5.0) -> None:
        self.address = address
        self.name = name
        self._deadline = connect_deadline_seconds
        self._idle: list[Connection] = []
        self._open: set[Connection] = set()
        self._loop = asyncio.get_running_loop()
        self._connecting = asyncio.Semaphore(_CONNECTING)
        self._prober: asyncio.Task[None] | None = None
        self._closed = False
        self._session: aiohttp.ClientSession | None = None
        self._sweeper: asyncio.TimerHandle | None = None

    # -- requests --------------------------------------------------------------------------------------------------

    async def send(
        self, head: bytes, body: bytes | AsyncIterator[bytes], *, chunked: bool = False, wait: bool = True
    ) -> Answer:
        """Send a request whose head is complete but for nothing; see ``head_of``.

        Raises:
            NotConnected: nothing was sent; with ``wait`` only after the deadline.
            Broken: the link broke in the middle.
        """
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                with contextlib.suppress(NotConnected):
                    return await connection.exchange(head, body, chunked=chunked)
        connection = await self._connect(wait=wait)
        return await connection.exchange(head, body, chunked=chunked)

    async def request(
        self,
        method: str,
        target: str,
        body: bytes = b"",
        *,
        idempotent: bool = True,
        wait: bool = True,
        limit: int = MAX_DECODED_BYTES,
    ) -> Answer:
        """Make a call and return its successful answer with its body read.

        Args:
            method: HTTP method.
            target: path and query, percent-encoded.
            body: JSON, or nothing.
            idempotent: repeating the call does no harm.
            wait: wait for an edge that is restarting.
            limit: largest answer in bytes.

        Raises:
            PlatformError: the edge's own error, or ``Unavailable``.
        """
        headers: Headers = [(b"content-type", b"application/json")] if body else []
        try:
            answer = await self.send(head_of(method, target.encode(), headers, len(body)), body, wait=wait)
            content = await answer.read(limit)
        except NotConnected as error:
            raise self.away() from error
        except Broken as error:
            raise broken(self.name, idempotent=idempotent) from error
        if answer.status >= 400:
            raise error_of(answer.status, content)
        answer.body = content
        return answer

    async def call(
        self,
        answer_type: type[T],
        method: str,
        target: str,
        body: bytes = b"",
        *,
        idempotent: bool = True,
        wait: bool = True,
    ) -> T:
        """Make a call and decode its answer.

        Raises:
            PlatformError: the edge's own error, ``Unavailable``, or ``Internal`` for an answer that makes no sense.
        """
        answer = await self.request(method, target, body, idempotent=idempotent, wait=wait)
        try:
            return msgspec.json.decode(answer.body or b"", type=answer_type)
        except msgspec.MsgspecError as error:
            raise Internal(f"node {self.name} answered {method} {target[:100]} with what is not expected") from error

    def away(self) -> Unavailable:
        """Return the error for an edge that cannot be reached; nothing happened."""
        return Unavailable(f"node {self.name} does not answer", node=self.name, retry_after=1.0)

    def websocket(self, target: str) -> contextlib.AbstractAsyncContextManager[aiohttp.ClientWebSocketResponse]:
        """Open a WebSocket on the edge; ``target`` is path and query, percent-encoded."""
        return self._open_websocket(target)

    @contextlib.asynccontextmanager
    async def _open_websocket(self, target: str) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
        if self._session is None:
            connector: aiohttp.BaseConnector
            if self.address.startswith("unix:"):
                connector = aiohttp.UnixConnector(self.address.removeprefix("unix:"), limit=0)
            else:
                connector = aiohttp.TCPConnector(limit=0)
            self._session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))
        host = "edge" if self.address.startswith("unix:") else self.address
        url = URL(f"http://{host}{target}", encoded=True)
        options = aiohttp.ClientWSTimeout(ws_close=5.0)
        async with self._session.ws_connect(url, max_msg_size=16 * 2**20, timeout=options, compress=0) as socket:
            yield socket

    async def wait_reachable(self) -> None:
        """Return when the edge accepts connections.

        Raises:
            NotConnected: it did not within the deadline.
        """
        self._release(await self._connect(wait=True))

    # -- connections -----------------------------------------------------------------------------------------------

    async def _connect(self, *, wait: bool) -> Connection:
        try:
            return await self._open_connection()
        except NotConnected:
            if not wait:
                raise
        try:
            async with asyncio.timeout(self._deadline):
                while True:
                    if self._prober is None:
                        self._prober = self._loop.create_task(self._probe())
                    await asyncio.shield(self._prober)
                    with contextlib.suppress(NotConnected):
                        return await self._open_connection()
        except TimeoutError as error:
            raise NotConnected(f"node {self.name} does not accept connections") from error

    async def _probe(self) -> None:
        """Return when a connection could be made; one for all who wait."""
        delay = _FIRST_DELAY
        stop_at = self._loop.time() + self._deadline
        try:
            while self._loop.time() < stop_at and not self._closed:
                await asyncio.sleep(delay)
                delay = min(delay * _DELAY_GROWTH, _MAX_DELAY)
                with contextlib.suppress(NotConnected):
                    self._release(await self._open_connection())
                    return
        finally:
            self._prober = None

    async def _open_connection(self) -> Connection:
        if self._closed:
            raise NotConnected("the apiserver is stopping")

        def make() -> Connection:
            return Connection(self._release, self._open.discard)

        async with self._connecting:
            try:
                if self.address.startswith("unix:"):
                    path = self.address.removeprefix("unix:")
                    _, connection = await self._loop.create_unix_connection(make, path)
                else:
                    host, _, port = self.address.rpartition(":")
                    async with asyncio.timeout(2.0):
                        _, connection = await self._loop.create_connection(make, host.strip("[]"), int(port))
            except OSError as error:  # TimeoutError is one
                raise NotConnected(str(error)) from error
        self._open.add(connection)
        return connection

    def _release(self, connection: Connection) -> None:
        if self._closed:
            connection.abort()
            return
        connection.idle_since = self._loop.time()
        self._idle.append(connection)
        if self._sweeper is None:
            self._sweeper = self._loop.call_later(_IDLE_SECONDS / 2, self._sweep)

    def _sweep(self) -> None:
        """Close connections that have been idle for long: the list is ordered by last use."""
        self._sweeper = None
        limit = self._loop.time() - _IDLE_SECONDS
        while self._idle and (self._idle[0].idle_since < limit or not self._idle[0].usable):
            self._idle.pop(0).abort()
        if self._idle:
            self._sweeper = self._loop.call_later(_IDLE_SECONDS / 2, self._sweep)

    async def close(self) -> None:
        """Close all connections."""
        self._closed = True
        if self._sweeper is not None:
            self._sweeper.cancel()
        if self._prober is not None:
            await self._prober
        for connection in list(self._open):
            connection.abort()
        self._open.clear()
        self._idle.clear()
        if self._session is not None:
            await self._session.close()


def head_of(method: str, target: bytes, headers: Headers, length: int | None) -> bytes:
    """Return a request head.

    Args:
        method: HTTP method.
        target: path and query as they go on the wire.
        headers: further headers.
        length: content length; None for a chunked body.
    """
    lines = [b"%b %b HTTP/1.1\r\nhost: edge\r\n" % (method.encode(), target)]
    lines.extend(b"%b: %b\r\n" % header for header in headers)
    if length is None:
        lines.append(b"transfer-encoding: chunked\r\n\r\n")
    elif length or method in {"POST", "PUT", "PATCH"}:
        lines.append(b"content-length: %d\r\n\r\n" % length)
    else:
        lines.append(b"\r\n")
    return b"".join(lines)
