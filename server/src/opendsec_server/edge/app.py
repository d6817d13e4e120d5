"""The edge's ASGI application: litestar for everything, and a short way for the one call that is made all the time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import msgspec
from litestar import Litestar
from litestar.di import Provide
from litestar.openapi import OpenAPIConfig

from opendsec.api.errors import InvalidArgument, PlatformError, Unavailable
from opendsec.api.models import ExecRequest
from opendsec_server.edge.http import HANDLERS
from opendsec_server.edge.http_files import FILE_HANDLERS
from opendsec_server.edge.http_images import IMAGE_HANDLERS
from opendsec_server.edge.results import is_large, result_pieces
from opendsec_server.edge.service import EdgeService
from opendsec_server.platform.http import EXCEPTION_HANDLERS, App, Receive, Scope, Send, error_headers

#: Largest body of a request that is read whole, in bytes.
MAX_JSON_BODY = 4 * 1024 * 1024
#: Largest body of an exec request, in bytes: arguments, environment and standard input as base64.
MAX_EXEC_BODY = 64 * 1024 * 1024
_JSON = [(b"content-type", b"application/json")]
_encode = msgspec.json.Encoder().encode
_request = msgspec.json.Decoder(ExecRequest)


def build_litestar(service: EdgeService | None) -> Litestar:
    """Put the documented application together; without a service it only documents itself."""
    return Litestar(
        route_handlers=[*HANDLERS, *FILE_HANDLERS, *IMAGE_HANDLERS],
        dependencies={"service": Provide(lambda: service, sync_to_thread=False)},
        exception_handlers=EXCEPTION_HANDLERS,
        openapi_config=OpenAPIConfig(title="OpenDSec edge", version="v1", path="/schema"),
        request_max_body_size=MAX_JSON_BODY,
    )


class EdgeApp:
    """Answers ``POST …/execs`` itself, in a fifth of the time, and hands everything else to litestar."""

    def __init__(self, service: EdgeService, inner: App) -> None:
        self._service = service
        self._inner = inner
        self._tasks: set[asyncio.Task[Any]] = set()
        self._stopping = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        task: Any = asyncio.current_task()
        self._tasks.add(task)
        try:
            if self._stopping and scope["type"] == "http":
                error = Unavailable("the edge is stopping", retry_after=1)
                await _answer(send, error.http_status, _encode(error.body()), [*_JSON, (b"retry-after", b"1")])
                return
            path: str = scope.get("path", "")
            if path.endswith("/execs") and scope["type"] == "http" and scope["method"] == "POST":
                parts = path.split("/")
                if len(parts) == 5 and parts[1] == "v1" and parts[2] == "sandboxes":
                    await self._exec(parts[3], receive, send)
                    return
            await self._inner(scope, receive, send)
        finally:
            self._tasks.discard(task)

    async def drain(self, seconds: float) -> None:
        """Refuse new requests, let those under way end, and cut what has not ended by then.

        A command whose request is cut runs on; its client asks again by the command's id.
        """
        self._stopping = True
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=seconds)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late, timeout=1.0)

    async def _exec(self, sandbox_id: str, receive: Receive, send: Send) -> None:
        status, headers = 200, _JSON
        try:
            request = _decode(await _body(receive))
            table, exec_ = await self._service.start(sandbox_id, request)
            if request.wait_seconds > 0 and is_large(exec_):
                await _stream(send, result_pieces(table, exec_))
                return
            body = _encode(table.result(exec_) if request.wait_seconds > 0 else table.describe(exec_))
        except PlatformError as error:
            status, body = error.http_status, _encode(error.body())
            headers = [*_JSON, *((name.encode(), text.encode()) for name, text in error_headers(error).items())]
        except Exception:
            status, body = self._service.defect("exec_failed", sandbox_id)
        await _answer(send, status, body, headers)


def _decode(body: bytes | bytearray) -> ExecRequest:
    try:
        return _request.decode(body)
    except msgspec.MsgspecError as error:
        raise InvalidArgument(str(error)) from None


async def _body(receive: Receive) -> bytes | bytearray:
    message = await receive()
    if not message.get("more_body"):
        whole: bytes = message.get("body", b"")
        return whole
    parts = bytearray(message.get("body", b""))
    while message.get("more_body"):
        message = await receive()
        parts += message.get("body", b"")
        if len(parts) > MAX_EXEC_BODY:
            raise InvalidArgument(f"the request has more than {MAX_EXEC_BODY} bytes")
    if message["type"] == "http.disconnect":
        raise InvalidArgument("the request was cut off")
    return parts


async def _answer(send: Send, status: int, body: bytes, headers: list[tuple[bytes, bytes]]) -> None:
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _stream(send: Send, pieces: Iterator[bytes]) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": _JSON})
    for piece in pieces:
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body", "body": b""})
