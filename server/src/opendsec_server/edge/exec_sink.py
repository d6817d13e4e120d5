"""One command as the edge knows it; its channel tells it what happens."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import structlog

from opendsec_server.channel.interface import Channel, ExecExit
from opendsec_server.edge.execlog import Start, Stream

if TYPE_CHECKING:
    from opendsec_server.edge.execs import ExecTable

_log = structlog.get_logger(__name__)


class Exec:
    """One command; the sink that its channel writes to."""

    __slots__ = (
        "at_end",
        "channel",
        "deaf",
        "ended_at",
        "exit",
        "infra",
        "launching",
        "logged",
        "lost_outcome",
        "oom",
        "start",
        "state",
        "streams",
        "table",
        "waiters",
    )

    def __init__(self, table: ExecTable, start: Start) -> None:
        self.table = table
        self.start = start
        self.state: str = "starting"
        self.streams = (Stream(), Stream())
        self.exit: ExecExit | None = None
        self.ended_at: float | None = None
        self.oom = False
        #: Both streams are at their end: nothing more comes.
        self.at_end = False
        #: The sandbox ended first, or what happened cannot be known.
        self.lost_outcome = False
        #: The infrastructure is to blame for that.
        self.infra = False
        #: A request of this process is telling chronus; on a new connection it does so again by itself.
        self.launching = False
        self.channel: Channel | None = None
        #: Bytes of its records in the log, besides output.
        self.logged = 0
        #: Output can be kept no longer.
        self.deaf = False
        #: Woken at every change.
        self.waiters: list[asyncio.Future[None]] | None = None

    # -- the sink --

    def started(self, pid: int) -> None:  # noqa: ARG002 - part of the sink
        """The main process runs."""
        if self.state == "starting":
            self.state = "running"

    def output(self, stream: int, offset: int, data: bytes) -> None:
        """Keep output; if that cannot be done, the outcome is lost rather than wrong."""
        if self.deaf:
            return
        try:
            self.table.log.output(self.start.spec.id, stream, self.streams[stream - 1], offset, data)
        except (OSError, ValueError) as error:
            _log.error("output_lost", sandbox=self.table.sandbox_id, exec=self.start.spec.id, error=str(error))
            self.deaf = True
            self.table.lose(self)
            self.table.stop(self)
        self.wake()

    def exited(self, exit_: ExecExit) -> None:
        """The main process ended."""
        stored = True
        if self.exit is None and not self.lost_outcome:
            stored = self.table.ended(self, exit_)
        if self.channel is not None and stored:
            self.channel.exec_forget(self.start.spec.id)

    def closed(self) -> None:
        """Both streams are at their end."""
        self.channel = None
        self.table.at_end(self)
        for stream in self.streams:
            if stream.spool is not None:
                stream.spool.close()

    def lost(self) -> None:
        """The connection broke; the table attaches again."""

    # -- waiting --

    @property
    def is_over(self) -> bool:
        """Whether the outcome is settled."""
        return self.exit is not None or self.lost_outcome

    def wake(self) -> None:
        """Wake everybody who waits for a change."""
        waiters, self.waiters = self.waiters, None
        for waiter in waiters or ():
            if not waiter.done():
                waiter.set_result(None)

    async def wait_change(self) -> None:
        """Return at the next change."""
        waiter = asyncio.get_running_loop().create_future()
        if self.waiters is None:
            self.waiters = []
        self.waiters.append(waiter)
        try:
            await waiter
        finally:
            if self.waiters is not None and waiter in self.waiters:
                self.waiters.remove(waiter)

    async def wait_over(self, seconds: float) -> bool:
        """Wait for the end at most this long, and tell whether it came."""
        if self.is_over:
            return True
        try:
            async with asyncio.timeout(seconds):
                while not self.is_over:
                    await self.wait_change()
        except TimeoutError:
            return False
        return True
