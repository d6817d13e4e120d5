"""The one place where a sandbox changes state (the machine itself is drawn in ``core.machine``).

Every transition is: write the intent to the journal, act, write the outcome. A life has at most one task that acts:
``bring_up`` while it is being prepared, ``tear_down`` once it is stopping, and between them a watch over its
connection. Ending wins: it cancels a bring-up, and whoever begins it decides the terminal state and the cause.

How it fails: an error in ``bring_up`` ends the life as ``failed`` with cause ``create_failed`` and is raised to the
creator. An error in ``tear_down`` is logged and tried again until the backend has removed everything; the state stays
``stopping`` meanwhile. A lost connection with a live pid 1 is made again; with a dead one the life ends as ``failed``.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import msgspec
import structlog

from opendsec.api.errors import Conflict, Internal, PlatformError, SandboxGone, Unavailable
from opendsec.api.models import TERMINAL, CreateSandbox, Sandbox, State
from opendsec_server.backends.protocol import Backend
from opendsec_server.channel.interface import Channel
from opendsec_server.core.machine import refusal
from opendsec_server.edge.execs import ExecTable
from opendsec_server.edge.journal import Journal, Row

_log = structlog.get_logger(__name__)
#: How long a request waits for a lost connection to be made again, in seconds.
RECONNECT_SECONDS = 10.0
#: A connection that lasted less than this is a sign that the next will not last either, in seconds.
QUICK_BREAK_SECONDS = 1.0
#: Stands for the requests of ended sandboxes in memory; the journal keeps the real one.
_ANY_REQUEST = CreateSandbox(container_image="")


class Life:
    """One sandbox: its journal row, its connection, its execs."""

    __slots__ = (
        "_acting",
        "_breaks",
        "_lives",
        "_ready",
        "_watching",
        "busy",
        "channel",
        "ending",
        "execs",
        "last_used",
        "row",
        "touched",
    )

    def __init__(self, lives: Lives, row: Row, execs: ExecTable) -> None:
        self._lives = lives
        self.row = row
        self.execs = execs
        self.channel: Channel | None = None
        self.last_used = row.record.last_used_at or row.record.created_at
        #: Requests under way; with running execs they keep it from being idle.
        self.busy = 0
        self.touched = False
        self.ending: asyncio.Task[None] | None = None
        self._acting: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[None] | None = None
        #: Connections in a row that broke at once.
        self._breaks = 0

    @property
    def record(self) -> Sandbox:
        """What is known of it."""
        return self.row.record

    @property
    def id(self) -> str:
        """Its id."""
        return self.row.record.id

    @property
    def is_over(self) -> bool:
        """Whether its state is terminal."""
        return self.row.record.state in TERMINAL

    @property
    def used_at(self) -> float:
        """When it was last used: a request, or the end of a command."""
        return max(self.last_used, self.execs.last_end)

    @property
    def is_idle(self) -> bool:
        """Whether nothing uses it now."""
        return self.busy == 0 and self.execs.running == 0

    def enter(self, state: State, **facts: Any) -> None:
        """Change the state and write it down.

        Raises:
            Conflict: the machine does not allow it.
        """
        reason = refusal(self.record.state, state)
        if reason is not None:
            raise Conflict(f"sandbox {self.id} cannot become {state}: {reason.value}", state=self.record.state)
        before = self.record
        self.row.record = msgspec.structs.replace(before, state=state, **facts)
        try:
            self._lives.journal.put(self.row)
        except sqlite3.Error as error:
            _log.error("journal_failed", sandbox=self.id, state=state, error=str(error))
            if state != "stopping" and state not in TERMINAL:
                self.row.record = before
                raise Unavailable(f"the journal of the node cannot be written: {error}") from error
            # Ending must work when the disk is full: it is what frees it.

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        """Mark a use: it ends the lease and restarts the idle time."""
        self.claim()
        self.busy += 1
        try:
            yield
        finally:
            self.busy -= 1
            self.last_used = time.time()

    def check_same(self, request: CreateSandbox) -> None:
        """Check that a repeated request asks for what the first did; of an ended sandbox it is no longer known.

        Raises:
            Conflict: it asks for something else.
        """
        first = self.row.request
        if first is not _ANY_REQUEST and msgspec.structs.replace(first, lease_seconds=request.lease_seconds) != request:
            raise Conflict(f"request_id {request.request_id} asked for another sandbox before", sandbox=self.id)

    def claim(self) -> None:
        """Its creator knows its id: the lease ends."""
        self.last_used = time.time()
        if not self.row.claimed:
            self.row.claimed = True
            with contextlib.suppress(sqlite3.Error):
                self._lives.journal.put(self.row)

    def gone(self) -> SandboxGone:
        """Return the error for a call that comes too late."""
        record = self.record
        error = SandboxGone(
            f"sandbox {self.id} has ended: {record.cause_detail or record.cause or record.state}",
            state=record.state,
            cause=record.cause,
            is_infra=record.is_infra,
        )
        error.is_infra = record.is_infra  # type: ignore[misc]
        return error

    async def wait_channel(self) -> Channel:
        """Return the open connection; waits while it is made.

        Raises:
            SandboxGone: it has ended or is ending.
            Unavailable: the connection does not come back.
        """
        channel = self.channel
        if channel is not None and channel.is_open and self.ending is None:
            return channel
        if self.is_over or self.ending is not None:
            raise self.gone()
        try:
            async with asyncio.timeout(RECONNECT_SECONDS):
                while self.channel is None or not self.channel.is_open:
                    if self.is_over or self.ending is not None:
                        raise self.gone()
                    await self._wait_ready()
        except TimeoutError:
            raise Unavailable(f"sandbox {self.id} does not answer") from None
        return self.channel

    async def _wait_ready(self) -> None:
        if self._ready is None or self._ready.done():
            self._ready = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._ready)

    def _announce(self) -> None:
        if self._ready is not None and not self._ready.done():
            self._ready.set_result(None)

    # -- acting --

    async def bring_up(self, start: Callable[[], Awaitable[Channel]]) -> None:
        """Prepare and start; returns when it runs.

        Raises:
            PlatformError: it failed, and nothing of it is left.
        """
        self._acting = asyncio.create_task(self._bring_up(start))
        await asyncio.shield(self._acting)

    async def wait_settled(self) -> None:
        """Return when a bring-up under way has come to its end, well or not."""
        if self._acting is not None and not self._acting.done():
            await asyncio.wait([self._acting])
        if self.record.cause == "create_failed":
            await self.wait_end()

    async def _bring_up(self, start: Callable[[], Awaitable[Channel]]) -> None:
        try:
            channel = await start()
        except asyncio.CancelledError:
            raise self.gone() from None
        except Exception as error:
            fault = error if isinstance(error, PlatformError) else Internal("the sandbox could not be started")
            _log.warning("create_failed", sandbox=self.id, error=str(error), exc_info=fault is not error)
            if self.ending is None:
                # A failed create gives its request id back: a repeated request starts afresh.
                self._lives.release_request(self)
                self.begin_end("failed", "create_failed", detail=fault.message, is_infra=fault.is_infra)
            await asyncio.shield(self.wait_end())
            raise fault from error
        if self.ending is not None:
            await channel.aclose()
            raise self.gone()
        try:
            self.enter("running", running_at=time.time())
        except Unavailable as error:
            await channel.aclose()
            self._lives.release_request(self)
            self.begin_end("failed", "create_failed", detail=error.message, is_infra=True)
            await asyncio.shield(self.wait_end())
            raise
        self.last_used = time.time()
        self.connected(channel)

    def connected(self, channel: Channel) -> None:
        """Take a new connection into use and watch it."""
        self.channel = channel
        self._watching = asyncio.create_task(self._watch(channel))
        self._announce()

    async def _watch(self, channel: Channel) -> None:
        began = time.monotonic()
        await channel.wait_closed()
        # A connection that breaks again at once is not made again in a tight loop.
        self._breaks = self._breaks + 1 if time.monotonic() - began < QUICK_BREAK_SECONDS else 0
        if self._breaks > 1:
            await asyncio.sleep(min(0.01 * 2**self._breaks, 1.0))
        if self.ending is None:
            await self.reconnect()

    def begin_reconnect(self) -> asyncio.Task[None]:
        """Connect again in the background (after a restart of the edge)."""
        self._watching = asyncio.create_task(self.reconnect())
        return self._watching

    async def reconnect(self) -> None:
        """Connect again and attach to what runs, or end the life when pid 1 is dead."""
        delay = 0.01
        while self.ending is None:
            channel = None
            try:
                channel = await self._lives.backend.reconnect(self.id)
                await self.execs.resume(channel)
            except SandboxGone:
                oom = self._lives.backend.oom_kills(self.id) > self.execs.oom_seen
                self.begin_end(
                    "failed",
                    "oom" if oom else "chronus_lost",
                    detail="pid 1 ended" + (" after its memory limit was hit" if oom else ""),
                    is_infra=not oom,
                )
                return
            except Exception as error:
                _log.warning("reconnect_failed", sandbox=self.id, error=str(error))
                if channel is not None:
                    await channel.aclose()
                await asyncio.sleep(delay)
                delay = min(delay * 2, 1.0)
            else:
                if self.ending is None:
                    self.connected(channel)
                else:
                    await channel.aclose()
                return

    def begin_end(self, final: State, cause: str, *, detail: str | None = None, is_infra: bool = False) -> None:
        """Begin to end it, unless that has begun; returns at once."""
        if self.is_over or self.ending is not None:
            return
        self.row.final = final
        self.enter("stopping", cause=cause, cause_detail=detail, is_infra=is_infra)
        self.resume_end()

    def resume_end(self) -> None:
        """Go on ending what is ``stopping`` (also after a restart of the edge)."""
        self.ending = asyncio.create_task(self._tear_down())
        self._announce()

    async def wait_end(self) -> None:
        """Return when it has ended and nothing of it is left."""
        if self.ending is not None:
            await asyncio.shield(self.ending)

    async def _tear_down(self) -> None:
        acting = self._acting
        if (
            acting is not None
            and not acting.done()
            and acting is not asyncio.current_task()
            and self.record.cause != "create_failed"
        ):
            acting.cancel()
            await asyncio.wait([acting])
        limits_hit = await self._limits_hit()
        if self.channel is not None:
            await self.channel.aclose()
            self.channel = None
        self.execs.lose_all(infra=self.record.is_infra)
        delay = 0.05
        while True:
            try:
                await self._lives.backend.remove(self.id)
                break
            except Exception:
                _log.exception("remove_failed", sandbox=self.id, again_in_seconds=delay)
                await asyncio.sleep(delay)
                delay = min(delay * 2, 5.0)
        self.execs.close()
        final: Any = self.row.final or "stopped"
        self.row.spec = None
        self.enter(final, ended_at=time.time(), last_used_at=self.used_at, limits_hit=limits_hit)
        # Only the record is asked for from now on, and there may be many of them.
        self.row.request = _ANY_REQUEST
        self._lives.ended(self)

    async def _limits_hit(self) -> list[str]:
        hit = list(self.record.limits_hit)
        if self.record.running_at is None:
            return hit
        try:
            usage = await self._lives.backend.usage(self.id)
        except PlatformError:
            return hit
        if usage.oom_kills and "memory" not in hit:
            hit.append("memory")
        if usage.pids_refused and "pids" not in hit:
            hit.append("pids")
        limit = self.record.limits.disk_mb
        if limit and usage.disk_bytes is not None and usage.disk_bytes >= (limit - 1) * 2**20 and "disk" not in hit:
            hit.append("disk")
        return hit

    async def detach(self) -> None:
        """Let go of it without ending it: the edge closes, the sandbox stays."""
        tasks = [task for task in (self._watching, self._acting, self.ending) if task is not None and not task.done()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if not self.is_over and self.ending is None and self.record.state == "running":
            self.row.record = msgspec.structs.replace(self.record, last_used_at=self.used_at)
            self._lives.journal.put(self.row)
        if self.channel is not None:
            await self.channel.aclose()
        self.execs.close()


class Lives:
    """What all lives share. The service owns the dictionary; this is what a life needs of it."""

    def __init__(self, journal: Journal, backend: Backend) -> None:
        self.journal = journal
        self.backend = backend
        self.by_id: dict[str, Life] = {}
        self.by_request: dict[str, Life] = {}
        #: How many have not ended.
        self.count = 0
        #: Called with each life that has ended.
        self.on_ended: Callable[[Life], None] = lambda _life: None

    def add(self, life: Life) -> None:
        """Remember a life."""
        self.by_id[life.id] = life
        self.count += not life.is_over
        if life.record.request_id is not None:
            self.by_request[life.record.request_id] = life

    def release_request(self, life: Life) -> None:
        """Give a request id back."""
        request_id = life.record.request_id
        if request_id is not None:
            self.by_request.pop(request_id, None)
            life.row.record = msgspec.structs.replace(life.record, request_id=None)

    def forget(self, life: Life) -> None:
        """Forget an ended life."""
        self.by_id.pop(life.id, None)
        request_id = life.record.request_id
        if request_id is not None and self.by_request.get(request_id) is life:
            del self.by_request[request_id]
        self.journal.drop(life.id)
        life.execs.log.remove()

    def ended(self, life: Life) -> None:
        """Tell that a life has ended."""
        self.count -= 1
        self.on_ended(life)

    def live(self) -> Iterator[Life]:
        """All that have not ended."""
        return (life for life in list(self.by_id.values()) if not life.is_over)
