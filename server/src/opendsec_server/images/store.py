"""Layers and tags in the node's data folder.

Layout of ``<data_dir>/images`` (staging and locks are ``storage.local``'s)::

    layers/<hex>/layer.erofs, manifest.json     published by one rename, never changed
    tags/<name>:<tag>                           "1 blake3:<hex>", replaced by one rename; "/" in names is "%2F"

``resolve`` and ``compose`` are on the path of every create: they cost a tag read and a stat for each layer and
decode no manifest twice.
"""

from __future__ import annotations

import asyncio
import builtins
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from opendsec.api import ids
from opendsec.api.errors import Conflict, ImageUnavailable, InvalidArgument
from opendsec.api.models import DebianSource, Image, ImageConfig, Layer
from opendsec_server.images import manifest as manifests
from opendsec_server.images.composition import DEFAULT_BASE_CONFIG, check_config, compose_layers
from opendsec_server.images.debian import build_debian
from opendsec_server.images.erofs import build_erofs, inspect_tree
from opendsec_server.images.interface import Environment, ProgressReport
from opendsec_server.images.manifest import Content, Kind, Manifest, check_kind, hash_file
from opendsec_server.images.steps import finish
from opendsec_server.images.streams import PulledStream
from opendsec_server.images.unpack import Unpacker
from opendsec_server.linux.mounts import mountinfo
from opendsec_server.storage.local import LocalFolder, Stage, disk_full_mapped, remove_tree

_TAG_FORMAT = "1"
_PREFIX = "blake3:"
T = TypeVar("T")


class Dropper(Protocol):
    """What the store asks of the layer mounts before it removes a layer."""

    def drop(self, digest: str) -> None:
        """Unmount, or raise ``Conflict``."""


class LocalImageStore:
    """The image store of one node. Making one creates its folders; ``open`` clears what a crash left.

    Args:
        data_dir: the node's data folder.
        mounts: told before a layer is removed; may refuse with ``Conflict``.
        min_free_bytes: imports stop with ``DiskFull`` before the disk has less than this.
        build_env: further environment of Debian builds, such as ``http_proxy``.
    """

    def __init__(
        self,
        data_dir: Path,
        *,
        mounts: Dropper | None = None,
        min_free_bytes: int = 256 * 1024 * 1024,
        build_env: dict[str, str] | None = None,
    ) -> None:
        self._folder = LocalFolder((data_dir / "images").absolute(), ("layers", "tags"))
        #: Told before a layer is removed; may be set later, as the mounts themselves need ``layer_path``.
        self.mounts = mounts
        self._min_free = min_free_bytes
        self._build_env = build_env or {}
        self._layers = str(self._folder.root / "layers")
        self._tags = str(self._folder.root / "tags")
        self._cache: dict[str, tuple[int, int, Layer]] = {}
        self._pool = ThreadPoolExecutor(8, thread_name_prefix="images")

    def open(self) -> None:
        """Remove half-made layers that no live process is making. Blocking."""
        self._folder.sweep()

    def close(self) -> None:
        """Let the worker threads go; call it when no import is under way."""
        self._pool.shutdown()

    # -- look-ups: synchronous and fast ---------------------------------------------------------------------------

    def resolve(self, reference: str) -> Image:
        """Find what a reference points to.

        Raises:
            ImageUnavailable: no such tag or digest, a damaged layer or one of an unknown format.
            InvalidArgument: malformed reference.
        """
        name, tag, digest = ids.parse_reference(reference)
        if digest is not None:
            return Image(reference=reference, layer=self._layer(digest))
        shown = f"{name}:{tag}"
        digest = self._read_tag(shown)
        if digest is None:
            raise ImageUnavailable(f"there is no image {shown}", reference=shown)
        return Image(reference=shown, layer=self._layer(digest))

    def compose(self, base: str, workspace: str | None, toolkits: Sequence[str]) -> Environment:
        """Resolve and merge (rules: ``images.composition``).

        Raises:
            ImageUnavailable: a layer is missing.
            InvalidArgument: layers that do not fit together.
            UnsupportedCapability: the layers are for another architecture.
        """
        return compose_layers(
            self.resolve(base),
            self.resolve(workspace) if workspace is not None else None,
            [self.resolve(toolkit) for toolkit in toolkits],
        )

    def list(self) -> list[Image]:
        """Return all tags, sorted; a tag whose layer is missing or damaged is left out (``resolve`` tells why)."""
        images = []
        for file in os.listdir(self._tags):  # noqa: PTH208 - a plain listing
            with suppress(ImageUnavailable):
                images.append(self.resolve(file.replace("%2F", "/")))
        return sorted(images, key=lambda image: image.reference)

    def layers(self) -> builtins.list[str]:
        """Return the digests of all layers, tagged or not, sorted."""
        return sorted(_PREFIX + name for name in os.listdir(self._layers))  # noqa: PTH208 - a plain listing

    def layer_path(self, digest: str) -> Path:
        """Return the EROFS image of a layer.

        Raises:
            ImageUnavailable: it is not in the store, or damaged.
        """
        self._layer(digest)
        return Path(self._layers, digest.removeprefix(_PREFIX), manifests.IMAGE_NAME)

    def _layer(self, digest: str) -> Layer:
        folder = f"{self._layers}/{digest.removeprefix(_PREFIX)}"
        try:
            info = os.stat(f"{folder}/{manifests.MANIFEST_NAME}")  # noqa: PTH116 - on the path of every create
        except OSError:
            self._cache.pop(digest, None)
        else:
            cached = self._cache.get(digest)
            if cached is not None and cached[:2] == (info.st_mtime_ns, info.st_ino):
                return cached[2]
        layer = manifests.read_manifest(Path(folder), digest).layer()
        self._cache[digest] = (info.st_mtime_ns, info.st_ino, layer)
        return layer

    def _tag_file(self, shown: str) -> str:
        file = shown.replace("/", "%2F")
        if len(file) > 250:
            raise InvalidArgument(f"the reference {shown[:80]!r}… is too long")
        return f"{self._tags}/{file}"

    def _read_tag(self, shown: str) -> str | None:
        try:
            fd = os.open(self._tag_file(shown), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            text = os.read(fd, 200).decode(errors="replace")
        finally:
            os.close(fd)
        version, _, digest = text.strip().partition(" ")
        if version != _TAG_FORMAT:
            raise ImageUnavailable(
                f"the tag {shown} has format {version[:20]!r}, but this version of opendsec reads {_TAG_FORMAT} only"
            )
        return digest

    # -- changes of tags ------------------------------------------------------------------------------------------

    def tag(self, source: str, target: str) -> Image:
        """Point ``target`` at what ``source`` points to, atomically.

        Raises:
            ImageUnavailable: ``source`` does not exist.
            InvalidArgument: ``target`` is no ``name:tag``.
            DiskFull: no room.
        """
        shown = _tag_name(target)
        with self._folder.locked():
            layer = self.resolve(source).layer
            self._write_tag(shown, layer.digest)
        return Image(reference=shown, layer=layer)

    def _write_tag(self, shown: str, digest: str) -> None:
        """Write a tag; the lock is held."""
        final = self._tag_file(shown)
        with disk_full_mapped("the image store"):
            stage = self._folder.root / "tag.new"
            stage.write_text(f"{_TAG_FORMAT} {digest}\n")
            stage.rename(final)

    def remove(self, reference: str, *, in_use: Callable[[str], bool]) -> None:
        """Remove a tag, and its layer when nothing else points to it. A digest removes an untagged layer.

        Raises:
            Conflict: a live sandbox uses the layer (then the tag stays too), or a digest is still tagged.
            ImageUnavailable: no such tag or digest.
            InvalidArgument: malformed reference.
        """
        name, tag, digest = ids.parse_reference(reference)
        shown = reference if digest is not None else f"{name}:{tag}"
        grave = None
        with self._folder.locked():
            by_tag = digest is None
            digest = digest or self._read_tag(shown)
            known = digest is not None and Path(self._layers, digest.removeprefix(_PREFIX)).exists()
            if digest is None or not (by_tag or known):
                raise ImageUnavailable(f"there is no image {shown}", reference=shown)
            others = [other for other in self._tags_of(digest) if other != shown]
            if others and not by_tag:
                raise Conflict(f"{shown} is still tagged {', '.join(others)}", tags=others)
            if not others and known:
                if in_use(digest):
                    raise Conflict(f"{shown} is in use by a live sandbox", digest=digest)
                if self.mounts is not None:
                    self.mounts.drop(digest)
            if by_tag:
                Path(self._tag_file(shown)).unlink()
            if not others:
                self._cache.pop(digest, None)
                grave = self._folder.retire("layers", digest.removeprefix(_PREFIX))
        if grave is not None:
            remove_tree(grave)

    def _tags_of(self, digest: str) -> builtins.list[str]:
        shown = [file.replace("%2F", "/") for file in os.listdir(self._tags)]  # noqa: PTH208 - a plain listing
        found = []
        for name in shown:
            with suppress(ImageUnavailable):  # a tag of another format
                if self._read_tag(name) == digest:
                    found.append(name)
        return sorted(found)

    # -- imports --------------------------------------------------------------------------------------------------

    async def import_tar(
        self,
        reference: str,
        data: AsyncIterator[bytes],
        *,
        kind: str,
        config: ImageConfig | None,
        report: ProgressReport,
    ) -> Image:
        """Make a layer of a tar stream (plain, gzip, zstd, xz, bzip2) and tag it.

        Raises:
            InvalidArgument: a damaged or unsafe tar (the message names the member), or malformed arguments.
            DiskFull: no room.
        """
        plan = _Plan.check(reference, kind, config)
        loop = asyncio.get_running_loop()
        stream = PulledStream(data, loop)
        async with self._stage() as stage:
            root = stage.path / "root"
            root.mkdir()

            def say(message: str) -> None:
                loop.call_soon_threadsafe(report, message, None)

            unpacker = Unpacker(stream, root, reserve_bytes=self._min_free, report=say)
            report("unpacking the tar", 0.0)
            try:
                await finish(self._thread(unpacker.run), stream.abort)
            except Exception as error:
                if stream.failure is not None and stream.failure is not error:
                    raise stream.failure from error
                raise
            return await self._seal(stage, root, plan, report)

    async def import_folder(
        self, reference: str, root: Path, *, kind: str, config: ImageConfig | None, report: ProgressReport
    ) -> Image:
        """Make a layer of a root folder and tag it. Nothing may change the folder meanwhile.

        Raises:
            InvalidArgument: no such folder, mounts below it, or malformed arguments.
            DiskFull: no room.
        """
        plan = _Plan.check(reference, kind, config)
        folder = await finish(self._thread(self._check_folder, root))
        async with self._stage() as stage:
            return await self._seal(stage, folder, plan, report)

    async def import_debian(
        self,
        reference: str,
        source: DebianSource,
        *,
        kind: str,
        config: ImageConfig | None,
        report: ProgressReport,
    ) -> Image:
        """Build a Debian root with mmdebstrap from the host's own package sources, make a layer of it and tag it.

        Raises:
            InvalidArgument: malformed suite or package name, or one that does not exist.
            UnsupportedCapability: mmdebstrap or mkfs.erofs is not installed.
            Unavailable: the build failed; ``detail`` has the step and the last lines of the log.
            DiskFull: no room.
        """
        plan = _Plan.check(reference, kind, config)
        async with self._stage() as stage:
            root = await build_debian(
                stage.path, source, env=self._build_env, report=report, thread=lambda work: finish(self._thread(work))
            )
            return await self._seal(stage, root, plan, report)

    async def _seal(self, stage: Stage, root: Path, plan: _Plan, report: ProgressReport) -> Image:
        """Turn a root folder into a published, tagged layer."""
        report("looking at the files", 0.6)
        facts = await finish(self._thread(inspect_tree, root))
        report("building the layer image", 0.7)
        folder = stage.path / "layer"
        folder.mkdir(mode=0o755)
        image = folder / manifests.IMAGE_NAME
        await build_erofs(root, image, holes=facts.holes)
        report("computing the digest", 0.9)
        blob = await finish(self._thread(hash_file, image))
        content = Content(format=manifests.FORMAT, kind=plan.kind, config=plan.config, image=blob)
        made = Manifest(
            format=manifests.FORMAT,
            digest=content.digest(),
            content=content,
            created_at=time.time(),
            architecture=facts.architecture,
        )
        layer = await finish(self._thread(self._publish, folder, made, plan.reference))
        report(f"{plan.reference} is {layer.digest}", 1.0)
        return Image(reference=plan.reference, layer=layer)

    def _publish(self, folder: Path, made: Manifest, shown: str) -> Layer:
        name = made.digest.removeprefix(_PREFIX)
        grave = None
        with disk_full_mapped("the image store"), self._folder.locked():
            manifests.write_manifest(folder, made)
            (folder / manifests.IMAGE_NAME).chmod(0o444)
            if not self._folder.publish(folder, "layers", name):
                try:
                    self._layer(made.digest)
                except ImageUnavailable:  # what is there is damaged: ours takes its place
                    grave = self._folder.retire("layers", name)
                    self._folder.publish(folder, "layers", name)
            self._write_tag(shown, made.digest)
            layer = self._layer(made.digest)
        if grave is not None:
            remove_tree(grave)
        return layer

    @asynccontextmanager
    async def _stage(self) -> AsyncIterator[Stage]:
        stage = await finish(self._thread(self._folder.open_stage))
        try:
            yield stage
        finally:
            await finish(self._thread(stage.close))

    async def _thread(self, work: Callable[..., T], *args: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work, *args)

    def _check_folder(self, root: Path) -> Path:
        try:
            folder = root.resolve(strict=True)
        except OSError as error:
            raise InvalidArgument(f"cannot import {root}: {error.strerror}") from error
        if not root.is_absolute() or not folder.is_dir():
            raise InvalidArgument(f"cannot import {root}: it is not an absolute path of a folder")
        if self._folder.root.resolve().is_relative_to(folder):
            raise InvalidArgument(f"cannot import {root}: it contains the image store")
        inside = next((m.target for m in mountinfo() if Path(m.target) != folder and _below(m.target, folder)), None)
        if inside is not None:
            raise InvalidArgument(f"cannot import {root}: {inside} is mounted below it")
        return folder


def _below(path: str, folder: Path) -> bool:
    return Path(path).is_relative_to(folder)


def _tag_name(reference: str) -> str:
    name, tag, digest = ids.parse_reference(reference)
    if digest is not None:
        raise InvalidArgument(f"{reference[:80]!r} names content: give a name:tag")
    return f"{name}:{tag}"


class _Plan(msgspec.Struct, frozen=True):
    """Checked arguments of an import."""

    reference: str
    kind: Kind
    config: ImageConfig

    @classmethod
    def check(cls, reference: str, kind: str, config: ImageConfig | None) -> _Plan:
        known = check_kind(kind)
        if config is None:
            config = DEFAULT_BASE_CONFIG if known == "base" else ImageConfig()
        check_config(config)
        return cls(_tag_name(reference), known, config)
