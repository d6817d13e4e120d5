"""A running command that one follows, feeds and signals; any client can attach to it by its id."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Self

import msgspec

from opendsec._core import Core
from opendsec._execs import Execs
from opendsec._results import ExecResult, OutputEvent
from opendsec._retry import may_repeat
from opendsec._transport import Silence
from opendsec.api.errors import Conflict, NotFound, PlatformError
from opendsec.api.models import Exec, Signal

_STDIN_CHUNK = 1024 * 1024
_events = msgspec.json.Decoder(OutputEvent)


class Process:
    """A command in a sandbox, made by ``Sandbox.start`` or ``Sandbox.attach``.

    Iterating gives its output as it comes, from where the last iteration stopped. As ``async with`` block it is killed
    at the end if it still runs. It goes on when this client disappears.

    Attributes:
        id: id of the exec; ``Sandbox.attach(id)`` finds it again from anywhere.
        offsets: bytes seen so far of stdout and of stderr.
    """

    def __init__(self, core: Core, execs: Execs, exec_id: str, offsets: tuple[int, int] = (0, 0)) -> None:
        self._core = core
        self._execs = execs
        self.id = exec_id
        self.offsets = offsets
        self._stdin = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<Process {self.id} in {self._execs.sandbox_id}>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._core.cleanup(self.kill())

    async def __aiter__(self) -> AsyncIterator[OutputEvent]:
        """Iterate over output until the command has ended and all of it was seen."""
        async for event in self.output():
            yield event

    async def output(self, *, follow: bool = True) -> AsyncIterator[OutputEvent]:
        """Iterate over output, from ``offsets`` on; a lost connection is attached again without loss or repetition.

        Args:
            follow: go on until the command has ended; else stop at what there is now.

        Raises:
            PlatformError: the platform failed.
        """
        transport = self._core.transport
        clock = asyncio.get_running_loop().time
        attempt, deadline = 0, 0.0
        while True:
            out, err = self.offsets
            target = f"{self._execs.target}/{self.id}/output?stdout={out}&stderr={err}"
            try:
                async with transport.stream("GET", target + ("&follow=true" if follow else "")) as stream:
                    async for line in stream.lines():
                        event = self._advance(_events.decode(line))
                        attempt = 0
                        if event is not None:
                            yield event
            except Silence:
                continue  # the command says nothing: attach again, which also tells whether it is still there
            except PlatformError as error:
                if not may_repeat(error, idempotent=True):
                    raise
                if attempt == 0:
                    deadline = clock() + transport.retry_seconds
                attempt += 1
                await transport.pause_within(attempt, error, deadline)
            else:
                return

    def _advance(self, event: OutputEvent) -> OutputEvent | None:
        """Move the offset of a stream; what was seen before is cut off."""
        index = 0 if event.stream == "stdout" else 1
        seen = self.offsets[index]
        end = event.offset + len(event.data)
        if event.offset < seen:
            event = msgspec.structs.replace(event, offset=seen, data=event.data[seen - event.offset :])
        if end <= seen and not event.lost:
            return None
        out, err = self.offsets
        self.offsets = (max(out, end), err) if index == 0 else (out, max(err, end))
        return event

    async def info(self) -> Exec:
        """Return state, exit code and sizes, without output."""
        return await self._execs.get(self.id)

    async def wait(self, timeout: float | None = None) -> ExecResult:
        """Return the result with all output that is kept, once the command has ended.

        Args:
            timeout: seconds to wait; the command itself goes on.

        Raises:
            WaitTimeout: it has not ended in time (also a ``TimeoutError``).
            PlatformError: the platform failed.
        """
        deadline = None if timeout is None else asyncio.get_running_loop().time() + timeout
        return await self._execs.wait(self.id, deadline)

    async def write_stdin(self, data: bytes | str) -> None:
        """Write standard input; waits while the command does not read. Needs ``start(…, stdin=True)``.

        Raises:
            OutcomeUnknown: the connection broke: it is unknown whether the command got the bytes.
            PlatformError: the command has ended, or its standard input is closed.
        """
        raw = data.encode() if isinstance(data, str) else data
        async with self._stdin:
            for start in range(0, len(raw), _STDIN_CHUNK):
                await self._post_stdin(raw[start : start + _STDIN_CHUNK], eof=False)

    async def close_stdin(self) -> None:
        """End standard input."""
        async with self._stdin:
            with contextlib.suppress(NotFound, Conflict):
                await self._post_stdin(b"", eof=True)

    async def _post_stdin(self, data: bytes, *, eof: bool) -> None:
        target = f"{self._execs.target}/{self.id}/stdin?eof={'true' if eof else 'false'}"
        # A command may take its time to read: the answer comes when it has.
        await self._core.transport.call("POST", target, data, idempotent=eof and not data, idle=86_400.0)

    async def signal(self, signal: str | int = "TERM", *, tree: bool = False) -> None:
        """Send a signal.

        Args:
            signal: name with or without ``SIG``, or number.
            tree: to the whole process tree, not only to the main process.

        Raises:
            NotFound: it has ended.
        """
        await self._execs.signal(self.id, Signal(signal=str(signal), tree=tree))

    async def kill(self) -> None:
        """Kill the whole process tree; nothing happens if it has ended. ``wait`` still gives the result."""
        with contextlib.suppress(NotFound, Conflict):
            await self.signal("KILL", tree=True)
