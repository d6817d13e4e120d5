"""The edge's HTTP API for files of a sandbox: paths are bytes, contents stream both ways."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any
from urllib.parse import unquote_to_bytes

import msgspec
from litestar import Request, Response, delete, get, post, put
from litestar.handlers import BaseRouteHandler
from litestar.status_codes import HTTP_200_OK, HTTP_204_NO_CONTENT

from opendsec.api import models
from opendsec.api.errors import InvalidArgument
from opendsec_server.edge.service import EdgeService
from opendsec_server.platform.http import NDJSON, OCTETS, StreamAnswer

_encode = msgspec.json.Encoder().encode
#: The request, untyped where litestar's own generics say nothing more.
Req = Request[Any, Any, Any]


def _line(value: Any) -> bytes:
    return _encode(value) + b"\n"


def path_of(request: Req, name: str = "path") -> bytes:
    """Return a path parameter as the bytes that were percent-encoded.

    Raises:
        InvalidArgument: absent, relative, or with a NUL byte.
    """
    path: bytes | None = None
    for part in bytes(request.scope["query_string"]).split(b"&"):
        key, _, value = part.partition(b"=")
        if key == name.encode():
            # A plus sign is itself: names are bytes, not form fields.
            path = unquote_to_bytes(value)
    if path is None:
        raise InvalidArgument(f"{name} is missing", field=name)
    if not path.startswith(b"/") or b"\0" in path:
        raise InvalidArgument(f"{name} must be an absolute path without NUL bytes", field=name)
    return path


def _mode(text: str | None, default: int | None = None) -> int | None:
    if text is None:
        return default
    try:
        mode = int(text, 8)
    except ValueError:
        raise InvalidArgument("mode must be octal digits such as 755", field="mode") from None
    if not 0 <= mode <= 0o7777:
        raise InvalidArgument("mode must be between 0 and 7777", field="mode")
    return mode


_FILES = "/v1/sandboxes/{sandbox_id:str}/files"


async def _limited(request: Req) -> AsyncIterator[bytes]:
    async for piece in request.stream():
        if piece:
            yield piece


@get(_FILES, tags=["files"])
async def read_file(
    request: Req,
    sandbox_id: str,
    service: EdgeService,
    path: str,
    offset: int = 0,
    length: int | None = None,
    user: str = "0",
) -> Response[bytes]:
    """Stream a regular file or a range of it."""
    life, name = service.life(sandbox_id), path_of(request)
    if offset < 0 or (length is not None and length < 0):
        raise InvalidArgument("offset and length must not be negative")

    async def pieces() -> AsyncGenerator[bytes, None]:
        with life.use():
            channel = await life.wait_channel()
            async for piece in channel.read_file(name, offset=offset, length=length, user=user):
                yield piece

    return StreamAnswer(pieces(), OCTETS)


@put(_FILES, status_code=HTTP_200_OK, tags=["files"], request_max_body_size=None)
async def write_file(
    request: Req,
    sandbox_id: str,
    service: EdgeService,
    path: str,
    mode: str | None = None,
    offset: int | None = None,
    append: bool = False,
    parents: bool = False,
    user: str = "0",
) -> dict[str, int]:
    """Write the body to a regular file: atomically anew, at an offset, or at its end."""
    life, name = service.life(sandbox_id), path_of(request)
    with life.use():
        channel = await life.wait_channel()
        written = await channel.write_file(
            name, _limited(request), mode=_mode(mode), offset=offset, append=append, parents=parents, user=user
        )
    return {"written": written}


@delete(_FILES, status_code=HTTP_204_NO_CONTENT, tags=["files"])
async def remove_file(
    request: Req,
    sandbox_id: str,
    service: EdgeService,
    path: str,
    recursive: bool = False,
    user: str = "0",
) -> None:
    """Remove a file, an empty directory, or with ``recursive`` a tree."""
    life, name = service.life(sandbox_id), path_of(request)
    with life.use():
        await (await life.wait_channel()).remove(name, recursive=recursive, user=user)


@get(f"{_FILES}/stat", tags=["files"])
async def stat_file(
    request: Req,
    sandbox_id: str,
    service: EdgeService,
    path: str,
    user: str = "0",
) -> models.FileInfo:
    """Describe a path without following a last symbolic link."""
    life, name = service.life(sandbox_id), path_of(request)
    with life.use():
        return await (await life.wait_channel()).stat(name, user=user)


@get(f"{_FILES}/list", tags=["files"])
async def list_files(
    request: Req,
    sandbox_id: str,
    service: EdgeService,
    path: str,
    recursive: bool = False,
    user: str = "0",
) -> Response[bytes]:
    """List a directory as lines of ``FileInfo``."""
    life, name = service.life(sandbox_id), path_of(request)

    async def lines() -> AsyncGenerator[bytes, None]:
        with life.use():
            channel = await life.wait_channel()
            async for info in channel.list_dir(name, recursive=recursive, user=user):
                yield _line(info)

    return StreamAnswer(lines(), NDJSON)


@post(f"{_FILES}/mkdir", status_code=HTTP_204_NO_CONTENT, tags=["files"])
async def make_directory(
    request: Req,
    sandbox_id: str,
    service: EdgeService,
    path: str,
    mode: str | None = None,
    parents: bool = False,
    user: str = "0",
) -> None:
    """Make a directory, with ``parents`` also those above it."""
    life, name = service.life(sandbox_id), path_of(request)
    with life.use():
        channel = await life.wait_channel()
        await channel.mkdir(name, mode=_mode(mode, 0o755) or 0, parents=parents, user=user)


@post(f"{_FILES}/move", status_code=HTTP_204_NO_CONTENT, tags=["files"])
async def move_file(
    request: Req,
    sandbox_id: str,
    service: EdgeService,
    source: str,
    target: str,
    user: str = "0",
) -> None:
    """Rename a file or a tree."""
    life, old, new = service.life(sandbox_id), path_of(request, "source"), path_of(request, "target")
    with life.use():
        await (await life.wait_channel()).move(old, new, user=user)


@get("/v1/sandboxes/{sandbox_id:str}/archive", tags=["files"])
async def read_archive(
    request: Req,
    sandbox_id: str,
    service: EdgeService,
    path: str,
    user: str = "0",
) -> Response[bytes]:
    """Stream a tree as tar, names relative to ``path``."""
    life, name = service.life(sandbox_id), path_of(request)

    async def pieces() -> AsyncGenerator[bytes, None]:
        with life.use():
            channel = await life.wait_channel()
            async for piece in channel.tar_out(name, user=user):
                yield piece

    return StreamAnswer(pieces(), "application/x-tar")


@put(
    "/v1/sandboxes/{sandbox_id:str}/archive",
    status_code=HTTP_204_NO_CONTENT,
    tags=["files"],
    request_max_body_size=None,
)
async def write_archive(
    request: Req,
    sandbox_id: str,
    service: EdgeService,
    path: str,
    user: str = "0",
) -> None:
    """Unpack a tar below ``path``; members that would leave it are refused."""
    life, name = service.life(sandbox_id), path_of(request)
    with life.use():
        await (await life.wait_channel()).tar_in(name, _limited(request), user=user)


FILE_HANDLERS: Sequence[BaseRouteHandler] = (
    read_file,
    write_file,
    remove_file,
    stat_file,
    list_files,
    make_directory,
    move_file,
    read_archive,
    write_archive,
)
