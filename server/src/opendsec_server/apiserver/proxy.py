"""Pass-through of one request to one edge: bytes both ways, never decoded.

A small request body is read before anything is sent, so that a request to an edge that is just restarting can wait for
it; a large one streams. A client that goes away cancels the request at the edge. An answer that breaks on the way is
broken towards the client as well (the connection is cut, the body has no proper end): nothing partial ever looks
complete.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import aiohttp
import msgspec

from opendsec.api.errors import PlatformError
from opendsec_server.apiserver.edge_client import EdgeClient, broken, error_of, head_of
from opendsec_server.apiserver.wire import Answer, Broken, Headers, NotConnected
from opendsec_server.platform.http import Receive, Scope, Send, error_headers

#: Request bodies up to this size are read before they are sent, in bytes.
_BUFFERED_BODY = 256 * 1024
#: After this time without an answer the client is watched for leaving, in seconds.
_WATCH_AFTER = 0.25
_NOT_FORWARDED = frozenset(
    {
        b"authorization", b"host", b"connection", b"keep-alive", b"proxy-authorization", b"proxy-connection", b"te",
        b"trailer", b"transfer-encoding", b"upgrade", b"content-length", b"expect", b"cookie", b"accept-encoding",
        b"sec-websocket-key", b"sec-websocket-version", b"sec-websocket-extensions", b"user-agent", b"accept",
    }
)  # fmt: skip
#: Status that the metrics show for a client that left before its answer.
CLIENT_LEFT = 499


class ClientLeft(Exception):
    """The client closed its connection before the answer was sent."""


class _ExecId(msgspec.Struct):
    id: str | None = None


class ClientWatch:
    """Cancels the current task when the client leaves; used around what may take long."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._task = asyncio.current_task()
        self._watcher: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.left = False
        #: The request body is still being read, by somebody else: then leaving is noticed there.
        self.reading = False

    def start_later(self, seconds: float) -> None:
        """Begin to watch after a while, so that quick answers cost no task."""
        self._timer = asyncio.get_running_loop().call_later(seconds, self.start)

    def start(self) -> None:
        """Begin to watch, unless the request body is still being read."""
        self.cancel_timer()
        if self._watcher is None and not self.reading:
            self._watcher = asyncio.get_running_loop().create_task(self._watch())

    def cancel_timer(self) -> None:
        """Do not begin to watch."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def stop(self) -> None:
        """Watch no longer."""
        self.cancel_timer()
        if self._watcher is not None:
            self._watcher.cancel()

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.left = True
        if self._task is not None:
            self._task.cancel()


async def forward(scope: Scope, receive: Receive, send: Send, edge: EdgeClient) -> int:
    """Forward a request to an edge and its answer to the client; return the status.

    Raises:
        PlatformError: no answer was begun; the caller tells the client.
        ClientLeft: the client is gone.
        Broken: the answer broke on the way; the caller must cut the client's connection.
    """
    headers, length, streamed = _forwarded(scope["headers"])
    watch = ClientWatch(receive)
    target: bytes = scope["raw_path"]
    if scope["query_string"]:
        target = target + b"?" + scope["query_string"]
    body: bytes | AsyncIterator[bytes]
    if streamed or length > _BUFFERED_BODY:
        head = head_of(scope["method"], target, headers, None if streamed else length)
        watch.reading = True
        body = _body_chunks(receive, watch)
    else:
        body = await _read_body(receive) if length else b""
        head = head_of(scope["method"], target, headers, length)
        if len(body) != length:
            raise ClientLeft
        watch.start_later(_WATCH_AFTER)
    try:
        answer = await edge.send(head, body, chunked=streamed)
        watch.cancel_timer()
        await _send_answer(answer, send, watch)
    except NotConnected as error:
        raise edge.away() from error
    except _AnswerBroke as error:
        raise Broken(str(error)) from error
    except Broken as error:
        raise broken(edge.name, idempotent=is_idempotent(scope["method"], scope["path"], body)) from error
    except asyncio.CancelledError:
        if not watch.left:
            raise
        if (task := asyncio.current_task()) is not None:
            task.uncancel()
        raise ClientLeft from None
    finally:
        watch.stop()
    return answer.status


class _AnswerBroke(Exception):
    """The answer broke after its head was sent to the client."""


async def _send_answer(answer: Answer, send: Send, watch: ClientWatch) -> None:
    await send({"type": "http.response.start", "status": answer.status, "headers": answer.headers})
    if answer.body is not None:
        await send({"type": "http.response.body", "body": answer.body})
        return
    watch.start()
    # Granian sends the head with the first piece, be it empty; the output of a silent command may be long in coming.
    await send({"type": "http.response.body", "body": b"", "more_body": True})
    try:
        async with contextlib.aclosing(answer.chunks()) as chunks:
            async for chunk in chunks:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
    except Broken as error:
        raise _AnswerBroke(str(error)) from error
    await send({"type": "http.response.body", "body": b""})


def is_idempotent(method: str, path: str, body: object) -> bool:
    """Return whether repeating a request does no harm: reads, deletes, and a start that carries its exec's id."""
    if method in {"GET", "HEAD", "DELETE"}:
        return True
    if method == "POST" and path.endswith("/execs") and isinstance(body, bytes):
        try:
            return msgspec.json.decode(body, type=_ExecId).id is not None
        except msgspec.MsgspecError:
            return False
    return False


def _forwarded(headers: Headers) -> tuple[Headers, int, bool]:
    """Return the headers to forward, the content length, and whether the body has no announced length."""
    kept: Headers = []
    length, streamed = 0, False
    for header in headers:
        name = header[0]
        if name == b"content-length":
            length = int(header[1])
        elif name == b"transfer-encoding":
            streamed = True
        elif name not in _NOT_FORWARDED:
            kept.append(header)
    return kept, length, streamed


async def _read_body(receive: Receive) -> bytes:
    message = await receive()
    if message["type"] == "http.request" and not message.get("more_body"):
        return bytes(message["body"])
    parts = bytearray()
    while message["type"] == "http.request":
        parts += message.get("body", b"")
        if not message.get("more_body"):
            return bytes(parts)
        message = await receive()
    raise ClientLeft


async def _body_chunks(receive: Receive, watch: ClientWatch) -> AsyncIterator[bytes]:
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise ClientLeft
        if chunk := message.get("body", b""):
            yield chunk
        if not message.get("more_body"):
            watch.reading = False
            watch.start()
            return


# -- WebSocket ---------------------------------------------------------------------------------------------------------


async def forward_websocket(scope: Scope, receive: Receive, send: Send, edge: EdgeClient) -> None:
    """Join a client's WebSocket to one of the edge until either side closes; close codes pass through.

    Raises:
        PlatformError: the edge refused; nothing was accepted yet.
    """
    if (await receive())["type"] != "websocket.connect":
        return
    query = scope["query_string"].decode("latin-1")
    target = scope["raw_path"].decode("latin-1") + (f"?{query}" if query else "")
    try:
        await edge.wait_reachable()
    except NotConnected as error:
        raise edge.away() from error
    try:
        async with edge.websocket(target) as upstream:
            await send({"type": "websocket.accept"})
            await _join(receive, send, upstream)
    except aiohttp.WSServerHandshakeError as error:
        raise await _refusal(edge, target, error.status) from error
    except aiohttp.ClientError as error:
        raise broken(edge.name, idempotent=True) from error


async def _refusal(edge: EdgeClient, target: str, status: int) -> PlatformError:
    """Return why the edge refused the handshake: a plain GET of the exec has the reason in its body."""
    try:
        await edge.request("GET", target.partition("?")[0].rpartition("/")[0])
    except PlatformError as error:
        return error
    return error_of(status, b"")


async def _join(receive: Receive, send: Send, upstream: aiohttp.ClientWebSocketResponse) -> None:
    """Pump both ways; the first side that closes ends both."""
    down = asyncio.ensure_future(_pump_down(send, upstream))
    up = asyncio.ensure_future(_pump_up(receive, upstream))
    try:
        await asyncio.wait({down, up}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (down, up):
            task.cancel()
        await asyncio.gather(down, up, return_exceptions=True)


async def _pump_down(send: Send, upstream: aiohttp.ClientWebSocketResponse) -> None:
    while True:
        message = await upstream.receive()
        if message.type is aiohttp.WSMsgType.TEXT:
            await send({"type": "websocket.send", "text": message.data})
        elif message.type is aiohttp.WSMsgType.BINARY:
            await send({"type": "websocket.send", "bytes": message.data})
        else:
            break
    # 1006 means that the edge vanished, which may not be sent: 1012 says that the service restarts.
    code = upstream.close_code
    await send({"type": "websocket.close", "code": 1012 if code is None or code == 1006 else code})


async def _pump_up(receive: Receive, upstream: aiohttp.ClientWebSocketResponse) -> None:
    while True:
        message = await receive()
        if message["type"] != "websocket.receive":
            code = message.get("code") or 1005
            await upstream.close(code=1000 if code == 1005 else 1001 if code == 1006 else code)
            return
        if (text := message.get("text")) is not None:
            await upstream.send_str(text)
        else:
            await upstream.send_bytes(message["bytes"])


async def send_error(send: Send, error: PlatformError, *, websocket: bool = False) -> int:
    """Answer with an error and return its status."""
    body = msgspec.json.encode(error.body())
    kind = "websocket.http.response" if websocket else "http.response"
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(name.encode(), value.encode()) for name, value in error_headers(error).items()]
    await send({"type": f"{kind}.start", "status": error.http_status, "headers": headers})
    await send({"type": f"{kind}.body", "body": body})
    return error.http_status
