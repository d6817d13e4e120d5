"""Handlers of what the apiserver serves itself; they convert, call, and convert back.

Requests for one sandbox and for images never come here: ``front.py`` forwards them. Their part of the OpenAPI document
is taken from the edge's (``document.py``).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncGenerator, Sequence
from typing import Annotated, Any

import structlog
from litestar import MediaType, Request, Response, get, post
from litestar.exceptions import HTTPException
from litestar.handlers import BaseRouteHandler
from litestar.params import Parameter
from litestar.status_codes import HTTP_200_OK, HTTP_201_CREATED, HTTP_204_NO_CONTENT, HTTP_404_NOT_FOUND

from opendsec.api.errors import ErrorBody, Internal, InvalidArgument, NotFound, PlatformError
from opendsec.api.models import Claim, CreateSandbox, Job, JobStopped, Node, Sandbox, State
from opendsec_server.apiserver.batches import Batch
from opendsec_server.apiserver.metrics import ApiMetrics
from opendsec_server.apiserver.proxy import ClientWatch, Receive, Scope, Send, error_headers
from opendsec_server.apiserver.service import ApiService

_log = structlog.get_logger(__name__)
NDJSON = b"application/x-ndjson"


class LineStream(Response[Any]):
    """Sends lines as they come; a client that leaves closes their source at once."""

    def __init__(self, lines: AsyncGenerator[bytes, None]) -> None:
        super().__init__(None)
        self._lines = lines

    def to_asgi_response(self, *_: Any, **__: Any) -> Any:
        """Return the application that sends the lines."""
        return self._send_lines

    async def _send_lines(self, _scope: Scope, receive: Receive, send: Send) -> None:
        watch = ClientWatch(receive)
        watch.start()
        try:
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", NDJSON)]})
            async with contextlib.aclosing(self._lines) as lines:
                async for line in lines:
                    await send({"type": "http.response.body", "body": line, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        except asyncio.CancelledError:
            if not watch.left:
                raise
            if (task := asyncio.current_task()) is not None:
                task.uncancel()
        finally:
            watch.stop()


@post("/v1/sandboxes", status_code=HTTP_201_CREATED, tags=["sandboxes"])
async def create_sandbox(data: CreateSandbox, service: ApiService) -> Response[Sandbox]:
    """Create one sandbox; with ``count``, that many, answered as lines of ``CreateResult`` as they complete."""
    if data.count is not None:
        return LineStream(Batch(service, data).lines())
    created: Any = await service.create(data)
    return Response(created, media_type=MediaType.JSON, status_code=HTTP_201_CREATED)


@get("/v1/sandboxes", tags=["sandboxes"])
async def list_sandboxes(
    service: ApiService,
    label: Annotated[list[str] | None, Parameter(description="key=value; repeatable, all must match")] = None,
    job: str | None = None,
    states: Annotated[list[State] | None, Parameter(query="state", description="repeatable, any matches")] = None,
    request_id: str | None = None,
) -> Response[list[Sandbox]]:
    """List sandboxes of all nodes; dead nodes that are missing are named in ``X-OpenDSec-Missing-Nodes``."""
    query: list[tuple[str, str]] = [("label", one) for one in label or ()]
    query += [("state", one) for one in states or ()]
    query += [(key, value) for key, value in (("job", job), ("request_id", request_id)) if value is not None]
    found, missing = await service.list_sandboxes(query)
    headers = {"X-OpenDSec-Missing-Nodes": ",".join(missing)} if missing else {}
    content: Any = found
    return Response(content, media_type=MediaType.JSON, headers=headers)


@post("/v1/sandboxes/claim", status_code=HTTP_204_NO_CONTENT, tags=["sandboxes"])
async def claim_sandboxes(data: Claim, service: ApiService) -> None:
    """End the leases of sandboxes: their creator has learned their ids."""
    await service.claim(data)


@get("/v1/jobs/{job:str}", tags=["jobs"])
async def get_job(job: str, service: ApiService) -> Job:
    """Count a job's sandboxes by state."""
    return await service.job(job)


@post("/v1/jobs/{job:str}/stop", status_code=HTTP_200_OK, tags=["jobs"])
async def stop_job(job: str, service: ApiService) -> JobStopped:
    """Delete all live sandboxes of a job."""
    return await service.stop_job(job)


@get("/v1/nodes", tags=["nodes"])
async def list_nodes(service: ApiService) -> list[Node]:
    """List the nodes as the watcher sees them."""
    return await service.nodes()


@post("/v1/nodes/{node:str}/drain", status_code=HTTP_200_OK, tags=["nodes"])
async def drain_node(node: str, service: ApiService) -> Node:
    """Let a node take no new sandboxes."""
    return await service.drain(node, drain=True)


@post("/v1/nodes/{node:str}/undrain", status_code=HTTP_200_OK, tags=["nodes"])
async def undrain_node(node: str, service: ApiService) -> Node:
    """Let a node take new sandboxes again."""
    return await service.drain(node, drain=False)


@get("/healthz", tags=["operation"])
async def healthz() -> dict[str, str]:
    """Say that the apiserver serves; it says nothing about edges."""
    return {"status": "ok"}


@get(["/schema", "/schema/openapi.json"], include_in_schema=False)
async def schema() -> Response[Any]:
    """Return the OpenAPI document."""
    return Response(_schema(), media_type="application/vnd.oai.openapi+json")


@functools.cache
def _schema() -> bytes:
    from opendsec_server.apiserver.document import document, render  # noqa: PLC0415 - it reads HANDLERS

    return render(document())


@get("/metrics", media_type=MediaType.TEXT, include_in_schema=False)
async def metrics(registry: ApiMetrics) -> bytes:
    """Return the metrics in Prometheus' text format."""
    return registry.render()


#: What the OpenAPI document describes.
DOCUMENTED: Sequence[BaseRouteHandler] = (
    create_sandbox,
    list_sandboxes,
    claim_sandboxes,
    get_job,
    stop_job,
    list_nodes,
    drain_node,
    undrain_node,
    healthz,
)
HANDLERS: Sequence[BaseRouteHandler] = (*DOCUMENTED, schema, metrics)


def _from_platform(_request: Request[Any, Any, Any], error: PlatformError) -> Response[ErrorBody]:
    return Response(error.body(), status_code=error.http_status, headers=error_headers(error))


def _from_http(_request: Request[Any, Any, Any], error: HTTPException) -> Response[ErrorBody]:
    kind = NotFound if error.status_code == HTTP_404_NOT_FOUND else InvalidArgument
    return Response(kind(error.detail or "bad request").body(), status_code=error.status_code)


def _from_defect(request: Request[Any, Any, Any], error: Exception) -> Response[ErrorBody]:
    _log.error("request_failed", path=request.scope["path"], exc_info=error)
    return Response(Internal("the apiserver failed; its log says more").body(), status_code=500)


EXCEPTION_HANDLERS: dict[int | type[Exception], Any] = {
    PlatformError: _from_platform,
    HTTPException: _from_http,
    Exception: _from_defect,
}
