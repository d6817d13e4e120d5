"""Files and trees between this machine and a sandbox, streamed with constant memory."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path, PurePosixPath

import msgspec

from opendsec._core import Core, query
from opendsec._files import Files, SandboxPath, put_stream
from opendsec._tar import Unpacker, pack
from opendsec.api.errors import InvalidArgument, NotFound, OutputLimit

_PIECE = 256 * 1024


class Transfer(msgspec.Struct, kw_only=True, frozen=True):
    """What a download did.

    Attributes:
        files: files and links written.
        bytes: bytes of all files.
        skipped: names that were passed over because they were not safe to unpack.
    """

    files: int = 0
    bytes: int = 0
    skipped: list[str] = []


async def upload(
    core: Core, files: Files, sandbox_id: str, local: Path, remote: SandboxPath, *, user: str | None
) -> None:
    """Send a file, or the content of a directory."""
    kind = await asyncio.to_thread(_kind, local)
    if kind == "file":
        mode = (await asyncio.to_thread(local.stat)).st_mode & 0o777
        await files.write(remote, in_thread(_pieces(local)), mode=mode, parents=True, user=user)
    elif kind == "directory":
        await files.mkdir(remote, parents=True, user=user)
        target = f"/v1/sandboxes/{sandbox_id}/archive{query(path=os.fsencode(remote), user=user)}"
        await put_stream(core, target, in_thread(pack(local)))
    else:
        raise InvalidArgument(f"{local} is neither a file nor a directory")


async def download(
    core: Core,
    files: Files,
    sandbox_id: str,
    remote: SandboxPath,
    local: Path,
    *,
    user: str | None,
    skip_unsafe: bool,
    limit_bytes: int,
) -> Transfer:
    """Fetch a file, or the content of a directory."""
    info = await files.stat(remote, user=user)
    if info.kind == "directory":
        target = f"/v1/sandboxes/{sandbox_id}/archive{query(path=os.fsencode(remote), user=user)}"
        return await _fetch_tree(core, target, local, skip_unsafe=skip_unsafe, limit_bytes=limit_bytes)
    if await asyncio.to_thread(local.is_dir):
        local = local / PurePosixPath(os.fsdecode(remote)).name
    return await _fetch_file(files.stream(remote, user=user), local, info.mode & 0o777, limit_bytes)


async def _fetch_tree(core: Core, target: str, local: Path, *, skip_unsafe: bool, limit_bytes: int) -> Transfer:
    """Unpack beside the target and rename at the end; into an existing directory unpack at once."""
    fresh = not await asyncio.to_thread(os.path.lexists, local)
    place = local.with_name(f".{local.name}.{secrets.token_hex(4)}.part") if fresh else local
    unpacker: Unpacker | None = None
    try:
        if fresh:
            await asyncio.to_thread(place.mkdir, parents=True)
        unpacker = Unpacker(place, skip_unsafe=skip_unsafe, limit_bytes=limit_bytes)
        async with core.transport.stream("GET", target) as stream:
            async for batch in _batched(stream.chunks()):
                await asyncio.to_thread(unpacker.feed, batch)
        await asyncio.to_thread(unpacker.finish)
        if fresh:
            await asyncio.to_thread(place.rename, local)
    except BaseException:
        if fresh:
            await asyncio.shield(asyncio.to_thread(shutil.rmtree, place, ignore_errors=True))
        raise
    finally:
        if unpacker is not None:
            unpacker.close()
    return Transfer(files=unpacker.files, bytes=unpacker.bytes, skipped=unpacker.skipped)


async def _fetch_file(chunks: AsyncIterator[bytes], local: Path, mode: int, limit_bytes: int) -> Transfer:
    part = local.with_name(f".{local.name}.{secrets.token_hex(4)}.part")
    size = 0
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    file = os.fdopen(await asyncio.to_thread(os.open, part, flags, 0o600), "wb")
    try:
        with file:
            async for batch in _batched(chunks):
                size += len(batch)
                if size > limit_bytes:
                    raise OutputLimit(f"the file has more than {limit_bytes} bytes", limit=limit_bytes)  # noqa: TRY301
                await asyncio.to_thread(file.write, batch)
            os.fchmod(file.fileno(), mode)
        await asyncio.to_thread(part.replace, local)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise
    return Transfer(files=1, bytes=size)


async def in_thread(pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
    """Iterate over pieces that are made in a worker thread."""
    try:
        while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
            yield piece
    finally:
        with contextlib.suppress(ValueError):  # still running in its thread, which ends it
            getattr(pieces, "close", lambda: None)()


async def _batched(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Join small pieces, so that a thread is worth its price."""
    parts = bytearray()
    async for chunk in chunks:
        parts += chunk
        if len(parts) >= _PIECE:
            yield bytes(parts)
            parts.clear()
    if parts:
        yield bytes(parts)


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb", buffering=0) as file:
        while piece := file.read(_PIECE):
            yield piece


def _kind(path: Path) -> str:
    if path.is_dir():
        return "directory"
    if path.is_file():
        return "file"
    if not path.exists():
        raise NotFound(f"{path} does not exist on this machine", path=str(path))
    return "other"
