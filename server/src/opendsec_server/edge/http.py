"""The edge's HTTP API: handlers verify, convert, call, convert back."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from typing import Annotated, Any, Literal
from urllib.parse import parse_qs

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
from opendsec_server.edge.service import EdgeService, parse_labels
from opendsec_server.edge.signal_names import signal_number
from opendsec_server.platform.http import NDJSON, OCTETS, StreamAnswer

_encode = msgspec.json.Encoder().encode
#: The request, untyped where litestar's own generics say nothing more.
Req = Request[Any, Any, Any]


def _line(value: Any) -> bytes:
    return _encode(value) + b"\n"


def path_of(request: Req, name: str = "path") -> bytes:
    """Return a path parameter as the bytes that were percent-encoded.

    Raises:
        InvalidArgument: absent, relative, or with a NUL byte.
    """
    raw = request.scope["query_string"].decode("latin-1")
    values = parse_qs(raw, keep_blank_values=True, encoding="latin-1").get(name)
    if not values:
        raise InvalidArgument(f"{name} is missing", field=name)
    path = values[-1].encode("latin-1")
    if not path.startswith(b"/") or b"\0" in path:
        raise InvalidArgument(f"{name} must be an absolute path without NUL bytes", field=name)
    return path


def _mode(text: str | None, default: int | None = None) -> int | None:
    if text is None:
        return default
    try:
        mode = int(text, 8)
    except ValueError:
        raise InvalidArgument("mode must be octal digits such as 755", field="mode") from None
    if not 0 <= mode <= 0o7777:
        raise InvalidArgument("mode must be between 0 and 7777", field="mode")
    return mode


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

    async def lines() -> AsyncGenerator[bytes, None]:
        with life.use() if not life.is_over else contextlib.nullcontext():
            async for chunk in life.execs.follow(exec_, (max(stdout, 0), max(stderr, 0)), follow=follow):
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
    except PlatformError as error:
        await socket.accept()
        await socket.close(code=4000 + error.http_status, reason=error.code)
        return
    await socket.accept()

    async def send() -> None:
        async for chunk in life.execs.follow(exec_, (max(stdout, 0), max(stderr, 0)), follow=True):
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


# -- files -------------------------------------------------------------------------------------------------------------

_FILES = "/v1/sandboxes/{sandbox_id:str}/files"


async def _limited(request: Req) -> AsyncIterator[bytes]:
    async for piece in request.stream():
        if piece:
            yield piece


@get(_FILES, tags=["files"])
async def read_file(
    request: Req,
    sandbox_id: str,
    service: EdgeService,
    path: str,
    offset: int = 0,
    length: int | None = None,
    user: str = "0",
) -> Response[bytes]:
    """Stream a regular file or a range of it."""
    life, name = service.life(sandbox_id), path_of(request)
    if offset < 0 or (length is not None and length < 0):
        raise InvalidArgument("offset and length must not be negative")

    async def pieces() -> AsyncGenerator[bytes, None]:
        with life.use():
            channel = await life.wait_channel()
            async for piece in channel.read_file(name, offset=offset, length=length, user=user):
                yield piece

    return StreamAnswer(pieces(), OCTETS)


@put(_FILES, status_code=HTTP_200_OK, tags=["files"], request_max_body_size=None)
async def write_file(
    request: Req,
    sandbox_id: str,
    service: EdgeService,
    path: str,
    mode: str | None = None,
    offset: int | None = None,
    append: bool = False,
    parents: bool = False,
    user: str = "0",
) -> dict[str, int]:
    """Write the body to a regular file: atomically anew, at an offset, or at its end."""
    life, name = service.life(sandbox_id), path_of(request)
    with life.use():
        channel = await life.wait_channel()
        written = await channel.write_file(
            name, _limited(request), mode=_mode(mode), offset=offset, append=append, parents=parents, user=user
        )
    return {"written": written}


@delete(_FILES, status_code=HTTP_204_NO_CONTENT, tags=["files"])
async def remove_file(
    request: Req,
    sandbox_id: str,
    service: EdgeService,
    path: str,
    recursive: bool = False,
    user: str = "0",
) -> None:
    """Remove a file, an empty directory, or with ``recursive`` a tree."""
    life, name = service.life(sandbox_id), path_of(request)
    with life.use():
        await (await life.wait_channel()).remove(name, recursive=recursive, user=user)


@get(f"{_FILES}/stat", tags=["files"])
async def stat_file(
    request: Req,
    sandbox_id: str,
    service: EdgeService,
    path: str,
    user: str = "0",
) -> models.FileInfo:
    """Describe a path without following a last symbolic link."""
    life, name = service.life(sandbox_id), path_of(request)
    with life.use():
        return await (await life.wait_channel()).stat(name, user=user)


@get(f"{_FILES}/list", tags=["files"])
async def list_files(
    request: Req,
    sandbox_id: str,
    service: EdgeService,
    path: str,
    recursive: bool = False,
    user: str = "0",
) -> Response[bytes]:
    """List a directory as lines of ``FileInfo``."""
    life, name = service.life(sandbox_id), path_of(request)

    async def lines() -> AsyncGenerator[bytes, None]:
        with life.use():
            channel = await life.wait_channel()
            async for info in channel.list_dir(name, recursive=recursive, user=user):
                yield _line(info)

    return StreamAnswer(lines(), NDJSON)


@post(f"{_FILES}/mkdir", status_code=HTTP_204_NO_CONTENT, tags=["files"])
async def make_directory(
    request: Req,
    sandbox_id: str,
    service: EdgeService,
    path: str,
    mode: str | None = None,
    parents: bool = False,
    user: str = "0",
) -> None:
    """Make a directory, with ``parents`` also those above it."""
    life, name = service.life(sandbox_id), path_of(request)
    with life.use():
        channel = await life.wait_channel()
        await channel.mkdir(name, mode=_mode(mode, 0o755) or 0, parents=parents, user=user)


@post(f"{_FILES}/move", status_code=HTTP_204_NO_CONTENT, tags=["files"])
async def move_file(
    request: Req,
    sandbox_id: str,
    service: EdgeService,
    source: str,
    target: str,
    user: str = "0",
) -> None:
    """Rename a file or a tree."""
    life, old, new = service.life(sandbox_id), path_of(request, "source"), path_of(request, "target")
    with life.use():
        await (await life.wait_channel()).move(old, new, user=user)


@get("/v1/sandboxes/{sandbox_id:str}/archive", tags=["files"])
async def read_archive(
    request: Req,
    sandbox_id: str,
    service: EdgeService,
    path: str,
    user: str = "0",
) -> Response[bytes]:
    """Stream a tree as tar, names relative to ``path``."""
    life, name = service.life(sandbox_id), path_of(request)

    async def pieces() -> AsyncGenerator[bytes, None]:
        with life.use():
            channel = await life.wait_channel()
            async for piece in channel.tar_out(name, user=user):
                yield piece

    return StreamAnswer(pieces(), "application/x-tar")


@put(
    "/v1/sandboxes/{sandbox_id:str}/archive",
    status_code=HTTP_204_NO_CONTENT,
    tags=["files"],
    request_max_body_size=None,
)
async def write_archive(
    request: Req,
    sandbox_id: str,
    service: EdgeService,
    path: str,
    user: str = "0",
) -> None:
    """Unpack a tar below ``path``; members that would leave it are refused."""
    life, name = service.life(sandbox_id), path_of(request)
    with life.use():
        await (await life.wait_channel()).tar_in(name, _limited(request), user=user)


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
    read_file,
    write_file,
    remove_file,
    stat_file,
    list_files,
    make_directory,
    move_file,
    read_archive,
    write_archive,
    list_nodes,
    drain_node,
    healthz,
    metrics,
)
