"""What HTTP handlers of both programs share: streamed answers, and errors as they cross the wire."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any

import structlog
from litestar import Request, Response
from litestar.exceptions import HTTPException
from litestar.status_codes import HTTP_401_UNAUTHORIZED, HTTP_404_NOT_FOUND, HTTP_405_METHOD_NOT_ALLOWED

from opendsec.api.errors import ErrorBody, Internal, InvalidArgument, NotFound, PlatformError

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_log = structlog.get_logger(__name__)
NDJSON = "application/x-ndjson"
OCTETS = "application/octet-stream"


class StreamAnswer(Response[Any]):
    """Sends pieces as they come; a client that leaves closes their source at once.

    Args:
        pieces: the body.
        media_type: its type.
        at_once: send the head before the first piece is there, because it may be long in coming; an error in its
            making then cuts the connection instead of getting a status of its own.
    """

    def __init__(
        self, pieces: AsyncGenerator[bytes, None] | AsyncIterator[bytes], media_type: str, *, at_once: bool = False
    ) -> None:
        super().__init__(None, media_type=media_type)
        self._pieces = pieces
        self._type = media_type.encode()
        self._at_once = at_once

    def to_asgi_response(self, *_: Any, **__: Any) -> Any:
        """Return the application that sends the pieces."""
        return self._send_pieces

    async def _send_pieces(self, _scope: Scope, receive: Receive, send: Send) -> None:
        me = asyncio.current_task()
        left = False

        async def watch() -> None:
            nonlocal left
            while (await receive())["type"] != "http.disconnect":
                pass
            left = True
            if me is not None:
                me.cancel()

        iterator = aiter(self._pieces)
        watcher = asyncio.create_task(watch())
        try:
            # The first piece is taken before the head is sent, so that an error still gets its own status.
            first = None if self._at_once else await anext(iterator, None)
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", self._type)]})
            if first is not None or self._at_once:
                # Granian sends the head with the first piece, be it empty.
                await send({"type": "http.response.body", "body": first or b"", "more_body": True})
            if first is not None or self._at_once:
                async for piece in iterator:
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        except asyncio.CancelledError:
            if not left or me is None:
                raise
            me.uncancel()
        finally:
            watcher.cancel()
            if isinstance(self._pieces, AsyncGenerator):
                await self._pieces.aclose()


def error_headers(error: PlatformError) -> dict[str, str]:
    """Return the headers that go with an error."""
    headers: dict[str, str] = {}
    if "retry_after" in error.detail:
        headers["retry-after"] = str(max(1, round(float(error.detail["retry_after"]))))
    if error.http_status == HTTP_401_UNAUTHORIZED:
        headers["www-authenticate"] = "Bearer"
    return headers


def _from_platform(_request: Request[Any, Any, Any], error: PlatformError) -> Response[ErrorBody]:
    return Response(error.body(), status_code=error.http_status, headers=error_headers(error))


def _from_http(_request: Request[Any, Any, Any], error: HTTPException) -> Response[ErrorBody]:
    missing = error.status_code in {HTTP_404_NOT_FOUND, HTTP_405_METHOD_NOT_ALLOWED}
    detail = error.detail or "bad request"
    extra = getattr(error, "extra", None)
    if extra:
        detail = f"{detail}: {extra}"
    return Response((NotFound if missing else InvalidArgument)(detail[:1000]).body(), status_code=error.status_code)


def _from_defect(request: Request[Any, Any, Any], error: Exception) -> Response[ErrorBody]:
    _log.error("request_failed", path=request.scope["path"], exc_info=error)
    return Response(Internal("the request failed; the log of the node says more").body(), status_code=500)


EXCEPTION_HANDLERS: dict[int | type[Exception], Any] = {
    PlatformError: _from_platform,
    HTTPException: _from_http,
    Exception: _from_defect,
}
