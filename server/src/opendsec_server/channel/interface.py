"""Host end of the chronus protocol: one multiplexed connection to one sandbox.

The interface; the concrete class is in ``client``, the protocol in ``docs/reference/chronus-protocol.md``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Protocol

import msgspec

from opendsec.api.models import FileInfo


class ExecSpec(msgspec.Struct, kw_only=True, frozen=True):
    """A command for chronus."""

    id: str
    #: Program and arguments as bytes. ``argv[0]`` of ``@sh`` or ``@bash`` means the platform's own static shell.
    argv: list[bytes]
    #: Full environment, already merged.
    env: dict[str, str]
    cwd: str
    #: ``name``, ``uid``, ``name:group``, ``uid:gid``; resolved in the sandbox's own passwd and group files.
    user: str
    #: Whether the host will send standard input; else it is an empty file.
    stdin: bool = False
    timeout_ms: int | None = None
    grace_ms: int = 2000
    #: Soft and hard limit by name (``nofile``, ``nproc``, ``core``, …).
    rlimits: Mapping[str, tuple[int, int]] = {}


class ExecExit(msgspec.Struct, kw_only=True, frozen=True):
    """How a command ended."""

    exit_code: int
    #: Number of the signal that ended it, or 0.
    signal: int = 0
    timed_out: bool = False
    #: Reason in words if it could not be started (then exit_code is 126 or 127).
    start_error: str | None = None
    duration_ms: float = 0.0
    cpu_ms: float = 0.0
    peak_memory_bytes: int = 0
    stdout_bytes: int = 0
    stderr_bytes: int = 0


class ExecSink(Protocol):
    """Receives what happens to one exec. Called in order from the event loop; must not block."""

    def started(self, pid: int) -> None:
        """The main process runs."""

    def output(self, stream: int, offset: int, data: bytes) -> None:
        """New output; ``stream`` is 1 or 2. The channel acknowledges it to chronus when this returns."""

    def exited(self, exit_: ExecExit) -> None:
        """The main process ended; all it wrote before has been delivered by ``output``.

        Output of children that keep the pipes may still follow.
        """

    def closed(self) -> None:
        """Both streams are at their end; nothing follows."""

    def lost(self) -> None:
        """The connection broke; the exec itself goes on. Attach again from a new channel."""


class GuestInfo(msgspec.Struct, kw_only=True, frozen=True):
    """What chronus says of itself."""

    version: str
    protocol: int
    boot_id: str


class Channel(Protocol):
    """One connection to one chronus. Every method raises ``Unavailable`` when the connection is lost.

    Errors of the sandbox's file system come as ``NotFound``, ``PermissionDenied``, ``DiskFull``, ``Conflict`` or
    ``InvalidArgument``.
    """

    info: GuestInfo

    @property
    def is_open(self) -> bool:
        """Whether the connection stands."""

    async def wait_closed(self) -> None:
        """Return when the connection is lost or closed."""

    async def aclose(self) -> None:
        """Close the connection; the sandbox and its execs go on."""

    async def ping(self) -> None:
        """Return when chronus has answered."""

    async def exec_start(self, spec: ExecSpec, sink: ExecSink) -> None:
        """Start a command, or attach from offset 0 if chronus already knows the id.

        Returns when chronus has answered; ``sink.started`` has then been called, or ``sink.exited`` if it could not
        be started.
        """

    async def exec_attach(self, exec_id: str, offsets: tuple[int, int], sink: ExecSink) -> bool:
        """Continue receiving a known exec, from the given offsets of stdout and stderr.

        Returns ``False`` if chronus never heard of it.
        """

    async def exec_stdin(self, exec_id: str, data: bytes) -> None:
        """Write standard input; waits while the command does not read."""

    async def exec_stdin_close(self, exec_id: str) -> None:
        """End standard input."""

    async def exec_signal(self, exec_id: str, signal: int, *, tree: bool = False) -> None:
        """Send a signal to the main process or the whole tree (``NotFound`` if it has ended)."""

    async def exec_stop(self, exec_id: str, grace_ms: int) -> None:
        """TERM to the tree, KILL after the grace; returns at once."""

    def exec_forget(self, exec_id: str) -> None:
        """The host has stored the result: chronus may drop its record once the streams are closed."""

    async def exec_list(self) -> list[str]:
        """Return the ids of all execs that chronus holds."""

    def read_file(
        self, path: bytes, *, offset: int = 0, length: int | None = None, user: str = "0"
    ) -> AsyncIterator[bytes]:
        """Stream a regular file (a range of it)."""

    async def write_file(
        self,
        path: bytes,
        data: AsyncIterator[bytes],
        *,
        mode: int | None = None,
        offset: int | None = None,
        append: bool = False,
        parents: bool = False,
        user: str = "0",
    ) -> int:
        """Write a regular file and return the bytes written.

        Without ``offset`` and ``append`` the file is replaced atomically (temporary file, then rename); ``mode``
        defaults to the old file's or 0o644.
        """

    async def stat(self, path: bytes, *, user: str = "0") -> FileInfo:
        """Describe a path; a symbolic link is not followed."""

    def list_dir(self, path: bytes, *, recursive: bool = False, user: str = "0") -> AsyncIterator[FileInfo]:
        """List a directory, sorted by name; does not cross symbolic links."""

    async def mkdir(self, path: bytes, *, mode: int = 0o755, parents: bool = False, user: str = "0") -> None:
        """Make a directory; with ``parents`` also those above, and an existing one is fine."""

    async def remove(self, path: bytes, *, recursive: bool = False, user: str = "0") -> None:
        """Remove a file or an empty directory, or a tree; never follows symbolic links."""

    async def move(self, source: bytes, target: bytes, *, user: str = "0") -> None:
        """Rename; falls back to copy and remove across file systems."""

    def tar_out(self, path: bytes, *, user: str = "0") -> AsyncIterator[bytes]:
        """Stream a tree as tar, names relative to ``path``."""

    async def tar_in(self, path: bytes, data: AsyncIterator[bytes], *, user: str = "0") -> None:
        """Unpack a tar below ``path``.

        Members that would leave it (``..``, links out) are refused with ``InvalidArgument``.
        """
