"""Handlers of what the apiserver serves itself; they convert, call, and convert back.

Requests for one sandbox and for images never come here: ``front.py`` forwards them. Their part of the OpenAPI document
is taken from the edge's (``document.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from litestar import MediaType, Response, get, post
from litestar.handlers import BaseRouteHandler
from litestar.params import Parameter
from litestar.status_codes import HTTP_200_OK, HTTP_201_CREATED, HTTP_204_NO_CONTENT

from opendsec.api.models import Claim, CreateSandbox, Job, JobStopped, Node, Sandbox, State
from opendsec_server.apiserver.batches import Batch
from opendsec_server.apiserver.metrics import ApiMetrics
from opendsec_server.apiserver.service import ApiService
from opendsec_server.platform.http import NDJSON, StreamAnswer


@post("/v1/sandboxes", status_code=HTTP_201_CREATED, tags=["sandboxes"])
async def create_sandbox(data: CreateSandbox, service: ApiService) -> Response[Sandbox]:
    """Create one sandbox; with ``count``, that many, answered as lines of ``CreateResult`` as they complete."""
    if data.count is not None:
        return StreamAnswer(Batch(service, data).lines(), NDJSON)
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
async def schema(service: ApiService) -> Response[Any]:
    """Return the OpenAPI document."""
    from opendsec_server.apiserver.document import document, render, shipped  # noqa: PLC0415 - it reads DOCUMENTED

    edge = shipped() or await service.edge_document()
    return Response(render(document(edge)), media_type="application/vnd.oai.openapi+json")


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
