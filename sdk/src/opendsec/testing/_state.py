"""State of the in-memory platform: sandboxes, their commands and files."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Literal

import msgspec

from opendsec.api.models import Exec, ExecRequest, FileInfo
from opendsec.api.models import Sandbox as SandboxInfo


class Node(msgspec.Struct, kw_only=True):
    """A file, directory or symbolic link in memory."""

    kind: Literal["file", "directory", "symlink"]
    data: bytes = b""
    mode: int = 0o644
    target: str | None = None
    mtime: float = 0.0

    def info(self, path: bytes) -> FileInfo:
        """Describe it."""
        text = path.decode("utf-8", "replace")
        return FileInfo(
            path=text,
            kind=self.kind,
            size=len(self.data),
            mode=self.mode,
            mtime=self.mtime,
            target=self.target,
            path_raw=None if text.encode() == path else path,
        )


class FakeCommand:
    """A command of a fake sandbox, as a handler sees it.

    Attributes:
        request: what was asked for.
        line: the shell line, or the arguments joined by spaces.
        files: files of the sandbox by absolute path.
    """

    def __init__(self, record: FakeExec, files: dict[bytes, Node]) -> None:
        self._record = record
        self.request = record.request
        self.line = record.request.shell if record.request.shell is not None else " ".join(record.request.argv or [])
        self.files = files

    def write(self, data: bytes | str, *, stream: Literal["stdout", "stderr"] = "stdout") -> None:
        """Write output."""
        self._record.write(stream, data.encode() if isinstance(data, str) else data)

    async def read_stdin(self) -> bytes:
        """Return the next piece of standard input, empty at its end."""
        return await self._record.read_stdin()

    async def wait_signal(self) -> str:
        """Return the next signal (``INT``, say); KILL ends a command without its help."""
        return await self._record.signals.get()


#: Runs a command and returns its exit code, or None to let the next handler try.
Handler = Callable[[FakeCommand], Awaitable[int | None]]


class FakeExec:
    """Record of one command."""

    def __init__(self, sandbox_id: str, exec_id: str, request: ExecRequest) -> None:
        self.request = request
        self.view = Exec(
            id=exec_id, sandbox_id=sandbox_id, state="running", argv=request.argv or [], started_at=time.time()
        )
        self.output = {"stdout": bytearray(), "stderr": bytearray()}
        self.signals: asyncio.Queue[str] = asyncio.Queue()
        self.changed = asyncio.Event()
        self.task: asyncio.Task[None] | None = None
        self.killed: str | None = None
        self._stdin: asyncio.Queue[bytes] = asyncio.Queue()
        self.stdin_closed = False
        if request.stdin:
            self._stdin.put_nowait(request.stdin)
        if not request.stdin_open:
            self.close_stdin()

    @property
    def ended(self) -> bool:
        """Whether it has ended."""
        return self.view.state in ("exited", "lost")

    def wake(self) -> None:
        """Tell all who wait that something changed."""
        self.changed.set()
        self.changed = asyncio.Event()

    def write(self, stream: str, data: bytes) -> None:
        """Add output."""
        self.output[stream] += data
        self.wake()

    def feed(self, data: bytes) -> None:
        """Add standard input."""
        if data:
            self._stdin.put_nowait(data)

    def close_stdin(self) -> None:
        """End standard input."""
        if not self.stdin_closed:
            self.stdin_closed = True
            self._stdin.put_nowait(b"")

    async def read_stdin(self) -> bytes:
        """Return the next piece of standard input, empty at its end."""
        piece = await self._stdin.get()
        if not piece:
            self._stdin.put_nowait(b"")
        return piece

    async def run(self, handler: Callable[[], Awaitable[int]]) -> None:
        """Run to the end."""
        started = time.perf_counter()
        code, signal = 0, None
        try:
            async with asyncio.timeout(self.request.timeout):
                code = await handler()
        except TimeoutError:
            self.view.timed_out, code, signal = True, 143, "SIGTERM"
        except asyncio.CancelledError:
            signal = self.killed or "SIGKILL"
            code = {"SIGKILL": 137, "SIGTERM": 143, "SIGINT": 130}.get(signal, 129)
        except Exception as error:
            self.write("stderr", f"handler failed: {error!r}\n".encode())
            code = 1
        view = self.view
        view.state, view.exit_code, view.signal = "exited", code, signal
        view.ended_at, view.duration = time.time(), time.perf_counter() - started
        view.cpu_seconds, view.peak_memory_bytes = 0.001, 1024 * 1024
        view.stdout_bytes, view.stderr_bytes = len(self.output["stdout"]), len(self.output["stderr"])
        self.wake()

    async def wait_ended(self, seconds: float) -> None:
        """Return when it has ended, or after a while."""
        try:
            async with asyncio.timeout(seconds):
                while not self.ended:
                    await self.changed.wait()
        except TimeoutError:
            pass


class FakeSandbox:
    """Record of one sandbox."""

    def __init__(self, info: SandboxInfo, lease_seconds: float | None) -> None:
        self.info = info
        self.lease_seconds = lease_seconds
        self.claimed = False
        self.execs: dict[str, FakeExec] = {}
        self.files: dict[bytes, Node] = {path: Node(kind="directory", mode=0o755) for path in (b"/", b"/tmp", b"/root")}

    def end(self, state: Literal["stopped", "failed", "expired"], cause: str, *, is_infra: bool = False) -> None:
        """Let it end."""
        self.info.state, self.info.cause, self.info.is_infra = state, cause, is_infra
        self.info.ended_at = time.time()
        for record in self.execs.values():
            if record.task is not None and not record.ended:
                record.task.cancel()


async def default_handler(command: FakeCommand) -> int | None:
    """Run the few commands that tests need: ``true false echo cat sleep exit``; anything else is not found."""
    words = command.request.argv if command.request.argv is not None else command.line.split()
    name, rest = (words[0], words[1:]) if words else ("true", [])
    if name == "echo":
        command.write(" ".join(rest) + "\n")
    elif name == "cat":
        for path in rest:
            node = command.files.get(path.encode())
            if node is None:
                command.write(f"cat: {path}: No such file or directory\n", stream="stderr")
                return 1
            command.write(node.data)
        while not rest and (piece := await command.read_stdin()):
            command.write(piece)
    elif name == "sleep":
        await asyncio.sleep(float(rest[0]))
    elif name == "exit":
        return int(rest[0])
    elif name == "false":
        return 1
    elif name != "true":
        command.write(f"{name}: not found\n", stream="stderr")
        return 127
    return 0
