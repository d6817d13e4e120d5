"""A simulated edge: the HTTP API of an edge over memory, for tests of whatever talks to edges.

It keeps the API's promises that matter to a front door (idempotent create, exec ids, claim, drain, typed errors) and
runs no command: an exec answers with its shell line (or its arguments) on stdout and exit code 0. Faults are switched
on by attributes.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import WSMsgType, web

from opendsec.api import ids
from opendsec.api.errors import (
    CapacityUnavailable,
    Internal,
    InvalidArgument,
    NotFound,
    PlatformError,
    UnsupportedCapability,
)
from opendsec.api.models import TERMINAL, Claim, CreateSandbox, ExecRequest, ExecResult, Image, Node, Sandbox
from opendsec_server.core.validate import check_create

GIB = 1024**3


class SimulatedEdge:
    """One edge in memory.

    Attributes:
        capacity: most live sandboxes; above it a create gets ``capacity_unavailable``.
        gate: creates and execs wait for it; set by default.
        break_after: paths (last segment) whose connection is cut after the request was taken.
        seen: how many requests came, by ``METHOD last-segment``.
        creating_peak: most creates that were under way at once.
        disconnects: requests whose client went away while they were held at the gate.
    """

    def __init__(self, node: str = "local", *, capacity: int = 100_000) -> None:
        self.node = node
        self.capacity = capacity
        self.gate = asyncio.Event()
        self.gate.set()
        self.break_after: set[str] = set()
        self.seen: Counter[str] = Counter()
        self.creating = 0
        self.creating_peak = 0
        self.disconnects = 0
        self.draining = False
        self.sandboxes: dict[str, Sandbox] = {}
        self.claimed: set[str] = set()
        self.execs: dict[tuple[str, str], ExecResult] = {}
        self.exec_starts: Counter[str] = Counter()
        self.files: dict[tuple[str, str], bytes] = {}
        self.images: list[Image] = []
        #: Bytes of the streamed exec output and of uploads so far, in order of arrival.
        self.uploaded = 0
        self._by_request: dict[str, str] = {}
        self._ended = 0

    # -- serving ---------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def open_server(self, socket: Path) -> AsyncIterator[SimulatedEdge]:
        """Serve on a Unix socket."""
        runner = web.AppRunner(self._application(), access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        socket.unlink(missing_ok=True)  # noqa: ASYNC240 - a test's own folder
        try:
            await web.UnixSite(runner, str(socket)).start()
            yield self
        finally:
            await runner.cleanup()

    def _application(self) -> web.Application:
        app = web.Application(middlewares=[self._middleware], client_max_size=2**40)
        sandbox = "/v1/sandboxes/{id}"
        app.add_routes(
            [
                web.get("/healthz", self._health),
                web.get("/v1/nodes", self._nodes),
                web.post("/v1/nodes/{id}/{action:drain|undrain}", self._drain),
                web.post("/v1/sandboxes", self._create),
                web.get("/v1/sandboxes", self._list),
                web.post("/v1/sandboxes/claim", self._claim),
                web.get(sandbox, self._get),
                web.delete(sandbox, self._delete),
                web.post(sandbox + "/execs", self._start),
                web.get(sandbox + "/execs/{eid}", self._exec),
                web.get(sandbox + "/execs/{eid}/output", self._output),
                web.get(sandbox + "/execs/{eid}/attach", self._attach),
                web.put(sandbox + "/files", self._write),
                web.get(sandbox + "/files", self._read),
                web.get("/v1/images", self._list_images),
                web.put("/v1/images", self._import),
            ]
        )
        return app

    @web.middleware
    async def _middleware(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.seen[f"{request.method} {request.path.rsplit('/', 1)[1]}"] += 1
        try:
            response: web.StreamResponse = await handler(request)
        except PlatformError as error:
            return _json(error.body(), error.http_status)
        except msgspec.ValidationError as error:
            return _json(InvalidArgument(str(error)).body(), 400)
        except web.HTTPException as error:
            failure = NotFound("no such route") if error.status == 404 else Internal(str(error))
            return _json(failure.body(), error.status)
        except asyncio.CancelledError:
            self.disconnects += 1
            raise
        if request.path.rsplit("/", 1)[1] in self.break_after and request.transport is not None:
            request.transport.abort()
        return response

    # -- sandboxes -------------------------------------------------------------------------------------------------

    async def _create(self, request: web.Request) -> web.Response:
        spec = msgspec.json.decode(await request.read(), type=CreateSandbox)
        check_create(spec)
        if spec.request_id in self._by_request:
            return _json(self.sandboxes[self._by_request[spec.request_id or ""]], 201)
        if self.draining or self._live() + self.creating >= self.capacity:
            raise CapacityUnavailable(f"node {self.node} is full", retry_after=1.0)
        self.creating += 1
        self.creating_peak = max(self.creating_peak, self.creating)
        try:
            await self.gate.wait()
        finally:
            self.creating -= 1
        made = Sandbox(
            id=ids.new_sandbox_id(self.node),
            state="running",
            node=self.node,
            backend=spec.backend,
            runtime=spec.runtime or "runc",
            container_image=spec.container_image,
            created_at=time.time(),
            labels=spec.labels,
            job=spec.job,
            request_id=spec.request_id,
        )
        self.sandboxes[made.id] = made
        if spec.request_id is not None:
            self._by_request[spec.request_id] = made.id
        return _json(made, 201)

    async def _list(self, request: web.Request) -> web.Response:
        query = request.query
        labels = [label.partition("=")[::2] for label in query.getall("label", [])]
        states = query.getall("state", [])
        found = [
            box
            for box in self.sandboxes.values()
            if all(box.labels.get(key) == value for key, value in labels)
            and ("job" not in query or box.job == query["job"])
            and ("request_id" not in query or box.request_id == query["request_id"])
            and (not states or box.state in states)
        ]
        return _json(found)

    async def _claim(self, request: web.Request) -> web.Response:
        self.claimed.update(msgspec.json.decode(await request.read(), type=Claim).ids)
        return web.Response(status=204)

    async def _get(self, request: web.Request) -> web.Response:
        return _json(self._sandbox(request))

    async def _delete(self, request: web.Request) -> web.Response:
        box = self._sandbox(request)
        if box.state not in TERMINAL:
            box.state, box.cause, box.ended_at = "stopped", "deleted", time.time()
            self._ended += 1
        return _json(box)

    def _sandbox(self, request: web.Request) -> Sandbox:
        name = request.match_info["id"]
        if name not in self.sandboxes:
            raise NotFound(f"no sandbox {name}")
        return self.sandboxes[name]

    def _live(self) -> int:
        return len(self.sandboxes) - self._ended

    # -- execs -----------------------------------------------------------------------------------------------------

    async def _start(self, request: web.Request) -> web.Response:
        box = self._sandbox(request)
        wanted = msgspec.json.decode(await request.read(), type=ExecRequest)
        eid = wanted.id or ids.new_exec_id()
        if (box.id, eid) not in self.execs:
            self.exec_starts[eid] += 1
            text = wanted.shell if wanted.shell is not None else " ".join(wanted.argv or [])
            self.execs[box.id, eid] = ExecResult(
                id=eid, sandbox_id=box.id, state="exited", exit_code=0, stdout=text.encode()
            )
        await self.gate.wait()
        return _json(self.execs[box.id, eid], 201)

    def _found(self, request: web.Request) -> ExecResult:
        box, eid = self._sandbox(request), request.match_info["eid"]
        if (box.id, eid) not in self.execs:
            raise NotFound(f"no exec {eid}")
        return self.execs[box.id, eid]

    async def _exec(self, request: web.Request) -> web.Response:
        return _json(self._found(request))

    async def _output(self, request: web.Request) -> web.StreamResponse:
        """Stream ``?chunks=`` pieces of 64 KiB; ``?hold`` then waits at the gate."""
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(int(request.query.get("chunks", "1"))):
            await response.write(b"x" * 65536)
            self.uploaded += 65536
        if "hold" in request.query:
            await self.gate.wait()
        if "break" in request.query and request.transport is not None:
            request.transport.abort()
        return response

    async def _attach(self, request: web.Request) -> web.StreamResponse:
        """Echo; the text ``close N`` closes with that code."""
        self._found(request)
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        async for message in socket:
            if message.type == WSMsgType.TEXT and message.data.startswith("close "):
                await socket.close(code=int(message.data[6:]), message=b"asked")
            elif message.type == WSMsgType.TEXT:
                await socket.send_str(message.data)
            elif message.type == WSMsgType.BINARY:
                await socket.send_bytes(message.data)
        self.seen[f"closed {socket.close_code}"] += 1
        return socket

    # -- files, images, nodes --------------------------------------------------------------------------------------

    async def _write(self, request: web.Request) -> web.Response:
        box, size = self._sandbox(request), 0
        kept = bytearray()
        async for chunk in request.content.iter_any():
            await self.gate.wait()
            size += len(chunk)
            self.uploaded += len(chunk)
            if size <= 2**20:
                kept += chunk
        self.files[box.id, request.query["path"]] = bytes(kept)
        return _json({"size": size})

    async def _read(self, request: web.Request) -> web.Response:
        box = self._sandbox(request)
        content = self.files.get((box.id, request.query["path"]))
        if content is None:
            raise NotFound("no such file")
        return web.Response(body=content, content_type="application/octet-stream")

    async def _list_images(self, _request: web.Request) -> web.Response:
        return _json(self.images)

    async def _import(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        async for chunk in request.content.iter_any():
            self.uploaded += len(chunk)
        await response.write(b'{"message":"done"}\n')
        return response

    async def _health(self, _request: web.Request) -> web.Response:
        return _json({"status": "ok"})

    async def _nodes(self, _request: web.Request) -> web.Response:
        return _json([self.as_node()])

    async def _drain(self, request: web.Request) -> web.Response:
        if request.match_info["id"] != self.node:
            raise UnsupportedCapability("not this node")
        self.draining = request.match_info["action"] == "drain"
        return _json(self.as_node())

    def as_node(self) -> Node:
        """Return what the edge says of itself."""
        by_job = Counter(box.job for box in self.sandboxes.values() if box.job and box.state not in TERMINAL)
        return Node(
            id=self.node,
            state="draining" if self.draining else "ready",
            version="simulated",
            backends=["container"],
            runtimes=["runc"],
            sandboxes=self._live(),
            creating=self.creating,
            memory_total_bytes=1024 * GIB,
            memory_available_bytes=1000 * GIB,
            cpu_count=64,
            disk_free_bytes=1024 * GIB,
            by_job=dict(by_job),
        )


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")
