"""A sandbox in memory: the exec table and files of a chronus, and channels to it. Nothing is really run.

Commands are a tiny language, in ``argv`` or as a shell line of several separated by ``;``:

======================  ================================================================================
``echo TEXT…``          to stdout; ``>&2`` as the last word sends it to stderr
``exit N`` ``true`` ``false``  as a shell has it
``cat``                 stdin to stdout
``pwd`` ``env NAME`` ``whoami``  the exec's own fields
``hold NAME``           until ``FakeGuest.release(NAME)``, TERM or KILL; so does ``sleep N`` with name ``sleep``
``stubborn NAME``       the same, but TERM is ignored
``linger NAME TEXT…``   the main process ends now; at the release a child that kept the pipes writes TEXT
``flood BYTES``         so many bytes of ``x`` to stdout
``oom``                 the kernel kills the command for the memory limit
``kill N``              signal N ends the command
======================  ================================================================================

Anything else cannot be started (exit code 127).
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import shlex
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

from opendsec_server.channel.interface import ExecExit, ExecSink, ExecSpec

_T = TypeVar("_T")

_CHUNK = 64 * 1024
_TERM, _KILL = 15, 9


class _Ended(Exception):
    def __init__(self, code: int = 0, signal: int = 0) -> None:
        super().__init__()
        self.code = code
        self.signal = signal


class FakeExec:
    """One command: its output so far, its end, and who listens."""

    def __init__(self, guest: FakeGuest, spec: ExecSpec) -> None:
        self.guest = guest
        self.spec = spec
        self.streams = (bytearray(), bytearray())
        self.exit: ExecExit | None = None
        #: Set when the main process has ended.
        self.over = asyncio.Event()
        self.closed = False
        self.forgotten = False
        self.sink: ExecSink | None = None
        self.stdin: asyncio.Queue[bytes | None] = asyncio.Queue(4)
        self.began = time.monotonic()
        self.timed_out = False
        self.signal: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.stubborn = False
        self.task: asyncio.Task[None] | None = None
        self.timers: list[asyncio.TimerHandle] = []

    def write(self, stream: int, data: bytes) -> None:
        """Append output and pass it on."""
        kept = self.streams[stream - 1]
        offset = len(kept)
        kept += data
        if self.sink is not None:
            self.sink.output(stream, offset, data)

    def hit(self, signal: int) -> None:
        """Deliver a signal."""
        if signal in {_TERM, _KILL} and not self.signal.done() and not (signal == _TERM and self.stubborn):
            self.signal.set_result(signal)

    def stop(self, grace_ms: int) -> None:
        """TERM now, KILL after the grace."""
        self.hit(_TERM)
        loop = asyncio.get_running_loop()
        self.timers.append(loop.call_later(grace_ms / 1000, self.hit, _KILL))

    def expire(self) -> None:
        """Run out of time."""
        if self.exit is None:
            self.timed_out = True
            self.stop(self.spec.grace_ms)

    def end(self, code: int, signal: int = 0, start_error: str | None = None) -> None:
        """Note how the main process ended."""
        if self.exit is not None:
            return
        for timer in self.timers:
            timer.cancel()
        self.exit = ExecExit(
            exit_code=128 + signal if signal else code,
            signal=signal,
            timed_out=self.timed_out,
            start_error=start_error,
            duration_ms=(time.monotonic() - self.began) * 1000,
            stdout_bytes=len(self.streams[0]),
            stderr_bytes=len(self.streams[1]),
        )
        self.over.set()
        if self.sink is not None:
            self.sink.exited(self.exit)

    def close(self) -> None:
        """Both streams are at their end."""
        self.closed = True
        sink, self.sink = self.sink, None
        if sink is not None:
            sink.closed()
        if self.forgotten:
            self.guest.execs.pop(self.spec.id, None)

    def attach(self, offsets: tuple[int, int], sink: ExecSink) -> None:
        """Replay from the offsets on, then follow."""
        self.sink = sink
        if self.exit is None or self.exit.start_error is None:
            sink.started(self.guest.pid_of(self))
        for stream, (kept, offset) in enumerate(zip(self.streams, offsets, strict=True), 1):
            for at in range(offset, len(kept), _CHUNK):
                sink.output(stream, at, bytes(kept[at : at + _CHUNK]))
        if self.exit is not None:
            sink.exited(self.exit)
        if self.closed:
            self.close()

    async def run(self) -> None:
        """Interpret the command."""
        try:
            await self._script()
            code, signal = 0, 0
        except _Ended as ended:
            code, signal = ended.code, ended.signal
        self.end(code, signal)
        self.close()

    async def _script(self) -> None:
        argv = [arg.decode("utf-8", "surrogateescape") for arg in self.spec.argv]
        if argv[0] in {"@sh", "@bash", "sh", "/bin/sh"} and argv[1:2] == ["-c"]:
            commands = [shlex.split(part) for part in argv[2].split(";")]
        else:
            commands = [argv]
        code = 0
        for command in commands:
            if command:
                code = await self._command(command[0], command[1:])
        if code:
            raise _Ended(code)

    async def _command(self, name: str, args: list[str]) -> int:
        match name, args:
            case "true", _:
                return 0
            case "false", _:
                return 1
            case "exit", _:
                raise _Ended(int(args[0]) if args else 0)
            case "kill", [number]:
                raise _Ended(signal=int(number))
            case "oom", _:
                self.guest.oom_kills += 1
                raise _Ended(signal=_KILL)
            case "echo", [*words, ">&2"]:
                self.write(2, " ".join(words).encode("utf-8", "surrogateescape") + b"\n")
            case "echo", _:
                self.write(1, " ".join(args).encode("utf-8", "surrogateescape") + b"\n")
            case "pwd", _:
                self.write(1, self.spec.cwd.encode() + b"\n")
            case "whoami", _:
                self.write(1, self.spec.user.encode() + b"\n")
            case "env", [variable]:
                self.write(1, self.spec.env.get(variable, "").encode() + b"\n")
            case "cat", []:
                while self.spec.stdin and (data := await self._or_signal(self.stdin.get())) is not None:
                    self.write(1, data)
            case "flood", [size]:
                left = int(size)
                while left > 0:
                    self.write(1, b"x" * min(left, _CHUNK))
                    left -= _CHUNK
                    await asyncio.sleep(0)
                    if self.signal.done():
                        raise _Ended(signal=self.signal.result())
            case "hold", [hold]:
                await self._or_signal(self.guest.gate(hold).wait())
            case "sleep", _:
                await self._or_signal(self.guest.gate("sleep").wait())
            case "stubborn", [hold]:
                self.stubborn = True
                await self._or_signal(self.guest.gate(hold).wait())
            case "linger", [hold, *words]:
                self.end(0)
                await self._or_signal(self.guest.gate(hold).wait())
                self.write(1, " ".join(words).encode() + b"\n")
            case _:
                self.write(2, f"{name}: not found\n".encode())
                return 127
        return 0

    async def _or_signal(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Await, unless a signal ends the command first."""
        task = asyncio.ensure_future(work)
        either: set[asyncio.Future[Any]] = {task, self.signal}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            task.cancel()
        if self.signal.done():
            raise _Ended(signal=self.signal.result())
        return task.result()


class FakeGuest:
    """What lives as long as the sandbox: execs, files, counters. Channels come and go.

    Attributes:
        alive: pid 1 runs.
        oom_kills: what the kernel would have counted.
        pids_refused: forks refused for the process limit.
        disk_bytes: what the sandbox has written.
        starts: how often each exec was really started; more than once is a defect of the host end.
        files: content and mode by absolute path; directories have ``None`` as content.
    """

    def __init__(self) -> None:
        self.boot_id = secrets.token_hex(8)
        self.alive = True
        self.oom_kills = 0
        self.pids_refused = 0
        self.disk_bytes = 0
        self.execs: dict[str, FakeExec] = {}
        self.starts: dict[str, int] = {}
        self.files: dict[bytes, tuple[bytes | None, int]] = {b"/": (None, 0o755), b"/tmp": (None, 0o1777)}
        self.dead = asyncio.Event()
        #: Called when pid 1 ends.
        self.on_death: list[Any] = []
        self._gates: dict[str, asyncio.Event] = {}

    def gate(self, name: str) -> asyncio.Event:
        """Return what ``hold NAME`` waits for."""
        return self._gates.setdefault(name, asyncio.Event())

    def release(self, name: str) -> None:
        """Let all that hold on ``name`` go on."""
        self.gate(name).set()

    def pid_of(self, exec_: FakeExec) -> int:
        """Return a number for the main process of an exec."""
        return 2 + list(self.execs.values()).index(exec_)

    def start(self, spec: ExecSpec, sink: ExecSink) -> None:
        """Start a command, or attach from the beginning if its id is known."""
        known = self.execs.get(spec.id)
        if known is not None:
            known.attach((0, 0), sink)
            return
        exec_ = self.execs[spec.id] = FakeExec(self, spec)
        self.starts[spec.id] = self.starts.get(spec.id, 0) + 1
        exec_.sink = sink
        if spec.argv[0].decode("utf-8", "replace") not in _KNOWN:
            exec_.end(127, start_error=f"cannot run {spec.argv[0]!r}: no such file or directory")
            exec_.close()
            return
        sink.started(self.pid_of(exec_))
        if spec.timeout_ms is not None:
            exec_.timers.append(asyncio.get_running_loop().call_later(spec.timeout_ms / 1000, exec_.expire))
        exec_.task = asyncio.create_task(exec_.run())

    def die(self) -> None:
        """End pid 1 and with it everything."""
        if not self.alive:
            return
        self.alive = False
        for exec_ in self.execs.values():
            exec_.sink = None
            for timer in exec_.timers:
                timer.cancel()
            if exec_.task is not None:
                exec_.task.cancel()
        for callback in list(self.on_death):
            with contextlib.suppress(ValueError):
                callback()
        self.dead.set()


_KNOWN = frozenset(
    [
        "@sh",
        "@bash",
        "sh",
        "/bin/sh",
        "echo",
        "exit",
        "true",
        "false",
        "cat",
        "pwd",
        "env",
        "whoami",
        "hold",
        "sleep",
        "stubborn",
        "linger",
        "flood",
        "oom",
        "kill",
    ]
)
