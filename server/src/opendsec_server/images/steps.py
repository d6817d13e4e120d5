"""Steps of an import: programs that run outside the event loop and die with us, blocking work in threads."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

from opendsec.api.errors import DiskFull, PlatformError, UnsupportedCapability

T = TypeVar("T")
#: Lines of a program's output that an error carries, and most characters of each.
LOG_LINES, LOG_LINE_LENGTH = 30, 1000
_LINE_END = re.compile(rb"[\r\n]+")


class StepFailed(Exception):
    """A program ended with an error; importers turn it into a ``PlatformError``.

    Attributes:
        step: what it was to do.
        log: its last lines.
        status: exit code, or minus the signal's number.
    """

    def __init__(self, step: str, status: int, log: Sequence[str]) -> None:
        super().__init__(f"{step} failed with status {status}: {log[-1] if log else 'no output'}")
        self.step = step
        self.status = status
        self.log = list(log)

    def as_error(self, kind: type[PlatformError], reason: str) -> PlatformError:
        """Return the error for the caller, with step and log in ``detail``; ``DiskFull`` whenever the log says so."""
        if any("No space left on device" in line or "Disk quota exceeded" in line for line in self.log):
            kind, reason = DiskFull, "the disk is full"
        return kind(f"{self.step}: {reason}", step=self.step, log=self.log)


def require_tool(name: str, package: str) -> None:
    """Check that a program is installed.

    Raises:
        UnsupportedCapability: it is not; the message tells which Debian package has it.
    """
    if shutil.which(name) is None:
        raise UnsupportedCapability(f"{name} is not installed on this node (Debian package {package})", tool=name)


async def finish(work: Awaitable[T], on_cancel: Callable[[], None] | None = None) -> T:
    """Wait for work that must not be abandoned: a cancellation is raised only after it has ended.

    Args:
        work: the awaitable.
        on_cancel: tells the work to hurry; called once.
    """
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        if on_cancel is not None:
            on_cancel()
        while not task.done():
            try:
                await asyncio.shield(task)
            except asyncio.CancelledError:
                continue
            except BaseException:
                break
        if not task.cancelled():
            task.exception()  # seen: the cancellation is what the caller gets
        raise


async def run_step(
    step: str,
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    on_line: Callable[[str], None] | None = None,
    isolated: bool = False,
) -> None:
    """Run a program to its end, with its output as lines.

    It runs in a session of its own with standard input closed. If we are cancelled or killed, it is killed too.

    Args:
        step: what it does, for errors.
        argv: program and arguments.
        env: its whole environment.
        on_line: called with every line of standard output and error.
        isolated: run it as init of its own pid and mount namespaces, so that nothing it started or mounted
            outlives it.

    Raises:
        StepFailed: its exit status is not 0.
    """
    # The death signal covers SIGKILL of this process; --kill-child passes it on to the namespace's init.
    command = ["setpriv", "--pdeathsig", "KILL", "--"]
    if isolated:
        command += ["unshare", "--mount", "--pid", "--fork", "--kill-child=KILL", "--mount-proc", "--"]
    process = await asyncio.create_subprocess_exec(
        *command,
        *argv,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=dict(env),
        cwd="/",
        start_new_session=True,
    )
    log: deque[str] = deque(maxlen=LOG_LINES)
    try:
        assert process.stdout is not None  # noqa: S101 - asked for above
        await _read_lines(process.stdout, log, on_line)
        status = await process.wait()
    except BaseException:
        if process.returncode is None:
            _kill_group(process.pid)
        await finish(process.wait())
        raise
    if status != 0:
        raise StepFailed(step, status, log)


async def _read_lines(stream: asyncio.StreamReader, log: deque[str], on_line: Callable[[str], None] | None) -> None:
    rest = b""
    while True:
        data = await stream.read(65536)
        *lines, rest = _LINE_END.split(rest + data)
        if not data or len(rest) > 65536:
            lines.append(rest)
            rest = b""
        for raw in lines:
            line = raw.decode(errors="replace").rstrip()[:LOG_LINE_LENGTH]
            if line:
                log.append(line)
                if on_line is not None:
                    on_line(line)
        if not data:
            return


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
