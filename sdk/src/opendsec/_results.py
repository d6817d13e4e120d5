"""What commands give back, and the errors that ``check=True`` makes of it."""

from __future__ import annotations

from typing import Literal

import msgspec

from opendsec.api.errors import ExecTimeout


class ExecResult(msgspec.Struct, kw_only=True, frozen=True):
    """How a command ended and what it wrote (design section 6, the truth model).

    Attributes:
        id: id of the exec.
        exit_code: as the command gave it; 128 + number if a signal ended it; 126 or 127 if it could not be started
            (the reason is on stderr).
        signal: name such as ``SIGKILL`` if a signal ended it.
        stdout_bytes: what it wrote to standard output.
        stderr_bytes: what it wrote to standard error.
        truncated: more was written than is kept; ``[… n bytes cut …]`` marks the cut.
        timed_out: the platform ended it because its ``timeout`` had passed.
        oom_killed: the kernel killed it, or a process of it, for memory.
        duration: wall time in seconds.
        cpu_seconds: user and system time of the main process and the children it waited for.
        peak_memory_bytes: largest resident set of the main process or a child it waited for.
        stdout_total: bytes written to standard output, kept or not.
        stderr_total: bytes written to standard error, kept or not.
    """

    id: str
    sandbox_id: str = ""
    state: Literal["starting", "running", "exited", "lost"] = "exited"
    argv: list[str] = []
    exit_code: int = -1
    signal: str | None = None
    stdout_bytes: bytes = msgspec.field(default=b"", name="stdout")
    stderr_bytes: bytes = msgspec.field(default=b"", name="stderr")
    truncated: bool = False
    timed_out: bool = False
    oom_killed: bool = False
    duration: float | None = None
    cpu_seconds: float | None = None
    peak_memory_bytes: int | None = None
    stdout_total: int = msgspec.field(default=0, name="stdout_bytes")
    stderr_total: int = msgspec.field(default=0, name="stderr_bytes")
    started_at: float = 0.0
    ended_at: float | None = None
    is_infra: bool = False

    @property
    def stdout(self) -> str:
        """Standard output as text; bytes that are no UTF-8 are replaced."""
        return self.stdout_bytes.decode("utf-8", "replace")

    @property
    def stderr(self) -> str:
        """Standard error as text; bytes that are no UTF-8 are replaced."""
        return self.stderr_bytes.decode("utf-8", "replace")

    @property
    def ok(self) -> bool:
        """It ended by itself with exit code 0."""
        return self.exit_code == 0 and not self.timed_out

    def check(self) -> ExecResult:
        """Return the result if it is ``ok``.

        Raises:
            CommandTimedOut: its timeout had passed.
            CommandFailed: it ended with another exit code than 0.
        """
        if self.timed_out:
            raise CommandTimedOut(self)
        if self.exit_code != 0:
            raise CommandFailed(self)
        return self


class OutputEvent(msgspec.Struct, kw_only=True, frozen=True):
    """A piece of output of a running command.

    Attributes:
        stream: ``stdout`` or ``stderr``.
        offset: position of its first byte in the stream.
        data: the bytes.
        lost: bytes before ``offset`` that were not kept (see ``ExecResult.truncated``).
    """

    stream: Literal["stdout", "stderr"]
    offset: int
    data: bytes = b""
    lost: int = 0

    @property
    def text(self) -> str:
        """The bytes as text; a character cut at the border of two pieces is replaced in both."""
        return self.data.decode("utf-8", "replace")


class CommandFailed(Exception):
    """A command ended badly and ``check=True`` was asked for. Never an error of the platform.

    Attributes:
        result: how it ended and what it wrote.
    """

    def __init__(self, result: ExecResult) -> None:
        super().__init__(_summary(result))
        self.result = result

    def __reduce__(self) -> tuple[type[CommandFailed], tuple[ExecResult]]:
        return type(self), (self.result,)


class CommandTimedOut(ExecTimeout, CommandFailed):
    """A command was ended because its timeout had passed, and ``check=True`` was asked for.

    Attributes:
        result: the partial output.
    """

    def __init__(self, result: ExecResult) -> None:
        ExecTimeout.__init__(self, _summary(result), exec_id=result.id)
        self.result = result


def _summary(result: ExecResult) -> str:
    how = "timed out" if result.timed_out else f"ended with exit code {result.exit_code}"
    if result.oom_killed:
        how += " (out of memory)"
    lines = result.stderr_bytes[-2000:].decode("utf-8", "replace").strip().splitlines()
    return f"the command {how}" + (f": {lines[-1][:300]}" if lines else "")
