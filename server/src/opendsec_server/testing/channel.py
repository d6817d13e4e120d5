"""A real chronus for tests, outside any container: the same binary that runs as process 1 of a sandbox."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from opendsec_server.channel.client import connect
from opendsec_server.channel.interface import Channel, ExecExit, ExecSpec

_ROOT = Path(__file__).resolve().parents[4]
_TARGET = "x86_64-unknown-linux-musl"
_ids = itertools.count()


@functools.cache
def chronus_binary() -> Path:
    """Build chronus once and return the path of the binary."""
    return _built("chronus")


@functools.cache
def probe_binary() -> Path:
    """Build the static test program that runs inside sandboxes and return its path."""
    return _built("probe")


def _built(package: str) -> Path:
    binary = _ROOT / "target" / _TARGET / "release" / package
    cargo = Path(shutil.which("cargo") or Path.home() / ".cargo/bin/cargo")
    if cargo.exists():
        command = [str(cargo), "build", "--quiet", "--release", "--target", _TARGET, "-p", package]
        subprocess.run(command, cwd=_ROOT, check=True, timeout=600)
    assert binary.exists(), f"{binary} is not built and cargo is not here"
    return binary


@contextlib.contextmanager
def running_chronus(
    *, pid_namespace: bool = False, arguments: tuple[str, ...] = (), root: Path | None = None
) -> Iterator[Path]:
    """Run chronus and give the path of its socket.

    Args:
        pid_namespace: let it be process 1 of its own process and mount namespaces (needs root).
        arguments: further arguments.
        root: its root folder, into which the binary is copied (only with ``pid_namespace``; no ``/proc`` then).
    """
    with tempfile.TemporaryDirectory(prefix="chronus-") as folder:
        base = Path(folder)
        base.chmod(0o755)
        tools = base / "tools"
        tools.mkdir()
        for name in ("sh", "bash"):
            (tools / name).symlink_to(shutil.which(name) or f"/bin/{name}")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(str(base / "socket"))
            listener.listen(16)
            command = [str(chronus_binary()), "--tools", str(tools), *arguments]
            if root is not None:
                shutil.copy(command[0], root / "chronus")
                command = ["unshare", "--pid", "--fork", "--kill-child", f"--root={root}", "/chronus", *command[1:]]
            elif pid_namespace:
                command = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", *command]
            else:
                command.append("--allow-any-peer")
            number = listener.fileno()
            process = subprocess.Popen(
                command,
                pass_fds=(3, number),
                preexec_fn=lambda: os.dup2(number, 3),
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        try:
            yield base / "socket"
        finally:
            process.kill()
            process.wait()


@contextlib.asynccontextmanager
async def chronus_channel(*, pid_namespace: bool = False) -> AsyncIterator[Channel]:
    """Run chronus and give an open channel to it."""
    with running_chronus(pid_namespace=pid_namespace) as path:
        channel = await connect(path)
        try:
            yield channel
        finally:
            await channel.aclose()


class RecordingSink:
    """Keeps all it is told; the awaitables return when the time has come."""

    def __init__(self) -> None:
        self.pid: int | None = None
        self.streams: dict[int, bytearray] = {1: bytearray(), 2: bytearray()}
        self.first_offset: dict[int, int] = {}
        self.exit: ExecExit | None = None
        self.events: list[str] = []
        self._loop = asyncio.get_running_loop()
        self._waiters: list[asyncio.Future[None]] = []

    def _note(self, event: str) -> None:
        if not self.events or self.events[-1] != event:
            self.events.append(event)
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def started(self, pid: int) -> None:
        """Remember the process id."""
        self.pid = pid
        self._note("started")

    def output(self, stream: int, offset: int, data: bytes) -> None:
        """Keep the bytes; they must follow what came before."""
        first = self.first_offset.setdefault(stream, offset)
        assert offset == first + len(self.streams[stream]), "output must be contiguous"
        self.streams[stream] += data
        self._note("output")

    def exited(self, exit_: ExecExit) -> None:
        """Remember the end."""
        self.exit = exit_
        self._note("exited")

    def closed(self) -> None:
        """Remember that nothing follows."""
        self._note("closed")

    def lost(self) -> None:
        """Remember that the connection broke."""
        self._note("lost")

    @property
    def stdout(self) -> bytes:
        """All of standard output."""
        return bytes(self.streams[1])

    @property
    def stderr(self) -> bytes:
        """All of standard error."""
        return bytes(self.streams[2])

    async def wait_for(self, event: str) -> None:
        """Return when ``event`` (``started``, ``exited``, ``closed``, ``lost``) has been told."""
        while event not in self.events:
            await self.changed()

    async def changed(self) -> None:
        """Return when anything is told next."""
        waiter = self._loop.create_future()
        self._waiters.append(waiter)
        await waiter

    async def result(self) -> ExecExit:
        """Return how the command ended, when it has."""
        await self.wait_for("exited")
        assert self.exit is not None
        return self.exit


def spec(*argv: bytes | str, **fields: Any) -> ExecSpec:
    """A command with a small environment and a fresh id."""
    fields.setdefault("id", f"ex-{next(_ids)}")
    fields.setdefault("env", {"PATH": "/usr/bin:/bin"})
    fields.setdefault("cwd", "/")
    fields.setdefault("user", "0")
    return ExecSpec(argv=[a.encode() if isinstance(a, str) else a for a in argv], **fields)


def shell(line: str, **fields: Any) -> ExecSpec:
    """A shell line."""
    return spec("@sh", "-c", line, **fields)


async def run(channel: Channel, command: ExecSpec) -> RecordingSink:
    """Run a command to the end of its output."""
    sink = RecordingSink()
    await channel.exec_start(command, sink)
    await sink.wait_for("closed")
    channel.exec_forget(command.id)
    return sink
