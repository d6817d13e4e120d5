"""Commands to their end: start, wait in pieces, attach again after a lost connection, stop on cancellation.

The SDK chooses the exec id, so every request here may be repeated: a command is started once, whatever is lost on the
way, and its result is the one the platform recorded.

::

    run ── POST execs (wait) ──► exited ──► result
              │ not yet              ▲
              ▼                      │
           GET exec (wait) ◄─────────┘ again, until the deadline
    cancelled at any point: DELETE exec, in a task that the cancellation does not reach
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import PurePath

import msgspec

from opendsec._core import Core
from opendsec._results import ExecResult
from opendsec._retry import may_repeat
from opendsec._transport import IDLE_SECONDS, WAIT_CHUNK
from opendsec.api.errors import InvalidArgument, NotFound, OutcomeUnknown, PlatformError, WaitTimeout
from opendsec.api.ids import new_exec_id
from opendsec.api.models import Exec, ExecRequest, Signal

#: The platform ends a command at its timeout; the client waits this much longer for the news, in seconds.
_SLACK = 60.0
_KILL_DELAYS = (0.05, 0.2, 1.0)

_encoder = msgspec.json.Encoder()
_result = msgspec.json.Decoder(ExecResult)
_exec = msgspec.json.Decoder(Exec)


class Execs:
    """Commands of one sandbox."""

    __slots__ = ("_core", "sandbox_id", "target")

    def __init__(self, core: Core, sandbox_id: str) -> None:
        self._core = core
        self.sandbox_id = sandbox_id
        self.target = f"/v1/sandboxes/{sandbox_id}/execs"

    async def run(self, request: ExecRequest, *, check: bool, detach: bool) -> ExecResult:
        """Run a command to its end.

        Raises:
            PlatformError: the platform failed; never because of the command.
            CommandFailed: with ``check``.
        """
        timeout = request.timeout
        wait = WAIT_CHUNK if timeout is None else min(WAIT_CHUNK, timeout + request.grace_seconds + 1.0)
        request.wait_seconds = wait
        exec_id = request.id or ""
        try:
            deadline = None
            if timeout is not None:
                deadline = asyncio.get_running_loop().time() + timeout + request.grace_seconds + _SLACK
            body = _encode(request)
            transport = self._core.transport
            try:
                answer = await transport.send("POST", self.target, body, idle=wait + IDLE_SECONDS)
            except PlatformError as error:
                answer = await self._again(error, body, wait, deadline)
            result = _result.decode(answer)
            if result.state != "exited":
                result = await self.wait(exec_id, deadline, result)
        except asyncio.CancelledError:
            if not detach:
                await self._core.cleanup(self.kill_for_good(exec_id))
            raise
        return result.check() if check else result

    async def _again(self, error: PlatformError, body: bytes, wait: float, deadline: float | None) -> bytes:
        """Repeat the start of a command: the id makes it the same command."""
        if not may_repeat(error, idempotent=True):
            raise error
        return await self._core.transport.call("POST", self.target, body, deadline=deadline, idle=wait + IDLE_SECONDS)

    async def wait(self, exec_id: str, deadline: float | None, last: ExecResult | None = None) -> ExecResult:
        """Return the result once the command has ended.

        Args:
            exec_id: which.
            deadline: on the clock of the event loop.
            last: what is known.

        Raises:
            WaitTimeout: the deadline passed; the command goes on.
            OutcomeUnknown: the platform lost the command.
        """
        clock = asyncio.get_running_loop().time
        while True:
            if last is not None and last.state == "exited":
                return last
            if last is not None and last.state == "lost":
                raise OutcomeUnknown(
                    f"the platform lost command {exec_id}: how it ended is unknown",
                    exec_id=exec_id,
                    sandbox_id=self.sandbox_id,
                )
            left = WAIT_CHUNK if deadline is None else deadline - clock()
            if left <= 0 and last is not None:
                raise WaitTimeout(f"command {exec_id} has not ended in time", exec_id=exec_id)
            wait = max(0.0, min(WAIT_CHUNK, left))
            target = f"{self.target}/{exec_id}?wait_seconds={wait:.3f}&output=true"
            end = None if deadline is None else max(deadline, clock()) + IDLE_SECONDS
            last = _result.decode(
                await self._core.transport.call("GET", target, deadline=end, idle=wait + IDLE_SECONDS)
            )

    async def start(self, request: ExecRequest) -> Exec:
        """Start a command and return at once; cancelled before that, it is killed: nobody would know its id."""
        try:
            return _exec.decode(await self._core.transport.call("POST", self.target, _encode(request)))
        except asyncio.CancelledError:
            await self._core.cleanup(self.kill_for_good(request.id or ""))
            raise

    async def get(self, exec_id: str) -> Exec:
        """Return what is known of a command, without its output."""
        return _exec.decode(await self._core.transport.call("GET", f"{self.target}/{exec_id}?wait_seconds=0"))

    async def signal(self, exec_id: str, signal: Signal) -> None:
        """Send a signal; not repeated if the outcome is unknown."""
        await self._core.transport.call(
            "POST", f"{self.target}/{exec_id}/signal", _encode(signal), idempotent=signal.signal in ("KILL", "SIGKILL")
        )

    async def delete(self, exec_id: str) -> None:
        """Kill the process tree of a command and forget its record."""
        await self._core.transport.call("DELETE", f"{self.target}/{exec_id}")

    async def kill_for_good(self, exec_id: str) -> None:
        """Delete a command whose start may still be on its way on another connection."""
        try:
            await self.delete(exec_id)
        except NotFound:
            self._core.spawn(self._kill_late(exec_id))

    async def _kill_late(self, exec_id: str) -> None:
        for delay in _KILL_DELAYS:
            await asyncio.sleep(delay)
            try:
                await self.delete(exec_id)
            except NotFound:
                continue
            return


def _encode(value: ExecRequest | Signal) -> bytes:
    try:
        return _encoder.encode(value)
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"a command must be text that UTF-8 can hold: {error.reason}") from None


def request_for(
    command: str | Sequence[str | PurePath],
    *,
    timeout: float | None,
    cwd: str | PurePath | None,
    env: Mapping[str, str] | None,
    user: str | None,
    stdin: bytes | str | None = None,
    stdin_open: bool = False,
    shell_program: str = "sh",
    grace: float = 2.0,
    exec_id: str | None = None,
) -> ExecRequest:
    """Return the request for a shell line (a string) or a program with arguments (a sequence).

    Raises:
        TypeError: the arguments are no strings.
        InvalidArgument: the timeout is no number.
    """
    if timeout is not None and math.isnan(timeout):
        raise InvalidArgument("timeout must be a number of seconds", field="timeout")
    request = ExecRequest(id=exec_id or new_exec_id(), timeout=timeout, user=user)
    if isinstance(command, str):
        request.shell = command
        if shell_program != "sh":
            request.shell_program = shell_program
    else:
        request.argv = [os.fspath(part) for part in command]
    if cwd is not None:
        request.cwd = os.fspath(cwd)
    if env:
        request.env = dict(env)
    if stdin is not None:
        request.stdin = stdin.encode() if isinstance(stdin, str) else stdin
    if stdin_open:
        request.stdin_open = True
    if grace != 2.0:
        request.grace_seconds = grace
    return request
