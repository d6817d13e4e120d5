"""What an edge does, without HTTP: creates, finds, drives and ends sandboxes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import structlog

from opendsec import __version__
from opendsec.api import ids, models
from opendsec.api.errors import (
    Internal,
    NotFound,
    OutcomeUnknown,
    PlatformError,
    SandboxGone,
    Unavailable,
    UnsupportedCapability,
)
from opendsec_server.backends.protocol import Backend
from opendsec_server.channel.interface import Channel, ExecExit, ExecSpec
from opendsec_server.core.spec import SandboxSpec
from opendsec_server.core.validate import check_create
from opendsec_server.edge.admission import Admission, HostLoad
from opendsec_server.edge.commands import exec_spec
from opendsec_server.edge.exec_sink import Exec
from opendsec_server.edge.execs import ExecTable
from opendsec_server.edge.journal import Journal, Row
from opendsec_server.edge.lifecycle import Life, Lives
from opendsec_server.edge.metrics import EdgeMetrics
from opendsec_server.edge.reaper import Reaper
from opendsec_server.edge.signal_names import signal_number
from opendsec_server.images.interface import ImageStore
from opendsec_server.platform.config import Config

_log = structlog.get_logger(__name__)
#: Sandboxes that are taken over at once after a restart.
RECOVERIES = 16
#: How long the start of the edge waits for one sandbox, in seconds; what is not done then goes on in the background.
RECOVERY_SECONDS = 2.0
#: Least time a lease has left after a restart, in seconds.
RECOVERY_LEASE_SECONDS = 15.0


class EdgeService:
    """One node's sandboxes."""

    def __init__(self, config: Config, journal: Journal, backend: Backend, images: ImageStore) -> None:
        self.config = config
        self.images = images
        self.backend = backend
        self.journal = journal
        self.lives = Lives(journal, backend)
        self.load = HostLoad(config.data)
        self.admission = Admission(config.edge, self.load)
        self.reaper = Reaper(self.lives, config.edge.retention_seconds)
        self.metrics = EdgeMetrics(self)
        self.started_at = time.time()
        self._tasks: list[asyncio.Task[None]] = []
        self.lives.on_ended = self._ended

    # -- opening and closing --

    async def open(self) -> None:
        """Take over what an earlier edge left, finish what it began, remove what nobody owns."""
        self.admission.draining = self.journal.get("draining") == "1"
        await self.backend.open()
        gate = asyncio.Semaphore(RECOVERIES)
        present = await self.backend.inventory()
        rows = self.journal.rows()

        async def one(row: Row) -> None:
            async with gate:
                await self._recover(row, present)

        await asyncio.gather(*(one(row) for row in rows))
        for stray in present - {row.record.id for row in rows}:
            _log.warning("removing_stray", sandbox=stray)
            await self.backend.remove(stray)
        for folder in self._folders():
            if folder.name not in self.lives.by_id:
                shutil.rmtree(folder, ignore_errors=True)
        self._tasks.append(asyncio.create_task(self.reaper.run()))

    def _folders(self) -> Iterator[Path]:
        with contextlib.suppress(FileNotFoundError):
            yield from (self.config.data / "sandboxes").iterdir()

    async def _recover(self, row: Row, present: set[str]) -> None:
        life = Life(self.lives, row, self._table(row.record.id))
        self.lives.add(life)
        try:
            life.execs.recover()
        except (OSError, msgspec.MsgspecError):
            _log.exception("exec_log_unreadable", sandbox=life.id)
        now = time.time()
        work: asyncio.Task[None] | None = None
        if life.is_over:
            if life.id in present:
                await self.backend.remove(life.id)
            life.execs.close()
        elif row.record.state == "stopping":
            life.resume_end()
            work = life.ending
        elif row.record.state in {"requested", "preparing"}:
            # Its request id is free again: a repeated create starts afresh.
            self.lives.release_request(life)
            life.begin_end("failed", "node_restart", detail="the edge restarted during the create", is_infra=True)
            work = life.ending
        else:
            # While the edge was away nobody could use or claim it.
            life.last_used = now
            if row.lease_until is not None:
                row.lease_until = max(row.lease_until, now + RECOVERY_LEASE_SECONDS)
            work = life.begin_reconnect()
        self.reaper.watch(life)
        if work is not None:
            # One that does not answer or cannot be removed now must not keep the node from serving.
            await asyncio.wait([work], timeout=RECOVERY_SECONDS)

    async def close(self) -> None:
        """Stop working; sandboxes run on for the next edge."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for life in list(self.lives.by_id.values()):
            await life.detach()
        await self.backend.close()
        self.journal.close()

    def _table(self, sandbox_id: str) -> ExecTable:
        edge = self.config.edge
        return ExecTable(
            sandbox_id,
            self.config.data / "sandboxes" / sandbox_id,
            limit=edge.spool_limit_bytes,
            head=edge.spool_head_bytes,
            kept=edge.execs_kept,
            oom_kills=self.backend.oom_kills,
            on_end=self.metrics.exec_ended,
        )

    def _ended(self, life: Life) -> None:
        record = life.record
        _log.info(
            "sandbox_ended",
            sandbox=record.id,
            state=record.state,
            cause=record.cause,
            is_infra=record.is_infra,
            limits_hit=record.limits_hit,
        )
        self.metrics.ended(record)
        self.reaper.watch(life)

    # -- sandboxes --

    async def create(self, request: models.CreateSandbox) -> models.Sandbox:
        """Create one sandbox, or return the one that this request id made.

        Raises:
            InvalidArgument, UnsupportedCapability, ImageUnavailable: the request cannot be met.
            Conflict: this request id asked for something else before.
            CapacityUnavailable: the node has no room now.
            PlatformError: starting it failed; nothing of it is left.
        """
        known = self.lives.by_request.get(request.request_id) if request.request_id is not None else None
        if known is not None:
            known.check_same(request)
            known.claim()
            await known.wait_settled()
            if known.record.request_id is None:
                return await self.create(request)
            return known.record
        check_create(request)
        spec, digests = self._plan(request)
        self.admission.check(self.lives.count)
        life = self._begin(request, spec, digests)
        self.reaper.watch(life)
        begun = time.perf_counter()
        await life.bring_up(lambda: self._start(spec))
        seconds = time.perf_counter() - begun
        self.metrics.created(seconds)
        _log.info("sandbox_running", sandbox=life.id, image=request.container_image, seconds=round(seconds, 4))
        self.reaper.watch(life)
        return life.record

    async def _start(self, spec: SandboxSpec) -> Channel:
        async with self.admission.slot():
            return await self.backend.start(spec)

    def _plan(self, request: models.CreateSandbox) -> tuple[SandboxSpec, list[str]]:
        can = self.backend.capabilities()
        if request.backend != can.name:
            raise UnsupportedCapability(f"this node has no {request.backend} backend", field="backend")
        runtime = request.runtime or can.default_runtime
        if runtime not in can.runtimes:
            reason = can.missing.get(runtime, "it is not installed")
            raise UnsupportedCapability(f"runtime {runtime} cannot be used on this node: {reason}", field="runtime")
        if request.disk_limit_mb is not None and not can.disk_limits:
            reason = can.missing.get("disk_limits", "the scratch file system has no quota")
            raise UnsupportedCapability(f"disk_limit_mb cannot be enforced here: {reason}", field="disk_limit_mb")
        environment = self.images.compose(request.container_image, request.workspace, request.toolkits)
        config = models.ImageConfig(
            env={**environment.config.env, **request.env},
            user=request.init_user or environment.config.user,
            workdir=request.workdir or environment.config.workdir,
        )
        sandbox_id = ids.new_sandbox_id(self.config.edge.node)
        digests = [layer.digest for layer in environment.layers]
        spec = SandboxSpec(
            id=sandbox_id,
            backend=request.backend,
            runtime=runtime,
            layers=tuple(digests),
            config=config,
            limits=models.Limits(
                memory_mb=request.memory_limit_mb,
                cpu_cores=request.cpu_cores_limit,
                disk_mb=request.disk_limit_mb,
                pids=request.pids_limit,
                open_files=request.open_files_limit,
            ),
            hostname=sandbox_id,
            allow_new_privileges=request.allow_new_privileges,
        )
        return spec, digests

    def _begin(self, request: models.CreateSandbox, spec: SandboxSpec, digests: list[str]) -> Life:
        now = time.time()
        record = models.Sandbox(
            id=spec.id,
            state="preparing",
            node=self.config.edge.node,
            backend=request.backend,
            runtime=spec.runtime,
            container_image=request.container_image,
            created_at=now,
            layers=digests,
            workspace=request.workspace,
            toolkits=request.toolkits,
            limits=spec.limits,
            labels=request.labels,
            job=request.job,
            request_id=request.request_id,
            ttl_running_stop=request.ttl_running_stop or self.config.edge.default_ttl_running_stop_seconds,
            ttl_hard=request.ttl_hard,
        )
        lease = now + request.lease_seconds if request.lease_seconds is not None else None
        row = Row(
            record=record,
            request=request,
            spec=spec,
            final=None,
            claimed=request.lease_seconds is None,
            lease_until=lease,
        )
        life = Life(self.lives, row, self._table(spec.id))
        self.journal.put(row)
        self.lives.add(life)
        return life

    def life(self, sandbox_id: str) -> Life:
        """Return a sandbox's life.

        Raises:
            NotFound: it never was, or its record's retention is over.
        """
        life = self.lives.by_id.get(sandbox_id)
        if life is None:
            if ids.node_of(sandbox_id) != self.config.edge.node:
                raise NotFound(f"sandbox {sandbox_id} belongs to another node")
            raise NotFound(f"there is no sandbox {sandbox_id}, or its record has expired")
        return life

    def get(self, sandbox_id: str) -> models.Sandbox:
        """Return what is known of a sandbox; naming it ends its lease, but it is no use of it."""
        life = self.life(sandbox_id)
        if not life.row.claimed:
            life.claim()
        return msgspec.structs.replace(life.record, last_used_at=life.used_at)

    def list(
        self, labels: dict[str, str], job: str | None, states: Sequence[str], request_id: str | None
    ) -> list[models.Sandbox]:
        """Return the sandboxes that match all conditions, oldest first."""
        if request_id is not None:
            life = self.lives.by_request.get(request_id)
            lives = [life] if life is not None else []
        else:
            lives = list(self.lives.by_id.values())
        found = [
            life.record
            for life in lives
            if (job is None or life.record.job == job)
            and (not states or life.record.state in states)
            and all(life.record.labels.get(key) == value for key, value in labels.items())
        ]
        return sorted(found, key=lambda record: record.created_at)

    def claim(self, sandbox_ids: Sequence[str]) -> None:
        """End leases; unknown ids are passed over."""
        for sandbox_id in sandbox_ids:
            life = self.lives.by_id.get(sandbox_id)
            if life is not None:
                life.claim()

    async def stop(self, sandbox_id: str) -> models.Sandbox:
        """End a sandbox from whatever state, and return when nothing of it is left."""
        life = self.life(sandbox_id)
        life.begin_end("stopped", "deleted")
        await life.wait_end()
        return life.record

    async def usage(self, sandbox_id: str) -> models.Metrics:
        """Return a sandbox's resource use."""
        life = self.life(sandbox_id)
        if life.is_over:
            raise life.gone()
        use = await self.backend.usage(sandbox_id)
        return models.Metrics(
            memory_bytes=use.memory_bytes,
            memory_peak_bytes=use.memory_peak_bytes,
            cpu_seconds=use.cpu_seconds,
            pids=use.pids,
            disk_bytes=use.disk_bytes,
            oom_kills=use.oom_kills,
        )

    # -- execs --

    async def start(self, sandbox_id: str, request: models.ExecRequest) -> tuple[ExecTable, Exec]:
        """Start a command, or find the one with this id; waits for its end as long as asked.

        Raises:
            InvalidArgument: the command is malformed.
            SandboxGone: the sandbox has ended, or ends before the command was started.
            OutcomeUnknown: the connection broke, and whether the command was started is not known yet.
        """
        life = self.life(sandbox_id)
        exec_ = life.execs.execs.get(request.id) if request.id is not None else None
        spec = None
        if exec_ is None:
            if life.row.spec is None:
                raise life.gone()
            spec = exec_spec(request, life.row.spec)
        with life.use():
            if exec_ is None and spec is not None:
                exec_ = await self._launch(life, spec, request.stdin)
            assert exec_ is not None  # noqa: S101 - one of the two ways was taken
            await self.wait_exec(life, exec_, request.wait_seconds)
        return life.execs, exec_

    @staticmethod
    async def wait_exec(life: Life, exec_: Exec, seconds: float) -> None:
        """Wait for the end of a command at most this long.

        Raises:
            SandboxGone: the sandbox ended meanwhile, and with it the command; asking again tells what is known of it.
        """
        if seconds > 0 and not exec_.is_over:
            await exec_.wait_over(seconds)
            if exec_.lost_outcome and life.ending is not None:
                raise life.gone()

    async def run(self, sandbox_id: str, request: models.ExecRequest) -> models.Exec:
        """Do as ``start`` and describe the command; with its output if the request waits."""
        table, exec_ = await self.start(sandbox_id, request)
        return table.result(exec_) if request.wait_seconds > 0 else table.describe(exec_)

    async def _launch(self, life: Life, spec: ExecSpec, stdin: bytes | None) -> Exec:
        channel = await life.wait_channel()
        known = life.execs.execs.get(spec.id)
        if known is not None:
            # The same request came twice while the connection was being made.
            return known
        exec_ = life.execs.add(spec, feeds=bool(stdin))
        exec_.launching = True
        try:
            while True:
                try:
                    await life.execs.launch(exec_, channel)
                    break
                except Unavailable as error:
                    if channel.is_open:
                        # chronus answered: it could not fork. That is the workload's limit, so it is data.
                        message = f"cannot start a process: {error.message}\n".encode()
                        exec_.output(2, exec_.streams[1].total, message)
                        exec_.exited(ExecExit(exit_code=126, start_error=error.message, stderr_bytes=len(message)))
                        exec_.closed()
                        break
                    channel = await self._channel_again(life, exec_)
        except (SandboxGone, OutcomeUnknown):
            # ``lose_all`` or the next connection settles it.
            raise
        except PlatformError:
            life.execs.abandon(exec_)
            raise
        finally:
            exec_.launching = False
        if stdin and not exec_.is_over:
            life.execs.feed(exec_, stdin, channel)
        return exec_

    @staticmethod
    async def _channel_again(life: Life, exec_: Exec) -> Channel:
        try:
            return await life.wait_channel()
        except Unavailable as error:
            raise OutcomeUnknown(
                f"the connection to sandbox {life.id} broke while the command was started", exec=exec_.start.spec.id
            ) from error

    async def kill_and_forget(self, sandbox_id: str, exec_id: str) -> None:
        """Kill a command's process tree if it runs, then forget the command."""
        life = self.life(sandbox_id)
        exec_ = life.execs.get(exec_id)
        if not exec_.is_over:
            channel = await life.wait_channel()
            with contextlib.suppress(NotFound):
                await channel.exec_stop(exec_id, 0)
            if not await exec_.wait_over(30):
                raise Unavailable(f"exec {exec_id} does not end")
        life.execs.forget(exec_)

    async def signal(self, sandbox_id: str, exec_id: str, name: str, *, tree: bool) -> None:
        """Send a signal to a command.

        Raises:
            NotFound: no such command or signal, or it has ended.
        """
        life = self.life(sandbox_id)
        exec_ = life.execs.get(exec_id)
        number = signal_number(name)
        if exec_.is_over:
            raise NotFound(f"exec {exec_id} has ended")
        with life.use():
            await (await life.wait_channel()).exec_signal(exec_id, number, tree=tree)

    def defect(self, event: str, sandbox_id: str) -> tuple[int, bytes]:
        """Log a defect of ours and return the answer for it."""
        _log.exception(event, sandbox=sandbox_id)
        error = Internal("the request failed; the log of the node says more")
        return error.http_status, msgspec.json.encode(error.body())

    # -- the node --

    def node(self) -> models.Node:
        """Describe this node."""
        load, can = self.load.refresh(), self.backend.capabilities()
        live = list(self.lives.live())
        by_job: dict[str, int] = {}
        for life in live:
            if life.record.job is not None:
                by_job[life.record.job] = by_job.get(life.record.job, 0) + 1
        return models.Node(
            id=self.config.edge.node,
            state="draining" if self.admission.draining else "ready",
            version=__version__,
            backends=[can.name],
            runtimes=list(can.runtimes),
            sandboxes=len(live),
            creating=self.admission.creating,
            memory_total_bytes=load.memory_total,
            memory_available_bytes=load.memory_available,
            cpu_count=os.cpu_count() or 1,
            pressure=dict(load.pressure),
            disk_free_bytes=load.disk_free,
            by_job=by_job,
            started_at=self.started_at,
        )

    def drain(self, node: str, *, on: bool) -> models.Node:
        """Refuse (or take again) creates; survives a restart."""
        if node != self.config.edge.node:
            raise NotFound(f"there is no node {node[:80]!r} here")
        self.admission.draining = on
        self.journal.set("draining", "1" if on else "0")
        return self.node()

    def layer_in_use(self, digest: str) -> bool:
        """Tell whether a live sandbox uses a layer."""
        return any(digest in life.record.layers for life in self.lives.live())
