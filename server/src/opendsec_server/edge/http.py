"""The edge's HTTP API: handlers verify, convert, call, convert back."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Annotated, Any, Literal

import msgspec
from litestar import MediaType, Request, Response, WebSocket, delete, get, post, put, websocket
from litestar.exceptions import WebSocketDisconnect
from litestar.handlers import BaseRouteHandler
from litestar.params import Parameter
from litestar.status_codes import HTTP_200_OK, HTTP_201_CREATED, HTTP_204_NO_CONTENT

from opendsec.api import models
from opendsec.api.errors import InvalidArgument, PlatformError, UnsupportedCapability
from opendsec_server.core.validate import check_network_rules
from opendsec_server.edge.results import is_large, result_pieces
from opendsec_server.edge.service import EdgeService
from opendsec_server.edge.signal_names import signal_number
from opendsec_server.platform.http import NDJSON, StreamAnswer

_encode = msgspec.json.Encoder().encode
#: The request, untyped where litestar's own generics say nothing more.
Req = Request[Any, Any, Any]


def _line(value: Any) -> bytes:
    return _encode(value) + b"\n"


def parse_labels(pairs: Sequence[str]) -> dict[str, str]:
    """Turn ``key=value`` conditions into a dictionary.

    Raises:
        InvalidArgument: a condition has no ``=``.
    """
    labels = {}
    for pair in pairs:
        key, mark, value = pair.partition("=")
        if not mark or not key:
            raise InvalidArgument(f"label condition {pair[:80]!r} is not key=value", field="label")
        labels[key] = value
    return labels


def _offsets(stdout: int, stderr: int) -> tuple[int, int]:
    if stdout < 0 or stderr < 0:
        raise InvalidArgument("offsets must not be negative", field="stdout" if stdout < 0 else "stderr")
    return stdout, stderr


# -- sandboxes ---------------------------------------------------------------------------------------------------------


@post("/v1/sandboxes", status_code=HTTP_201_CREATED, tags=["sandboxes"])
async def create_sandbox(data: models.CreateSandbox, service: EdgeService) -> models.Sandbox:
    """Create one sandbox on this node; repeating ``request_id`` returns the same one."""
    if data.count is not None:
        raise InvalidArgument("an edge creates one sandbox at a time; batches are the apiserver's", field="count")
    # A client that leaves does not stop a create: it is found by its request id, or its lease ends it.
    return await asyncio.shield(asyncio.ensure_future(service.create(data)))


@get("/v1/sandboxes", tags=["sandboxes"])
async def list_sandboxes(
    service: EdgeService,
    label: list[str] | None = None,
    job: str | None = None,
    states: Annotated[list[models.State] | None, Parameter(query="state")] = None,
    request_id: str | None = None,
) -> list[models.Sandbox]:
    """List sandboxes that match all conditions."""
    return service.list(parse_labels(label or ()), job, states or (), request_id)


@post("/v1/sandboxes/claim", status_code=HTTP_204_NO_CONTENT, tags=["sandboxes"])
async def claim_sandboxes(data: models.Claim, service: EdgeService) -> None:
    """End the leases of sandboxes: their creator has learned their ids."""
    service.claim(data.ids)


@get("/v1/sandboxes/{sandbox_id:str}", tags=["sandboxes"])
async def get_sandbox(sandbox_id: str, service: EdgeService) -> models.Sandbox:
    """Return what is known of a sandbox."""
    return service.get(sandbox_id)


@delete("/v1/sandboxes/{sandbox_id:str}", status_code=HTTP_200_OK, tags=["sandboxes"])
async def stop_sandbox(sandbox_id: str, service: EdgeService) -> models.Sandbox:
    """End a sandbox from any state; answers when nothing of it is left. Repeating is fine."""
    return await service.stop(sandbox_id)


@get("/v1/sandboxes/{sandbox_id:str}/metrics", tags=["sandboxes"])
async def sandbox_metrics(sandbox_id: str, service: EdgeService) -> models.Metrics:
    """Return a sandbox's resource use."""
    return await service.usage(sandbox_id)


@post("/v1/sandboxes/{sandbox_id:str}/{operation:str}", tags=["sandboxes"])
async def later(
    sandbox_id: str, operation: Literal["pause", "resume", "pack_diff", "fork"], service: EdgeService
) -> None:
    """Refuse what no backend of this installation can do yet (``unsupported_capability``)."""
    service.life(sandbox_id)
    raise UnsupportedCapability(f"{operation} is not supported by this installation", field=operation)


@put("/v1/sandboxes/{sandbox_id:str}/network", status_code=HTTP_204_NO_CONTENT, tags=["sandboxes"])
async def set_network(sandbox_id: str, data: dict[str, bool], service: EdgeService) -> None:
    """Set network rules; only ``False`` values can be enforced yet."""
    service.life(sandbox_id)
    check_network_rules(data)


# -- execs -------------------------------------------------------------------------------------------------------------


@post("/v1/sandboxes/{sandbox_id:str}/execs", status_code=HTTP_200_OK, tags=["execs"])
async def start_exec(
    sandbox_id: str, data: models.ExecRequest, service: EdgeService
) -> models.ExecResult | models.Exec:
    """Start a command; with ``wait_seconds`` the answer has its output and, if it ended, its outcome."""
    return await service.run(sandbox_id, data)


@get("/v1/sandboxes/{sandbox_id:str}/execs", tags=["execs"])
async def list_execs(sandbox_id: str, service: EdgeService) -> list[models.Exec]:
    """List the commands that are remembered, oldest first."""
    table = service.life(sandbox_id).execs
    return [table.describe(exec_) for exec_ in table.execs.values()]


@get("/v1/sandboxes/{sandbox_id:str}/execs/{exec_id:str}", tags=["execs"])
async def get_exec(
    sandbox_id: str, exec_id: str, service: EdgeService, wait_seconds: float = 0.0, output: bool = False
) -> Response[models.ExecResult | models.Exec]:
    """Return a command's state, with ``output`` also what it wrote; waits for its end as long as asked."""
    life = service.life(sandbox_id)
    exec_ = life.execs.get(exec_id)
    if wait_seconds > 0:
        with life.use():
            await service.wait_exec(life, exec_, min(wait_seconds, 86_400.0))
    if output and is_large(exec_):
        return StreamAnswer(_each(result_pieces(life.execs, exec_)), MediaType.JSON)
    return Response(life.execs.result(exec_) if output else life.execs.describe(exec_))


async def _each(pieces: Iterator[bytes]) -> AsyncGenerator[bytes, None]:
    for piece in pieces:
        yield piece


@get("/v1/sandboxes/{sandbox_id:str}/execs/{exec_id:str}/output", tags=["execs"])
async def exec_output(
    sandbox_id: str, exec_id: str, service: EdgeService, stdout: int = 0, stderr: int = 0, follow: bool = False
) -> Response[bytes]:
    """Stream output from byte offsets as lines of ``OutputChunk``; with ``follow`` until the command has ended."""
    life = service.life(sandbox_id)
    exec_ = life.execs.get(exec_id)
    offsets = _offsets(stdout, stderr)

    async def lines() -> AsyncGenerator[bytes, None]:
        with life.use() if not life.is_over else contextlib.nullcontext():
            async for chunk in life.execs.follow(exec_, offsets, follow=follow):
                yield _line(chunk)

    return StreamAnswer(lines(), NDJSON, at_once=True)


@post("/v1/sandboxes/{sandbox_id:str}/execs/{exec_id:str}/signal", status_code=HTTP_204_NO_CONTENT, tags=["execs"])
async def signal_exec(sandbox_id: str, exec_id: str, data: models.Signal, service: EdgeService) -> None:
    """Send a signal to a command's main process or its whole tree."""
    await service.signal(sandbox_id, exec_id, data.signal, tree=data.tree)


@post(
    "/v1/sandboxes/{sandbox_id:str}/execs/{exec_id:str}/stdin",
    status_code=HTTP_204_NO_CONTENT,
    tags=["execs"],
    request_max_body_size=None,
)
async def write_stdin(request: Req, sandbox_id: str, exec_id: str, service: EdgeService, eof: bool = False) -> None:
    """Write the body to standard input; with ``eof`` then end it. Waits while the command does not read."""
    life = service.life(sandbox_id)
    life.execs.get(exec_id)
    with life.use():
        channel = await life.wait_channel()
        async for piece in request.stream():
            if piece:
                await channel.exec_stdin(exec_id, piece)
        if eof:
            await channel.exec_stdin_close(exec_id)


@delete("/v1/sandboxes/{sandbox_id:str}/execs/{exec_id:str}", status_code=HTTP_204_NO_CONTENT, tags=["execs"])
async def delete_exec(sandbox_id: str, exec_id: str, service: EdgeService) -> None:
    """Kill a command's process tree if it runs, then forget the command."""
    await service.kill_and_forget(sandbox_id, exec_id)


class _Attached(msgspec.Struct, forbid_unknown_fields=True):
    """A text message from an attached client."""

    eof: bool = False
    signal: str | None = None
    tree: bool = False


@websocket("/v1/sandboxes/{sandbox_id:str}/execs/{exec_id:str}/attach")
async def attach(
    socket: WebSocket[Any, Any, Any],
    sandbox_id: str,
    exec_id: str,
    service: EdgeService,
    stdout: int = 0,
    stderr: int = 0,
) -> None:
    """Follow a command's output and send it input and signals; ends with its final state."""
    try:
        life = service.life(sandbox_id)
        exec_ = life.execs.get(exec_id)
        offsets = _offsets(stdout, stderr)
    except PlatformError as error:
        await socket.accept()
        await socket.close(code=4000 + error.http_status, reason=error.code)
        return
    await socket.accept()

    async def send() -> None:
        async for chunk in life.execs.follow(exec_, offsets, follow=True):
            await socket.send_text(_encode(chunk).decode())
        await socket.send_text(_encode(life.execs.describe(exec_)).decode())

    async def receive() -> None:
        while True:
            message: dict[str, Any] = dict(await socket.receive())
            if message["type"] == "websocket.disconnect":
                raise WebSocketDisconnect(detail="the client left")
            channel = await life.wait_channel()
            if data := message.get("bytes"):
                await channel.exec_stdin(exec_id, data)
            elif text := message.get("text"):
                wish = msgspec.json.decode(text, type=_Attached)
                if wish.signal is not None:
                    await channel.exec_signal(exec_id, signal_number(wish.signal), tree=wish.tree)
                if wish.eof:
                    await channel.exec_stdin_close(exec_id)

    with life.use():
        sending, receiving = asyncio.create_task(send()), asyncio.create_task(receive())
        await asyncio.wait((sending, receiving), return_when=asyncio.FIRST_COMPLETED)
        failure = receiving.exception() if receiving.done() and not receiving.cancelled() else None
        if isinstance(failure, PlatformError) and not sending.done():
            # Input for a command that has ended is no reason to cut its output.
            await asyncio.wait((sending,))
        for task in (sending, receiving):
            task.cancel()
        await asyncio.gather(sending, receiving, return_exceptions=True)
        with contextlib.suppress(Exception):
            if isinstance(failure, msgspec.MsgspecError):
                await socket.close(code=1003, reason="malformed message")
            elif not isinstance(failure, WebSocketDisconnect):
                await socket.close(code=1000)


# -- the node ----------------------------------------------------------------------------------------------------------


@get("/v1/nodes", tags=["nodes"])
async def list_nodes(service: EdgeService) -> list[models.Node]:
    """Describe this node."""
    return [service.node()]


@post("/v1/nodes/{node:str}/{what:str}", status_code=HTTP_200_OK, tags=["nodes"])
async def drain_node(node: str, what: Literal["drain", "undrain"], service: EdgeService) -> models.Node:
    """Take no new sandboxes (``drain``), or take them again (``undrain``)."""
    return service.drain(node, on=what == "drain")


@get("/healthz", tags=["operation"])
async def healthz() -> dict[str, str]:
    """Say that the edge serves."""
    return {"status": "ok"}


@get("/metrics", media_type=MediaType.TEXT, include_in_schema=False)
async def metrics(service: EdgeService) -> bytes:
    """Return the metrics in Prometheus' text format."""
    return service.metrics.render()


HANDLERS: Sequence[BaseRouteHandler] = (
    create_sandbox,
    list_sandboxes,
    claim_sandboxes,
    get_sandbox,
    stop_sandbox,
    sandbox_metrics,
    later,
    set_network,
    start_exec,
    list_execs,
    get_exec,
    exec_output,
    signal_exec,
    write_stdin,
    delete_exec,
    attach,
    list_nodes,
    drain_node,
    healthz,
    metrics,
)
