"""The front door: authenticates every request, then forwards it or hands it to a handler.

Everything about one sandbox goes to the edge that its id names, and images go to any healthy edge, as bytes. Only what
needs more than one edge, or the apiserver itself, reaches the handlers in ``http.py``.
"""

from __future__ import annotations

import asyncio
import time

import structlog

from opendsec.api import ids
from opendsec.api.errors import Internal, NotFound, PlatformError, Unavailable
from opendsec_server.apiserver.edge_client import EdgeClient
from opendsec_server.apiserver.iam import Iam, Principal
from opendsec_server.apiserver.metrics import ApiMetrics
from opendsec_server.apiserver.proxy import (
    CLIENT_LEFT,
    ClientLeft,
    forward,
    forward_websocket,
    send_error,
)
from opendsec_server.apiserver.watcher import Watcher
from opendsec_server.platform.http import App, Message, Receive, Scope, Send

_SANDBOXES = "/v1/sandboxes/"
_IMAGES = "/v1/images"
_log = structlog.get_logger(__name__)


class FrontDoor:
    """The ASGI application of the apiserver.

    Args:
        iam: verifies keys.
        watcher: knows the edges.
        handlers: application that serves what is not forwarded.
        metrics: counts requests.
    """

    def __init__(self, iam: Iam, watcher: Watcher, handlers: App, metrics: ApiMetrics) -> None:
        self._iam = iam
        self._watcher = watcher
        self._handlers = handlers
        self._metrics = metrics
        self._inflight = 0
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._stopping = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] == "lifespan":
            await self._handlers(scope, receive, send)
            return
        started = time.perf_counter()
        status = 500
        self._enter()
        try:
            if scope["type"] == "http":
                status = await self._http(scope, receive, send)
            else:
                status = await self._websocket(scope, receive, send)
        except ClientLeft:
            status = CLIENT_LEFT
        finally:
            self._leave()
            self._metrics.end(scope.get("method", "WS"), scope["path"], status, time.perf_counter() - started)

    async def drain(self, deadline_seconds: float) -> None:
        """Refuse new requests and return when those under way have ended, or after the deadline."""
        self._stopping = True
        try:
            async with asyncio.timeout(deadline_seconds):
                await self._quiet.wait()
        except TimeoutError:
            _log.warning("requests_cut", count=self._inflight)

    # -- inside ----------------------------------------------------------------------------------------------------

    def _enter(self) -> None:
        self._metrics.begin()
        self._inflight += 1
        self._quiet.clear()

    def _leave(self) -> None:
        self._inflight -= 1
        if not self._inflight:
            self._quiet.set()

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> int:
        begun = _Begun(send)
        try:
            path: str = scope["path"]
            if path == "/healthz" or path.startswith("/schema"):
                await self._handlers(scope, receive, begun)
                return begun.status
            await self._authenticate(scope)
            if self._stopping:
                raise Unavailable("the apiserver is stopping", retry_after=1.0)  # noqa: TRY301
            edge = await self._edge_for(path)
            if edge is not None:
                if scope["method"] == "HEAD":
                    raise NotFound("HEAD is not served here: use GET")  # noqa: TRY301
                return await forward(scope, receive, begun, edge)
            await self._handlers(scope, receive, begun)
        except PlatformError as error:
            if begun.status:
                raise
            return await send_error(send, error)
        except (ClientLeft, ConnectionError):
            raise
        except Exception:
            _log.exception("request_failed", path=scope["path"])
            if begun.status:
                raise
            return await send_error(send, Internal("the apiserver failed; its log says more"))
        return begun.status

    async def _websocket(self, scope: Scope, receive: Receive, send: Send) -> int:
        begun = _Begun(send)
        try:
            await self._authenticate(scope)
            edge = await self._edge_for(scope["path"])
            if edge is None:
                await self._handlers(scope, receive, begun)
            else:
                await forward_websocket(scope, receive, begun, edge)
        except PlatformError as error:
            if begun.status:
                await send({"type": "websocket.close", "code": 1012, "reason": error.code})
                return error.http_status
            return await send_error(send, error, websocket=True)
        return 101

    async def _authenticate(self, scope: Scope) -> None:
        credentials: bytes | None = None
        for name, value in scope["headers"]:
            if name == b"authorization":
                credentials = value
                break
        principal: Principal | None = self._iam.authenticate_nowait(credentials)
        if principal is None:
            principal = await self._iam.authenticate(credentials)
        scope.setdefault("state", {})["principal"] = principal

    async def _edge_for(self, path: str) -> EdgeClient | None:
        """Return the edge a request is forwarded to, None if a handler serves it."""
        if path.startswith(_SANDBOXES):
            sandbox = path[len(_SANDBOXES) :].partition("/")[0]
            if sandbox == "claim":
                return None
            node = ids.node_of(sandbox)
            return self._watcher.edge_of_nowait(node) or await self._watcher.edge_of(node)
        if path == _IMAGES or path.startswith(_IMAGES + "/"):
            await self._watcher.wait_first_round()
            edges = self._watcher.edges()
            if not edges:
                raise Unavailable("no node answers", retry_after=1.0)
            return edges[0]
        return None


class _Begun:
    """Passes messages on and remembers the status of an answer that has begun."""

    __slots__ = ("_send", "status")

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status = 0

    async def __call__(self, message: Message) -> None:
        kind = message["type"]
        if kind == "http.response.start":
            self.status = message["status"]
        elif kind == "websocket.accept":
            self.status = 101
        await self._send(message)
