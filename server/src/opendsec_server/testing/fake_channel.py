"""A channel to a sandbox in memory (``guest``): keeps every promise of ``channel.interface`` that an edge relies on."""

from __future__ import annotations

import asyncio
import io
import posixpath
import tarfile
from collections.abc import AsyncIterator

from opendsec.api.errors import Conflict, InvalidArgument, NotFound, Unavailable
from opendsec.api.models import FileInfo
from opendsec_server.channel.interface import ExecSink, ExecSpec, GuestInfo
from opendsec_server.testing.guest import FakeExec, FakeGuest

_CHUNK = 64 * 1024


class FakeChannel:
    """Implements ``Channel``; files are by absolute path, owned by root, without symbolic links."""

    def __init__(self, guest: FakeGuest) -> None:
        self.info = GuestInfo(version="fake", protocol=1, boot_id=guest.boot_id)
        self.guest = guest
        self._sinks: dict[str, ExecSink] = {}
        self._closed = asyncio.Event()
        guest.on_death.append(self.break_off)

    # -- connection --

    @property
    def is_open(self) -> bool:
        """Whether the connection stands."""
        return not self._closed.is_set()

    def break_off(self) -> None:
        """Lose the connection; the guest goes on."""
        if self._closed.is_set():
            return
        self._closed.set()
        self.guest.on_death = [one for one in self.guest.on_death if one != self.break_off]
        sinks, self._sinks = self._sinks, {}
        for exec_id, sink in sinks.items():
            exec_ = self.guest.execs.get(exec_id)
            if exec_ is not None and exec_.sink is not None and exec_.sink is not sink:
                continue
            if exec_ is not None and exec_.closed:
                continue
            if exec_ is not None:
                exec_.sink = None
            sink.lost()

    async def wait_closed(self) -> None:
        """Return when the connection is lost or closed."""
        await self._closed.wait()

    async def aclose(self) -> None:
        """Close the connection; the sandbox and its execs go on."""
        self.break_off()

    async def _turn(self) -> None:
        """Let others run, as a real round trip does."""
        self._check()
        await asyncio.sleep(0)
        self._check()

    def _check(self) -> None:
        if self._closed.is_set():
            raise Unavailable("the connection to the sandbox was lost")

    async def ping(self) -> None:
        """Return when the guest has answered."""
        await self._turn()

    # -- execs --

    async def exec_start(self, spec: ExecSpec, sink: ExecSink) -> None:
        """Start a command, or attach from offset 0 if the guest already knows the id."""
        await self._turn()
        if not spec.argv:
            raise InvalidArgument("the command has no program")
        self._sinks[spec.id] = sink
        self.guest.start(spec, sink)

    async def exec_attach(self, exec_id: str, offsets: tuple[int, int], sink: ExecSink) -> bool:
        """Continue receiving a known exec; ``False`` if the guest never heard of it."""
        await self._turn()
        exec_ = self.guest.execs.get(exec_id)
        if exec_ is None:
            return False
        self._sinks[exec_id] = sink
        exec_.attach(offsets, sink)
        return True

    def _running(self, exec_id: str) -> FakeExec:
        exec_ = self.guest.execs.get(exec_id)
        if exec_ is None or exec_.exit is not None:
            raise NotFound("the command has ended")
        return exec_

    async def exec_stdin(self, exec_id: str, data: bytes) -> None:
        """Write standard input; waits while the command does not read."""
        await self._turn()
        await self._feed(exec_id, data)

    async def exec_stdin_close(self, exec_id: str) -> None:
        """End standard input."""
        await self._turn()
        await self._feed(exec_id, None)

    async def _feed(self, exec_id: str, data: bytes | None) -> None:
        exec_ = self._running(exec_id)
        put = asyncio.ensure_future(exec_.stdin.put(data))
        closed = asyncio.ensure_future(self._closed.wait())
        over = asyncio.ensure_future(exec_.over.wait())
        try:
            await asyncio.wait({put, closed, over}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (put, closed, over):
                task.cancel()
        self._check()
        if not put.done() or put.cancelled():
            raise NotFound("the command has ended")

    async def exec_signal(self, exec_id: str, signal: int, *, tree: bool = False) -> None:  # noqa: ARG002
        """Send a signal; there are no trees here."""
        await self._turn()
        self._running(exec_id).hit(signal)

    async def exec_stop(self, exec_id: str, grace_ms: int) -> None:
        """TERM, then KILL after the grace; returns at once."""
        await self._turn()
        exec_ = self.guest.execs.get(exec_id)
        if exec_ is None:
            raise NotFound("there is no such command")
        exec_.stop(grace_ms)

    def exec_forget(self, exec_id: str) -> None:
        """The host has stored the result."""
        exec_ = self.guest.execs.get(exec_id)
        if exec_ is not None and not self._closed.is_set():
            exec_.forgotten = True
            if exec_.closed:
                del self.guest.execs[exec_id]

    async def exec_list(self) -> list[str]:
        """Return the ids of all execs that the guest holds."""
        await self._turn()
        return list(self.guest.execs)

    # -- files --

    def _file(self, path: bytes) -> tuple[bytes | None, int]:
        entry = self.guest.files.get(posixpath.normpath(path))
        if entry is None:
            raise NotFound(f"{path!r}: no such file or directory")
        return entry

    async def read_file(
        self,
        path: bytes,
        *,
        offset: int = 0,
        length: int | None = None,
        user: str = "0",  # noqa: ARG002
    ) -> AsyncIterator[bytes]:
        """Stream a regular file (a range of it)."""
        await self._turn()
        content, _ = self._file(path)
        if content is None:
            raise InvalidArgument(f"{path!r} is a directory")
        end = len(content) if length is None else min(len(content), offset + length)
        for at in range(offset, end, _CHUNK):
            yield content[at : min(at + _CHUNK, end)]
            await self._turn()

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
        """Write a regular file and return the bytes written."""
        await self._turn()
        path = posixpath.normpath(path)
        parent = posixpath.dirname(path)
        if parents:
            await self.mkdir(parent, parents=True, user=user)
        if self._file(parent)[0] is not None:
            raise InvalidArgument(f"{parent!r} is no directory")
        old, old_mode = self.guest.files.get(path, (b"", 0o644))
        if old is None:
            raise InvalidArgument(f"{path!r} is a directory")
        new = bytearray()
        async for chunk in data:
            new += chunk
        await self._turn()
        if append or offset is not None:
            at = len(old) if append or offset is None else offset
            whole = old[:at].ljust(at, b"\0") + new + old[at + len(new) :]
        else:
            whole = bytes(new)
        self.guest.files[path] = (whole, old_mode if mode is None else mode)
        return len(new)

    def _info(self, path: bytes, shown: bytes) -> FileInfo:
        content, mode = self._file(path)
        text = shown.decode("utf-8", "replace")
        raw = shown if text.encode() != shown else None
        kind = "file" if content is not None else "directory"
        return FileInfo(path=text, kind=kind, size=len(content or b""), mode=mode, path_raw=raw)  # type: ignore[arg-type]

    async def stat(self, path: bytes, *, user: str = "0") -> FileInfo:  # noqa: ARG002
        """Describe a path."""
        await self._turn()
        return self._info(path, path)

    def _below(self, path: bytes) -> list[bytes]:
        prefix = posixpath.normpath(path).rstrip(b"/") + b"/"
        return sorted(name for name in self.guest.files if name.startswith(prefix) and name != prefix)

    async def list_dir(
        self,
        path: bytes,
        *,
        recursive: bool = False,
        user: str = "0",  # noqa: ARG002
    ) -> AsyncIterator[FileInfo]:
        """List a directory, sorted by name."""
        await self._turn()
        if self._file(path)[0] is not None:
            raise InvalidArgument(f"{path!r} is no directory")
        top = posixpath.normpath(path)
        for name in self._below(top):
            if recursive or posixpath.dirname(name) == top:
                yield self._info(name, posixpath.relpath(name, top))

    async def mkdir(self, path: bytes, *, mode: int = 0o755, parents: bool = False, user: str = "0") -> None:
        """Make a directory; with ``parents`` also those above, and an existing one is fine."""
        await self._turn()
        path = posixpath.normpath(path)
        if path in self.guest.files:
            if parents and self.guest.files[path][0] is None:
                return
            raise Conflict(f"{path!r} exists")
        parent = posixpath.dirname(path)
        if parents:
            await self.mkdir(parent, parents=True, user=user)
        self._file(parent)
        self.guest.files[path] = (None, mode)

    async def remove(self, path: bytes, *, recursive: bool = False, user: str = "0") -> None:  # noqa: ARG002
        """Remove a file or an empty directory, or a tree."""
        await self._turn()
        self._file(path)
        below = self._below(path)
        if below and not recursive:
            raise Conflict(f"{path!r} is not empty")
        for name in [*below, posixpath.normpath(path)]:
            del self.guest.files[name]

    async def move(self, source: bytes, target: bytes, *, user: str = "0") -> None:  # noqa: ARG002
        """Rename."""
        await self._turn()
        source, target = posixpath.normpath(source), posixpath.normpath(target)
        self._file(source)
        self._file(posixpath.dirname(target))
        for name in [source, *self._below(source)]:
            self.guest.files[target + name[len(source) :]] = self.guest.files.pop(name)

    async def tar_out(self, path: bytes, *, user: str = "0") -> AsyncIterator[bytes]:  # noqa: ARG002
        """Stream a tree as tar, names relative to ``path``."""
        await self._turn()
        self._file(path)
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as tar:
            for name in self._below(path):
                content, mode = self.guest.files[name]
                member = tarfile.TarInfo(posixpath.relpath(name, path).decode("utf-8", "surrogateescape"))
                member.mode = mode
                member.size = len(content or b"")
                member.type = tarfile.REGTYPE if content is not None else tarfile.DIRTYPE
                tar.addfile(member, io.BytesIO(content or b""))
        yield buffer.getvalue()

    async def tar_in(self, path: bytes, data: AsyncIterator[bytes], *, user: str = "0") -> None:
        """Unpack a tar below ``path``."""
        await self._turn()
        whole = b"".join([chunk async for chunk in data])
        with tarfile.open(fileobj=io.BytesIO(whole)) as tar:
            for member in tar:
                name = member.name.encode("utf-8", "surrogateescape")
                if name.startswith(b"/") or b".." in name.split(b"/"):
                    raise InvalidArgument(f"member {member.name!r} leaves the target")
                target = posixpath.normpath(posixpath.join(path, name))
                await self.mkdir(posixpath.dirname(target), parents=True, user=user)
                if member.isdir():
                    await self.mkdir(target, parents=True, user=user)
                elif member.isfile():
                    file = tar.extractfile(member)
                    self.guest.files[target] = (file.read() if file else b"", member.mode)
