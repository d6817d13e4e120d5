"""The commands of one sandbox: started once, never lost, never invented.

::

    intent in the log ──► starting ──chronus answers──► running ──main process ends──► exited (─► streams at end)
                             │                             │
                             └─chronus never heard of it   └─sandbox ended first ──► lost (outcome unknown, is_infra)
                               after a crash: forgotten

Output is written to the log before chronus may forget it (the channel acknowledges when ``Exec.output`` returns).
A broken connection changes nothing here: ``resume`` attaches again at the offsets that are kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal as signals
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import structlog

from opendsec.api import models
from opendsec.api.errors import Conflict, NotFound, PlatformError, Unavailable
from opendsec_server.channel.interface import Channel, ExecExit, ExecSpec
from opendsec_server.edge.exec_sink import Exec
from opendsec_server.edge.execlog import Closed, Drop, ExecLog, Exit, Fed, Output, Start
from opendsec_server.edge.signal_names import signal_name

_log = structlog.get_logger(__name__)
STREAMS = ("stdout", "stderr")
#: Bytes of its arguments that are remembered of a command that has ended.
SHOWN_ARGUMENTS = 4096
#: Largest piece of output in one answer line.
CHUNK = 256 * 1024


class ExecTable:
    """All execs of one sandbox that are remembered."""

    __slots__ = (
        "_feeding",
        "_kept",
        "_on_end",
        "_oom_kills",
        "execs",
        "last_end",
        "log",
        "oom_seen",
        "running",
        "sandbox_id",
    )

    def __init__(
        self,
        sandbox_id: str,
        folder: Path,
        *,
        limit: int,
        head: int,
        kept: int,
        oom_kills: Callable[[str], int],
        on_end: Callable[[float], None],
    ) -> None:
        self.sandbox_id = sandbox_id
        self.log = ExecLog(folder, limit=limit, head=head)
        self.execs: dict[str, Exec] = {}
        self.running = 0
        self._kept = kept
        self._oom_kills = oom_kills
        self._on_end = on_end
        #: OOM kills in the sandbox that were known when a command last started or ended.
        self.oom_seen = 0
        #: When a command last ended.
        self.last_end = 0.0
        self._feeding: set[asyncio.Task[None]] | None = None

    # -- what happens to one exec --

    def _note(self, exec_: Exec, record: object) -> bool:
        """Write a record, and tell whether the disk took it; if not, the memory of this process still knows."""
        try:
            exec_.logged += self.log.append(record)
        except OSError as error:
            _log.error("exec_log_full", sandbox=self.sandbox_id, exec=exec_.start.spec.id, error=str(error))
            return False
        return True

    def ended(self, exec_: Exec, exit_: ExecExit) -> bool:
        """Store how the main process ended; tells whether that is on disk, so that chronus may forget it."""
        self.oom_seen = self._oom_kills(self.sandbox_id)
        killed = self.oom_seen > exec_.start.oom_kills
        by_kill = exit_.signal == signals.SIGKILL or exit_.exit_code == 128 + signals.SIGKILL
        exec_.oom = killed and not exit_.timed_out and (by_kill or self.running == 1)
        exec_.exit = exit_
        exec_.ended_at = self.last_end = time.time()
        exec_.state = "exited"
        self.running -= 1
        stored = self._note(exec_, Exit(id=exec_.start.spec.id, at=exec_.ended_at, exit=exit_, oom=exec_.oom))
        exec_.start.spec = _slim(exec_.start.spec)
        self._on_end(exit_.duration_ms / 1000)
        exec_.wake()
        return stored

    def at_end(self, exec_: Exec) -> None:
        """Both streams are at their end."""
        if not exec_.at_end:
            exec_.at_end = True
            self._note(exec_, Closed(exec_.start.spec.id))
            exec_.wake()

    def lose(self, exec_: Exec, *, infra: bool = True) -> None:
        """Settle that the outcome cannot be known; ``infra``: the infrastructure is to blame."""
        if exec_.is_over:
            return
        exec_.lost_outcome = True
        exec_.infra = infra
        exec_.state = "lost"
        exec_.ended_at = self.last_end = time.time()
        self.running -= 1
        self._note(exec_, Exit(id=exec_.start.spec.id, at=exec_.ended_at, infra=infra))
        exec_.start.spec = _slim(exec_.start.spec)
        exec_.wake()

    def stop(self, exec_: Exec) -> None:
        """Kill what runs of an exec whose outcome is settled already, beside everything else."""
        channel, exec_id = exec_.channel, exec_.start.spec.id

        async def kill() -> None:
            if channel is not None:
                with contextlib.suppress(PlatformError):
                    await channel.exec_stop(exec_id, 0)

        self._beside(kill())

    def _beside(self, work: Coroutine[Any, Any, None]) -> None:
        if self._feeding is None:
            self._feeding = set()
        task = asyncio.create_task(work)
        self._feeding.add(task)
        task.add_done_callback(self._feeding.discard)

    def lose_all(self, *, infra: bool) -> None:
        """The sandbox ended: what ran has an unknown outcome; ``infra``: the infrastructure ended it."""
        for exec_ in self.execs.values():
            self.lose(exec_, infra=infra)
        for task in list(self._feeding or ()):
            task.cancel()

    # -- starting and resuming --

    def add(self, spec: ExecSpec, *, feeds: bool) -> Exec:
        """Write the intent to run a command.

        Raises:
            Unavailable: too many commands run, or the node's disk is full.
        """
        forgotten = self._make_room()
        self.oom_seen = self._oom_kills(self.sandbox_id)
        start = Start(spec=spec, at=time.time(), feeds=feeds, oom_kills=self.oom_seen)
        try:
            logged = self.log.append(*[Drop(exec_.start.spec.id) for exec_ in forgotten], start)
        except OSError as error:
            raise Unavailable(f"the disk of the node is full: {error.strerror}", reason="disk") from error
        for exec_ in forgotten:
            self.log.discard(exec_.streams, exec_.logged)
        exec_ = self.execs[spec.id] = Exec(self, start)
        exec_.logged = logged
        self.running += 1
        if self.log.wants_rewrite:
            self._rewrite()
        return exec_

    async def launch(self, exec_: Exec, channel: Channel) -> None:
        """Tell chronus to run it; if chronus has it already, this attaches."""
        exec_.channel = channel
        await channel.exec_start(exec_.start.spec, exec_)

    def abandon(self, exec_: Exec) -> None:
        """Forget an exec that certainly never started."""
        self.running -= not exec_.is_over
        exec_.lost_outcome = True
        self.execs.pop(exec_.start.spec.id, None)
        self._note(exec_, Drop(exec_.start.spec.id))
        self.log.discard(exec_.streams, exec_.logged)
        exec_.wake()

    async def resume(self, channel: Channel) -> None:
        """Attach to everything that is not at its end on a new connection."""
        for exec_ in [one for one in self.execs.values() if not one.at_end and not one.lost_outcome]:
            if exec_.launching:
                continue
            exec_.channel = channel
            out, err = exec_.streams
            known = await channel.exec_attach(exec_.start.spec.id, (out.total, err.total), exec_)
            if known:
                if exec_.state == "starting":
                    exec_.state = "running"
                if exec_.exit is not None:
                    channel.exec_forget(exec_.start.spec.id)
                elif exec_.start.feeds:
                    # The edge died while it delivered standard input: how much arrived is unknown.
                    await channel.exec_stop(exec_.start.spec.id, 0)
                    self.lose(exec_)
            elif exec_.exit is not None:
                self.at_end(exec_)
            elif exec_.state == "starting":
                self.abandon(exec_)
            else:
                self.lose(exec_)

    def feed(self, exec_: Exec, data: bytes, channel: Channel) -> None:
        """Deliver standard input and its end, beside everything else."""
        self._beside(self._feed(exec_, data, channel))

    async def _feed(self, exec_: Exec, data: bytes, channel: Channel) -> None:
        exec_id = exec_.start.spec.id
        try:
            if data:
                await channel.exec_stdin(exec_id, data)
            await channel.exec_stdin_close(exec_id)
            # Answered in order: all of it has arrived.
            await channel.ping()
        except NotFound:
            # It ended without reading all of it.
            pass
        except PlatformError:
            # How much arrived is unknown: letting it run on would give a wrong result. ``resume`` ends it.
            return
        exec_.start.feeds = False
        self._note(exec_, Fed(exec_id))

    # -- asking --

    def get(self, exec_id: str) -> Exec:
        """Return an exec.

        Raises:
            NotFound: it never was, or is forgotten.
        """
        exec_ = self.execs.get(exec_id)
        if exec_ is None:
            raise NotFound(f"sandbox {self.sandbox_id} knows no exec {exec_id[:100]!r}")
        return exec_

    def describe(self, exec_: Exec) -> models.Exec:
        """Return what is known of an exec."""
        return models.Exec(**self._facts(exec_))

    def result(self, exec_: Exec) -> models.ExecResult:
        """Return what is known of an exec with its output."""
        out, err = exec_.streams
        stdout, cut_out = self.log.kept(out) if out.total else (b"", False)
        stderr, cut_err = self.log.kept(err) if err.total else (b"", False)
        return models.ExecResult(**self._facts(exec_), stdout=stdout, stderr=stderr, truncated=cut_out or cut_err)

    def _facts(self, exec_: Exec) -> dict[str, Any]:
        spec, exit_ = exec_.start.spec, exec_.exit
        facts: dict[str, Any] = {
            "id": spec.id,
            "sandbox_id": self.sandbox_id,
            "state": exec_.state,
            "argv": [arg.decode("utf-8", "replace") for arg in spec.argv],
            "started_at": exec_.start.at,
            "ended_at": exec_.ended_at,
            "stdout_bytes": exec_.streams[0].total,
            "stderr_bytes": exec_.streams[1].total,
            "is_infra": exec_.infra,
        }
        if exit_ is not None:
            facts |= {
                "exit_code": exit_.exit_code,
                "signal": signal_name(exit_.signal),
                "timed_out": exit_.timed_out,
                "oom_killed": exec_.oom,
                "duration": exit_.duration_ms / 1000,
                "cpu_seconds": exit_.cpu_ms / 1000,
                "peak_memory_bytes": exit_.peak_memory_bytes,
            }
        return facts

    async def follow(self, exec_: Exec, offsets: tuple[int, int], *, follow: bool) -> AsyncIterator[models.OutputChunk]:
        """Yield output from the offsets on; with ``follow`` until the end of the main process and of what it wrote."""
        at = list(offsets)
        while True:
            over = exec_.is_over
            progressed = False
            for number, stream in enumerate(exec_.streams):
                while at[number] < stream.total:
                    start, data = self.log.read(stream, at[number], CHUNK)
                    if not data:
                        break
                    yield models.OutputChunk(
                        stream="stdout" if number == 0 else "stderr",
                        offset=start,
                        data=data,
                        lost=start - at[number],
                    )
                    at[number] = start + len(data)
                    progressed = True
            if progressed:
                continue
            if over or not follow:
                return
            await exec_.wait_change()

    # -- forgetting and recovering --

    def forget(self, exec_: Exec) -> None:
        """Forget an ended exec.

        Raises:
            Conflict: it still runs.
        """
        if not exec_.is_over:
            raise Conflict(f"exec {exec_.start.spec.id} still runs")
        self.execs.pop(exec_.start.spec.id, None)
        self._note(exec_, Drop(exec_.start.spec.id))
        self.log.discard(exec_.streams, exec_.logged)

    def _make_room(self) -> list[Exec]:
        """Take the oldest ended execs out and return them: the note of it goes with the next start."""
        out: list[Exec] = []
        while len(self.execs) >= self._kept:
            oldest = next((exec_ for exec_ in self.execs.values() if exec_.is_over), None)
            if oldest is None:
                raise Unavailable(f"{self._kept} commands are running in sandbox {self.sandbox_id}", retry_after=1)
            out.append(self.execs.pop(oldest.start.spec.id))
        return out

    def _rewrite(self) -> None:
        spooled = {
            (exec_id, number)
            for exec_id, exec_ in self.execs.items()
            for number, stream in enumerate(exec_.streams, 1)
            if stream.spool is not None
        }
        try:
            records = self.log.rewrite(set(self.execs), spooled)
        except OSError as error:
            _log.error("exec_log_full", sandbox=self.sandbox_id, error=str(error))
            return
        for exec_ in self.execs.values():
            exec_.logged = 0
            for stream in exec_.streams:
                stream.logged = 0
                if stream.spool is None:
                    stream.pieces, stream.total = [], 0
        for at, size, record in records:
            if isinstance(record, Output):
                self.log.adopt_output(self.execs[record.id].streams[record.stream - 1], at, size, record)
            else:
                exec_id = record.spec.id if isinstance(record, Start) else record.id
                self.execs[exec_id].logged += size

    def recover(self) -> None:
        """Read back what the log knows (after a restart of the edge)."""
        size = 0
        for at, size, record in self.log.records():
            self._adopt(at, size, record)
        names = self.log.names()
        owned = {"execs.log"}
        for exec_id, exec_ in self.execs.items():
            self.log.adopt_spools(exec_id, exec_.streams, names)
            owned |= {stream.spool.path.name for stream in exec_.streams if stream.spool is not None}
            if exec_.is_over:
                exec_.start.spec = _slim(exec_.start.spec)
        for name in names - owned:
            # Killed between two steps of forgetting or rewriting.
            self.log.remove_file(name)
        self.running = sum(not exec_.is_over for exec_ in self.execs.values())

    def _adopt(self, at: int, size: int, record: object) -> None:
        """Take a record that was read back."""
        if isinstance(record, Start):
            exec_ = self.execs[record.spec.id] = Exec(self, record)
            exec_.logged = size
            return
        known = self.execs.get(record.id)  # type: ignore[attr-defined]
        if known is None:
            self.log.waste(size)
            return
        match record:
            case Output():
                self.log.adopt_output(known.streams[record.stream - 1], at, size, record)
                known.state = "running"
                return
            case Exit():
                known.exit, known.oom, known.ended_at = record.exit, record.oom, record.at
                known.lost_outcome = record.exit is None
                known.infra = known.lost_outcome and record.infra
                known.state = "exited" if record.exit is not None else "lost"
            case Closed():
                known.at_end = True
            case Fed():
                known.start.feeds = False
            case Drop():
                del self.execs[record.id]
                self.log.waste(known.logged + sum(stream.logged for stream in known.streams))
        known.logged += size

    def close(self) -> None:
        """Close the files; they stay."""
        self.log.close()
        for exec_ in self.execs.values():
            for stream in exec_.streams:
                if stream.spool is not None:
                    stream.spool.close()


def _slim(spec: ExecSpec) -> ExecSpec:
    """Return what is worth remembering of a command that has ended: a sandbox keeps a thousand of them."""
    argv, room = [], SHOWN_ARGUMENTS
    for arg in spec.argv:
        if len(arg) > room:
            argv.append(arg[:room] + "…".encode())
            break
        argv.append(arg)
        room -= len(arg)
    return ExecSpec(id=spec.id, argv=argv, env={}, cwd=spec.cwd, user=spec.user)
