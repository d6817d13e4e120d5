"""An in-memory twin of the platform: the HTTP API v1 over dictionaries, on a Unix socket."""

from __future__ import annotations

import asyncio
import re
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import msgspec
from aiohttp import web

from opendsec._client import DSecClient
from opendsec._version import __version__
from opendsec.api import ids
from opendsec.api.errors import (
    CapacityUnavailable,
    Conflict,
    ImageUnavailable,
    Internal,
    InvalidArgument,
    NotFound,
    PlatformError,
    SandboxGone,
    Unauthenticated,
    UnsupportedCapability,
)
from opendsec.api.models import (
    TERMINAL,
    Claim,
    CreateResult,
    CreateSandbox,
    ExecRequest,
    ExecResult,
    Image,
    ImportImage,
    JobStopped,
    Layer,
    Limits,
    Metrics,
    Node,
    OutputChunk,
    Progress,
    Sandbox,
    Signal,
    TagImage,
)
from opendsec.testing import _files
from opendsec.testing._state import FakeCommand, FakeExec, FakeSandbox, Handler, default_handler

_Route = Callable[[web.Request], Awaitable[web.StreamResponse]]
_FileRoute = Callable[[FakeSandbox, web.Request], Awaitable[web.Response]]


class Hold:
    """Requests held at the door, done but unanswered.

    Attributes:
        reached: set when one is held.
        release: set it to let them be answered.
    """

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self.release = asyncio.Event()


class Fault(msgspec.Struct, kw_only=True):
    """Something that goes wrong with the next matching requests."""

    method: str
    pattern: str
    how: Literal["before", "after", "error", "cut", "hold"]
    times: int
    error: PlatformError | None = None
    hold: Hold | None = None


class FakeServer:
    """A platform in memory, for tests of what uses the SDK.

    ``async with FakeServer() as server, server.client() as client: …``. Sandboxes are dictionaries; commands are run by
    handlers (``on_command``), by default a handful of built-in ones (``true false echo cat sleep exit``).

    Attributes:
        api_key: the key that requests must carry.
        capacity: most live sandboxes; above it a create gets ``capacity_unavailable``.
        images: references that can be run; ``debian:bookworm`` and ``python:3.11`` from the start.
        sandboxes: all sandboxes by id.
        seen: how many requests came, by method and path with ids replaced by ``*``.
    """

    def __init__(self, *, api_key: str = "test-key", capacity: int = 100_000) -> None:
        self.api_key = api_key
        self.capacity = capacity
        self.images: dict[str, Layer] = {}
        self.sandboxes: dict[str, FakeSandbox] = {}
        self.seen: Counter[str] = Counter()
        self.draining = False
        for reference in ("debian:bookworm", "python:3.11"):
            self.add_image(reference)
        self._handlers: list[Handler] = [default_handler]
        self._faults: list[Fault] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._runner: web.AppRunner | None = None
        self._folder: Path | None = None

    # -- what tests call -------------------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        """Address for ``DSecClient``."""
        if self._folder is None:
            raise RuntimeError("the server does not run: use `async with FakeServer() as server`")
        return f"unix://{self._folder}/api.sock"

    def client(self, **options: Any) -> DSecClient:
        """Return a client (not open yet) for this server; ``options`` are ``DSecClient``'s."""
        return DSecClient(self.url, self.api_key, **options)

    def on_command(self, handler: Handler) -> Handler:
        """Let ``handler`` run commands before the handlers known so far; usable as a decorator.

        It returns the exit code, or None to leave the command to the others.
        """
        self._handlers.insert(0, handler)
        return handler

    def command(self, pattern: str, *, stdout: str = "", stderr: str = "", exit_code: int = 0) -> None:
        """Give a fixed answer to commands whose line matches a regular expression."""
        compiled = re.compile(pattern)

        async def handler(command: FakeCommand) -> int | None:
            if compiled.search(command.line) is None:
                return None
            command.write(stdout)
            command.write(stderr, stream="stderr")
            return exit_code

        self.on_command(handler)

    def fail(self, method: str, pattern: str, error: PlatformError, *, times: int = 1) -> None:
        """Answer the next matching requests with an error and do nothing."""
        self._faults.append(Fault(method=method, pattern=pattern, how="error", times=times, error=error))

    def break_connection(
        self, method: str, pattern: str, *, when: Literal["before", "after", "cut"] = "after", times: int = 1
    ) -> None:
        """Break the connection of the next matching requests.

        Args:
            method: HTTP method.
            pattern: regular expression that the path must match.
            when: ``before`` anything was done, ``after`` it but before the answer, or ``cut`` in the middle of it.
            times: how many requests.
        """
        self._faults.append(Fault(method=method, pattern=pattern, how=when, times=times))

    def hold(self, method: str, pattern: str, *, times: int = 1) -> Hold:
        """Do the next matching requests but hold back their answers."""
        hold = Hold()
        self._faults.append(Fault(method=method, pattern=pattern, how="hold", times=times, hold=hold))
        return hold

    def add_image(self, reference: str) -> Layer:
        """Make a reference runnable."""
        layer = Layer(digest="blake3:" + "0" * 64, kind="base", size=0, created_at=time.time())
        self.images[reference] = layer
        return layer

    def live(self) -> list[FakeSandbox]:
        """Return the sandboxes that have not ended."""
        return [box for box in self.sandboxes.values() if box.info.state not in TERMINAL]

    def end_sandbox(self, sandbox_id: str, *, cause: str = "chronus_lost", is_infra: bool = True) -> None:
        """Let a sandbox fail."""
        self.sandboxes[sandbox_id].end("failed", cause, is_infra=is_infra)

    def reap_unclaimed(self) -> list[str]:
        """End the leases that nobody claimed, as if their time had passed; return the ids."""
        reaped = [box for box in self.live() if box.lease_seconds is not None and not box.claimed]
        for box in reaped:
            box.end("expired", "unclaimed")
        return [box.info.id for box in reaped]

    # -- serving ---------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        self._folder = Path(tempfile.mkdtemp(prefix="opendsec-fake-"))
        self._runner = web.AppRunner(self._application(), access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.UnixSite(self._runner, str(self._folder / "api.sock")).start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._runner is not None:
            await self._runner.cleanup()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._runner = self._folder = None

    def _application(self) -> web.Application:
        app = web.Application(middlewares=[self._middleware], client_max_size=2**40)
        one = "/v1/sandboxes/{id}"
        app.add_routes(
            [
                web.get("/healthz", self._health),
                web.get("/v1/nodes", self._nodes),
                web.post("/v1/nodes/{id}/{action:drain|undrain}", self._drain),
                web.post("/v1/jobs/{job}/stop", self._stop_job),
                web.get("/v1/images", self._list_images),
                web.get("/v1/images/resolve", self._resolve_image),
                web.delete("/v1/images", self._remove_image),
                web.post("/v1/images/tag", self._tag_image),
                web.post("/v1/images", self._import_image),
                web.put("/v1/images", self._put_image),
                web.post("/v1/sandboxes", self._create),
                web.get("/v1/sandboxes", self._list),
                web.post("/v1/sandboxes/claim", self._claim),
                web.get(one, self._get),
                web.delete(one, self._delete),
                web.get(one + "/metrics", self._metrics),
                web.post(one + "/{action:pause|resume|pack_diff|fork}", self._unsupported),
                web.put(one + "/network", self._network),
                web.post(one + "/execs", self._start),
                web.get(one + "/execs", self._execs),
                web.get(one + "/execs/{eid}", self._exec),
                web.delete(one + "/execs/{eid}", self._delete_exec),
                web.get(one + "/execs/{eid}/output", self._output),
                web.post(one + "/execs/{eid}/signal", self._signal),
                web.post(one + "/execs/{eid}/stdin", self._stdin),
                web.get(one + "/files", self._file(_files.read)),
                web.put(one + "/files", self._file(_files.write)),
                web.delete(one + "/files", self._file(_files.remove)),
                web.get(one + "/files/stat", self._file(_files.stat)),
                web.get(one + "/files/list", self._file(_files.list_directory)),
                web.post(one + "/files/mkdir", self._file(_files.mkdir)),
                web.post(one + "/files/move", self._file(_files.move)),
                web.get(one + "/archive", self._file(_files.archive_out)),
                web.put(one + "/archive", self._file(_files.archive_in)),
            ]
        )
        return app

    @web.middleware
    async def _middleware(self, request: web.Request, handler: _Route) -> web.StreamResponse:
        shape = re.sub(r"(?<=/sandboxes/)(?!claim)[^/]+|(?<=/execs/)[^/]+|(?<=/nodes/)[^/]+", "*", request.path)
        self.seen[f"{request.method} {shape}"] += 1
        fault = self._next_fault(request)
        try:
            if request.path != "/healthz" and request.headers.get("Authorization") != f"Bearer {self.api_key}":
                raise Unauthenticated("no valid API key came with the request")
            if fault is not None and fault.how == "before":
                return _abort(request)
            if fault is not None and fault.error is not None:
                raise fault.error
            if fault is not None and fault.how == "cut":
                request["cut"] = True
            response = await handler(request)
        except PlatformError as error:
            return _json(error.body(), error.http_status)
        except (msgspec.ValidationError, msgspec.DecodeError) as error:
            return _json(InvalidArgument(str(error)).body(), 400)
        except web.HTTPException as error:
            failure = NotFound("no such route") if error.status == 404 else Internal(str(error))
            return _json(failure.body(), error.status)
        if fault is not None and fault.hold is not None:
            fault.hold.reached.set()
            await fault.hold.release.wait()
        return _abort(request) if fault is not None and fault.how == "after" else response

    def _next_fault(self, request: web.Request) -> Fault | None:
        for fault in self._faults:
            if fault.times > 0 and fault.method == request.method and re.search(fault.pattern, request.path):
                fault.times -= 1
                return fault
        return None

    # -- sandboxes -------------------------------------------------------------------------------------------------

    async def _create(self, request: web.Request) -> web.StreamResponse:
        spec = msgspec.json.decode(await request.read(), type=CreateSandbox)
        if spec.count is None:
            return _json(self._made(spec).info, 201)
        response = web.StreamResponse()
        await response.prepare(request)
        for index in range(spec.count):
            request_id = None if spec.request_id is None else f"{spec.request_id}/{index}"
            try:
                box = self._made(msgspec.structs.replace(spec, count=None, request_id=request_id))
                result = CreateResult(index=index, sandbox=box.info)
            except PlatformError as error:
                result = CreateResult(index=index, error=msgspec.to_builtins(error.body()))
            await response.write(msgspec.json.encode(result) + b"\n")
            if request.get("cut") and index == spec.count // 2:
                return _abort(request)
        return response

    def _made(self, spec: CreateSandbox) -> FakeSandbox:
        for box in self.sandboxes.values():
            if spec.request_id is not None and box.info.request_id == spec.request_id:
                return box
        if spec.backend != "container":
            raise UnsupportedCapability(f"no node has the backend {spec.backend}")
        _check_rules(spec.network_rules)
        if spec.container_image not in self.images:
            raise ImageUnavailable(f"image {spec.container_image} is not in the store", image=spec.container_image)
        if self.draining or len(self.live()) >= self.capacity:
            raise CapacityUnavailable("no node has room now", retry_after=0.01)
        info = Sandbox(
            id=ids.new_sandbox_id("fake"),
            state="running",
            node="fake",
            backend=spec.backend,
            runtime=spec.runtime or "runc",
            container_image=spec.container_image,
            created_at=time.time(),
            running_at=time.time(),
            layers=[self.images[spec.container_image].digest],
            workspace=spec.workspace,
            toolkits=spec.toolkits,
            limits=Limits(
                memory_mb=spec.memory_limit_mb,
                cpu_cores=spec.cpu_cores_limit,
                disk_mb=spec.disk_limit_mb,
                pids=spec.pids_limit,
                open_files=spec.open_files_limit,
            ),
            labels=spec.labels,
            job=spec.job,
            request_id=spec.request_id,
            ttl_running_stop=spec.ttl_running_stop,
            ttl_hard=spec.ttl_hard,
        )
        box = FakeSandbox(info, spec.lease_seconds)
        self.sandboxes[info.id] = box
        return box

    async def _list(self, request: web.Request) -> web.Response:
        found = [box.info for box in self.sandboxes.values()]
        states = []
        for name, value in _files.text_query(request):
            if name == "label":
                key, _, wanted = value.partition("=")
                found = [info for info in found if info.labels.get(key) == wanted]
            elif name == "state":
                states.append(value)
            else:
                found = [info for info in found if getattr(info, name) == value]
        return _json([info for info in found if not states or info.state in states])

    async def _claim(self, request: web.Request) -> web.Response:
        for sandbox_id in msgspec.json.decode(await request.read(), type=Claim).ids:
            if sandbox_id in self.sandboxes:
                self.sandboxes[sandbox_id].claimed = True
        return web.Response(status=204)

    async def _get(self, request: web.Request) -> web.Response:
        return _json(self._box(request).info)

    async def _delete(self, request: web.Request) -> web.Response:
        box = self._box(request)
        if box.info.state not in TERMINAL:
            box.end("stopped", "deleted")
        return _json(box.info)

    async def _metrics(self, request: web.Request) -> web.Response:
        self._live_box(request)
        return _json(Metrics(memory_bytes=1024 * 1024, memory_peak_bytes=2 * 1024 * 1024, cpu_seconds=0.01, pids=1))

    async def _unsupported(self, request: web.Request) -> web.Response:
        self._live_box(request)
        raise UnsupportedCapability(f"{request.match_info['action']} is not available yet")

    async def _network(self, request: web.Request) -> web.Response:
        self._live_box(request)
        _check_rules(msgspec.json.decode(await request.read(), type=dict[str, bool]))
        return web.Response(status=204)

    def _box(self, request: web.Request) -> FakeSandbox:
        box = self.sandboxes.get(request.match_info["id"])
        if box is None:
            raise NotFound(f"no sandbox {request.match_info['id']}", sandbox_id=request.match_info["id"])
        return box

    def _live_box(self, request: web.Request) -> FakeSandbox:
        box = self._box(request)
        if box.info.state in TERMINAL:
            raise SandboxGone(f"the sandbox has ended: {box.info.cause}", cause=box.info.cause)
        box.claimed = True
        return box

    async def _stop_job(self, request: web.Request) -> web.Response:
        mine = [box for box in self.live() if box.info.job == request.match_info["job"]]
        for box in mine:
            box.end("stopped", "deleted")
        return _json(JobStopped(stopped=len(mine)))

    # -- execs -----------------------------------------------------------------------------------------------------

    async def _start(self, request: web.Request) -> web.Response:
        box = self._live_box(request)
        wanted = msgspec.json.decode(await request.read(), type=ExecRequest)
        if (wanted.argv is None) == (wanted.shell is None):
            raise InvalidArgument("exactly one of argv and shell is needed")
        exec_id = wanted.id or ids.new_exec_id()
        record = box.execs.get(exec_id)
        if record is None:
            record = box.execs[exec_id] = FakeExec(box.info.id, exec_id, wanted)
            task = asyncio.get_running_loop().create_task(record.run(self._runner_of(box, record)))
            record.task = task
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        if not wanted.wait_seconds:
            return _json(record.view, 201)
        await record.wait_ended(wanted.wait_seconds)
        return _json(_result(record), 201)

    def _runner_of(self, box: FakeSandbox, record: FakeExec) -> Callable[[], Awaitable[int]]:
        async def run() -> int:
            command = FakeCommand(record, box.files)
            for handler in list(self._handlers):
                code = await handler(command)
                if code is not None:
                    return code
            return 127

        return run

    def _record(self, request: web.Request) -> FakeExec:
        record = self._box(request).execs.get(request.match_info["eid"])
        if record is None:
            raise NotFound(f"no exec {request.match_info['eid']}")
        return record

    async def _execs(self, request: web.Request) -> web.Response:
        return _json([record.view for record in self._box(request).execs.values()])

    async def _exec(self, request: web.Request) -> web.Response:
        record = self._record(request)
        await record.wait_ended(float(request.query.get("wait_seconds", "0")))
        return _json(_result(record) if request.query.get("output") == "true" else record.view)

    async def _delete_exec(self, request: web.Request) -> web.Response:
        record = self._record(request)
        if record.task is not None and not record.ended:
            record.task.cancel()
            await asyncio.gather(record.task, return_exceptions=True)
        del self._box(request).execs[record.view.id]
        return web.Response(status=204)

    async def _output(self, request: web.Request) -> web.StreamResponse:
        record = self._record(request)
        at = {"stdout": int(request.query.get("stdout", "0")), "stderr": int(request.query.get("stderr", "0"))}
        follow = request.query.get("follow") == "true"
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            changed, ended = record.changed, record.ended
            for stream in ("stdout", "stderr"):
                data = bytes(record.output[stream][at[stream] :])
                if data:
                    chunk = OutputChunk(
                        stream="stdout" if stream == "stdout" else "stderr", offset=at[stream], data=data
                    )
                    line = msgspec.json.encode(chunk) + b"\n"
                    if request.get("cut"):
                        await response.write(line[: len(line) // 2])
                        return _abort(request)
                    await response.write(line)
                    at[stream] += len(data)
            if ended or not follow:
                return response
            await changed.wait()

    async def _signal(self, request: web.Request) -> web.Response:
        record = self._record(request)
        name = msgspec.json.decode(await request.read(), type=Signal).signal.removeprefix("SIG")
        if record.ended:
            raise NotFound("the command has ended")
        if name in ("KILL", "TERM", "9", "15") and record.task is not None:
            record.killed = "SIGKILL" if name in ("KILL", "9") else "SIGTERM"
            record.task.cancel()
        else:
            record.signals.put_nowait(name)
        return web.Response(status=204)

    async def _stdin(self, request: web.Request) -> web.Response:
        record = self._record(request)
        data = await request.read()
        if record.ended or record.stdin_closed:
            raise Conflict("standard input is closed")
        record.feed(data)
        if request.query.get("eof") == "true":
            record.close_stdin()
        return web.Response(status=204)

    def _file(self, route: _FileRoute) -> _Route:
        async def handler(request: web.Request) -> web.StreamResponse:
            return await route(self._live_box(request), request)

        return handler

    # -- images and nodes ------------------------------------------------------------------------------------------

    async def _list_images(self, _request: web.Request) -> web.Response:
        return _json([Image(reference=name, layer=layer) for name, layer in sorted(self.images.items())])

    def _layer(self, reference: str) -> Layer:
        if reference not in self.images:
            raise ImageUnavailable(f"image {reference} is not in the store", image=reference)
        return self.images[reference]

    async def _resolve_image(self, request: web.Request) -> web.Response:
        reference = request.query["reference"]
        return _json(Image(reference=reference, layer=self._layer(reference)))

    async def _remove_image(self, request: web.Request) -> web.Response:
        self._layer(request.query["reference"])
        del self.images[request.query["reference"]]
        return web.Response(status=204)

    async def _tag_image(self, request: web.Request) -> web.Response:
        tag = msgspec.json.decode(await request.read(), type=TagImage)
        self.images[tag.target] = self._layer(tag.source)
        return _json(Image(reference=tag.target, layer=self.images[tag.target]))

    async def _import_image(self, request: web.Request) -> web.Response:
        wanted = msgspec.json.decode(await request.read(), type=ImportImage)
        if wanted.debian is not None and "no-such-package" in wanted.debian.packages:
            error = InvalidArgument("unable to locate package no-such-package")
            return _lines(Progress(message="building"), Progress(error=msgspec.to_builtins(error.body())))
        layer = self.add_image(wanted.reference)
        return _lines(
            Progress(message="building", fraction=0.5), Progress(image=Image(reference=wanted.reference, layer=layer))
        )

    async def _put_image(self, request: web.Request) -> web.Response:
        body = await request.read()
        reference = request.query["reference"]
        layer = self.add_image(reference)
        layer.size = len(body)
        return _lines(Progress(message="packing"), Progress(image=Image(reference=reference, layer=layer)))

    async def _health(self, _request: web.Request) -> web.Response:
        return _json({"status": "ok"})

    def _node(self) -> Node:
        state: Literal["ready", "draining"] = "draining" if self.draining else "ready"
        return Node(id="fake", state=state, version=__version__, backends=["container"], sandboxes=len(self.live()))

    async def _nodes(self, _request: web.Request) -> web.Response:
        return _json([self._node()])

    async def _drain(self, request: web.Request) -> web.Response:
        if request.match_info["id"] != "fake":
            raise NotFound(f"no node {request.match_info['id']}")
        self.draining = request.match_info["action"] == "drain"
        return _json(self._node())


def _result(record: FakeExec) -> ExecResult:
    raw = msgspec.to_builtins(record.view, builtin_types=(bytes,))
    return msgspec.convert(
        {**raw, "stdout": bytes(record.output["stdout"]), "stderr": bytes(record.output["stderr"])}, ExecResult
    )


def _check_rules(rules: dict[str, bool]) -> None:
    wanted = sorted(name for name, allowed in rules.items() if allowed)
    if wanted:
        raise UnsupportedCapability(f"network rule {wanted[0]!r}: nothing can be opened", rules=wanted)


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")


def _lines(*values: object) -> web.Response:
    body = b"".join(msgspec.json.encode(value) + b"\n" for value in values)
    return web.Response(body=body, content_type="application/x-ndjson")


def _abort(request: web.Request) -> web.Response:
    if request.transport is not None:
        request.transport.abort()
    return web.Response(status=500)
