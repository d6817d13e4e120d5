"""Images and their layers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path, PurePath
from typing import Literal, cast, get_args

import msgspec

from opendsec._core import Core, query
from opendsec._tar import pack
from opendsec._trees import in_thread
from opendsec.api.errors import ErrorBody, InvalidArgument, NotFound, OutcomeUnknown, from_body
from opendsec.api.models import DebianSource, Image, ImageConfig, ImportImage, Progress, TagImage

Kind = Literal["base", "workspace", "toolkit"]
Variant = Literal["minbase", "apt", "essential", "important"]
OnProgress = Callable[[Progress], None]

_Images = list[Image]
_images = msgspec.json.Decoder(_Images)
_image = msgspec.json.Decoder(Image)
_progress = msgspec.json.Decoder(Progress)
#: An import may work silently for long.
_IMPORT_IDLE = 1800.0


class Images:
    """Image calls; ``client.images``."""

    def __init__(self, core: Core) -> None:
        self._core = core

    async def list(self) -> _Images:
        """Return all tagged images."""
        return _images.decode(await self._core.transport.call("GET", "/v1/images"))

    async def resolve(self, reference: str) -> Image:
        """Return the image a reference points to now.

        Raises:
            ImageUnavailable: there is none.
        """
        return _image.decode(await self._core.transport.call("GET", "/v1/images/resolve" + query(reference=reference)))

    async def tag(self, source: str, target: str) -> Image:
        """Let ``target`` point to what ``source`` (a reference or a digest) points to."""
        body = msgspec.json.encode(TagImage(source=source, target=target))
        return _image.decode(await self._core.transport.call("POST", "/v1/images/tag", body))

    async def remove(self, reference: str) -> None:
        """Remove a tag; layers in use stay until nothing uses them.

        Raises:
            ImageUnavailable: there is no such tag.
        """
        await self._core.transport.call("DELETE", "/v1/images" + query(reference=reference), idle=120.0)

    async def import_folder(
        self,
        path: str | PurePath,
        reference: str,
        *,
        kind: Kind = "base",
        config: ImageConfig | None = None,
        on_progress: OnProgress | None = None,
    ) -> Image:
        """Make a layer of a folder on this machine, with owners, devices and extended attributes as far as readable.

        Args:
            path: root of the layer.
            reference: name it gets.
            kind: what the layer is.
            config: environment, user and directory of commands.
            on_progress: called with every message.

        Raises:
            PlatformError: the folder or the reference is not usable, or the platform failed.
        """
        root = Path(path)
        if not await asyncio.to_thread(root.is_dir):
            raise NotFound(f"{root} is not a directory on this machine", path=str(root))
        return await self._put(in_thread(pack(root, complete=True)), None, reference, kind, config, on_progress)

    async def import_tar(
        self,
        path: str | PurePath,
        reference: str,
        *,
        kind: Kind = "base",
        config: ImageConfig | None = None,
        on_progress: OnProgress | None = None,
    ) -> Image:
        """Make a layer of a tar on this machine (plain, gzip or zstd); else like ``import_folder``."""
        file = Path(path)
        if not await asyncio.to_thread(file.is_file):
            raise NotFound(f"{file} is not a file on this machine", path=str(file))
        size = (await asyncio.to_thread(file.stat)).st_size
        return await self._put(_read(file), size, reference, kind, config, on_progress)

    async def import_debian(
        self,
        reference: str,
        *,
        suite: str = "bookworm",
        packages: Sequence[str] = (),
        variant: Variant = "minbase",
        kind: Kind = "base",
        config: ImageConfig | None = None,
        on_progress: OnProgress | None = None,
    ) -> Image:
        """Let the node build a layer from Debian packages.

        Args:
            reference: name it gets.
            suite: Debian suite.
            packages: added to those of the variant.
            variant: mmdebstrap's.
            kind: what the layer is.
            config: environment, user and directory of commands.
            on_progress: called with every message.

        Raises:
            PlatformError: a package does not exist, say; the message has the last lines of the build.
        """
        source = DebianSource(suite=suite, packages=list(packages), variant=variant)
        body = msgspec.json.encode(ImportImage(reference=reference, kind=kind, debian=source, config=config))
        image: Image | None = None
        async with self._core.transport.stream("POST", "/v1/images", body, idle=_IMPORT_IDLE) as stream:
            async for line in stream.lines():
                image = _step(line, on_progress) or image
        return _made(image)

    async def _put(  # noqa: PLR0917
        self,
        pieces: AsyncIterator[bytes],
        size: int | None,
        reference: str,
        kind: Kind,
        config: ImageConfig | None,
        on_progress: OnProgress | None,
    ) -> Image:
        encoded = None if config is None else msgspec.json.encode(config)
        target = "/v1/images" + query(reference=reference, kind=kind, config=encoded)
        body = _counted(pieces, size, on_progress)
        answer = await self._core.transport.upload("PUT", target, body, idle=_IMPORT_IDLE)
        image: Image | None = None
        for line in answer.splitlines():
            image = _step(line, on_progress) or image
        return _made(image)


def _step(line: bytes, on_progress: OnProgress | None) -> Image | None:
    progress = _progress.decode(line)
    if progress.error is not None:
        raise from_body(_error(progress.error))
    if on_progress is not None:
        on_progress(progress)
    return progress.image


def _made(image: Image | None) -> Image:
    if image is None:
        raise OutcomeUnknown("the import ended without an answer")
    return image


def _error(raw: object) -> ErrorBody:
    try:
        return msgspec.convert(raw, ErrorBody)
    except msgspec.ValidationError:
        return ErrorBody(code="internal", message="the import failed", retryable=False, is_infra=True)


async def _counted(
    pieces: AsyncIterator[bytes], size: int | None, on_progress: OnProgress | None
) -> AsyncIterator[bytes]:
    sent = told = 0
    async for piece in pieces:
        yield piece
        sent += len(piece)
        if on_progress is not None and sent - told >= 4 * 1024 * 1024:
            told = sent
            fraction = None if not size else min(1.0, sent / size)
            on_progress(Progress(message=f"sent {sent // 1024 // 1024} MiB", fraction=fraction))


async def _read(path: Path) -> AsyncIterator[bytes]:
    with await asyncio.to_thread(path.open, "rb", 0) as file:
        while piece := await asyncio.to_thread(file.read, 1024 * 1024):
            yield piece


def check_kind(kind: str) -> Kind:
    """Return ``kind`` if layers of it can be imported.

    Raises:
        InvalidArgument: it is no kind.
    """
    if kind in get_args(Kind):
        return cast("Kind", kind)
    raise InvalidArgument(f"{kind!r} is no kind of layer: use base, workspace or toolkit")
