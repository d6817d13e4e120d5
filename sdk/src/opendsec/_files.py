"""Files of a sandbox. Paths are resolved inside the sandbox, never here; any bytes may be in a name."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import PurePath

import msgspec

from opendsec._core import Core, query
from opendsec.api.errors import NotFound, OutputLimit
from opendsec.api.models import FileInfo

#: A path in the sandbox. Names that are no UTF-8 are given as bytes (or as ``os.fsdecode`` makes them).
SandboxPath = str | bytes | PurePath

_FileInfos = list[FileInfo]
_info = msgspec.json.Decoder(FileInfo)


class Files:
    """File calls of one sandbox; ``sandbox.files``.

    Every call takes ``user``: on whose behalf, by name or id; default root. Errors of the file system come as
    ``NotFound``, ``PermissionDenied``, ``DiskFull``, ``Conflict`` or ``InvalidArgument``.
    """

    def __init__(self, core: Core, sandbox_id: str) -> None:
        self._core = core
        self._base = f"/v1/sandboxes/{sandbox_id}/files"

    async def read(
        self,
        path: SandboxPath,
        *,
        offset: int = 0,
        length: int | None = None,
        limit: int = 256 * 1024 * 1024,
        user: str | None = None,
    ) -> bytes:
        """Return the content of a regular file, or a range of it.

        Args:
            path: which.
            offset: first byte.
            length: most bytes; default all.
            limit: refuse to hold more bytes than this in memory; ``stream`` has no limit.
            user: on whose behalf.

        Raises:
            OutputLimit: the answer is larger than ``limit``.
            PlatformError: the file cannot be read.
        """
        parts = bytearray()
        async for chunk in self.stream(path, offset=offset, length=length, user=user):
            parts += chunk
            if len(parts) > limit:
                raise OutputLimit(f"the file has more than {limit} bytes; use stream()", limit=limit)
        return bytes(parts)

    async def read_text(self, path: SandboxPath, *, encoding: str = "utf-8", user: str | None = None) -> str:
        """Return the content of a text file.

        Raises:
            UnicodeDecodeError: it is not in this encoding.
            PlatformError: it cannot be read.
        """
        return (await self.read(path, user=user)).decode(encoding)

    async def stream(
        self, path: SandboxPath, *, offset: int = 0, length: int | None = None, user: str | None = None
    ) -> AsyncIterator[bytes]:
        """Iterate over the content of a regular file in pieces, with constant memory."""
        target = self._base + query(path=os.fsencode(path), offset=offset or None, length=length, user=user)
        async with self._core.transport.stream("GET", target) as stream:
            async for chunk in stream.chunks():
                yield chunk

    async def write(
        self,
        path: SandboxPath,
        data: bytes | str | AsyncIterator[bytes],
        *,
        mode: int | None = None,
        append: bool = False,
        offset: int | None = None,
        parents: bool = False,
        user: str | None = None,
    ) -> None:
        """Write a regular file. It is replaced at once when all is there; a cut upload leaves the old one.

        Args:
            path: which.
            data: content, or pieces of it.
            mode: permission bits such as ``0o755``; default the old file's or ``0o644``.
            append: add to the end instead (not repeated if the connection breaks).
            offset: overwrite from here instead.
            parents: make missing directories.
            user: on whose behalf.

        Raises:
            OutcomeUnknown: the connection broke in an upload that cannot be repeated.
            PlatformError: the file cannot be written.
        """
        target = self._base + query(
            path=os.fsencode(path),
            mode=None if mode is None else f"{mode:o}",
            append=append,
            offset=offset,
            parents=parents,
            user=user,
        )
        if isinstance(data, str):
            data = data.encode()
        if isinstance(data, bytes):
            await self._core.transport.call("PUT", target, data, idempotent=not append, idle=120.0)
            return
        await put_stream(self._core, target, data)

    async def write_text(
        self,
        path: SandboxPath,
        text: str,
        *,
        encoding: str = "utf-8",
        mode: int | None = None,
        parents: bool = False,
        user: str | None = None,
    ) -> None:
        """Write a text file; see ``write``."""
        await self.write(path, text.encode(encoding), mode=mode, parents=parents, user=user)

    async def stat(self, path: SandboxPath, *, user: str | None = None) -> FileInfo:
        """Describe a path; a symbolic link is not followed.

        Raises:
            NotFound: nothing is there.
        """
        target = f"{self._base}/stat{query(path=os.fsencode(path), user=user)}"
        return _info.decode(await self._core.transport.call("GET", target))

    async def exists(self, path: SandboxPath, *, user: str | None = None) -> bool:
        """Tell whether something (also a dangling link) is at a path."""
        try:
            await self.stat(path, user=user)
        except NotFound:
            # Or is it the sandbox that is not there?
            await self._core.transport.call("GET", self._base.removesuffix("/files"))
            return False
        return True

    async def list(self, path: SandboxPath, *, recursive: bool = False, user: str | None = None) -> _FileInfos:
        """List a directory, sorted by name; ``recursive`` does not cross symbolic links."""
        target = f"{self._base}/list{query(path=os.fsencode(path), recursive=recursive, user=user)}"
        async with self._core.transport.stream("GET", target) as stream:
            return [_info.decode(line) async for line in stream.lines()]

    async def mkdir(
        self, path: SandboxPath, *, mode: int = 0o755, parents: bool = False, user: str | None = None
    ) -> None:
        """Make a directory; with ``parents`` also those above, and an existing one is fine."""
        target = f"{self._base}/mkdir{query(path=os.fsencode(path), mode=f'{mode:o}', parents=parents, user=user)}"
        await self._core.transport.call("POST", target, idempotent=parents)

    async def remove(
        self, path: SandboxPath, *, recursive: bool = False, missing_ok: bool = False, user: str | None = None
    ) -> None:
        """Remove a file or an empty directory, with ``recursive`` a tree; links are not followed.

        Raises:
            NotFound: nothing was there and ``missing_ok`` is not set.
        """
        target = self._base + query(path=os.fsencode(path), recursive=recursive, user=user)
        try:
            await self._core.transport.call("DELETE", target, idempotent=missing_ok)
        except NotFound:
            if not missing_ok:
                raise

    async def move(self, source: SandboxPath, target: SandboxPath, *, user: str | None = None) -> None:
        """Rename, also across file systems; an existing file at the target is replaced."""
        where = f"{self._base}/move{query(source=os.fsencode(source), target=os.fsencode(target), user=user)}"
        await self._core.transport.call("POST", where, idempotent=False)


async def put_stream(core: Core, target: str, body: AsyncIterator[bytes]) -> bytes:
    """Send a body that cannot be sent twice and return the answer."""
    return await core.transport.upload("PUT", target, body, idle=600.0)
