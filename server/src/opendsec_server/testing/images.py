"""In-memory twins of the image store and the layer mounts, held to the same contract tests as the real ones."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import msgspec
from blake3 import blake3

from opendsec.api import ids
from opendsec.api.errors import Conflict, ImageUnavailable, InvalidArgument, PlatformError
from opendsec.api.models import DebianSource, Image, ImageConfig, Layer
from opendsec_server.images.composition import DEFAULT_BASE_CONFIG, check_config, compose_layers
from opendsec_server.images.interface import Environment, ProgressReport
from opendsec_server.images.manifest import KINDS, check_kind


class FakeImageStore:
    """Images that exist by name only.

    ``add`` makes one at once. Importers take what they are given, unpack nothing and are deterministic.
    ``fail_imports`` is raised by the next imports if set.
    """

    def __init__(self, root: Path = Path("/nonexistent/images")) -> None:
        self.root = root
        self.fail_imports: PlatformError | None = None
        self._layers: dict[str, Layer] = {}
        self._tags: dict[str, str] = {}

    def add(
        self,
        reference: str,
        kind: str = "base",
        config: ImageConfig | None = None,
        *,
        content: bytes | None = None,
        architecture: str | None = None,
    ) -> Image:
        """Put an image there; without ``content`` the reference itself stands for it."""
        name = _tag_name(reference)
        if kind not in KINDS:
            raise InvalidArgument(f"{kind!r} is no kind of layer")
        config = config or (DEFAULT_BASE_CONFIG if kind == "base" else ImageConfig())
        data = content if content is not None else name.encode()
        digest = f"blake3:{blake3(kind.encode() + msgspec.json.encode(config, order='sorted') + data).hexdigest()}"
        layer = Layer(
            digest=digest,
            kind=kind,
            size=len(data),
            created_at=time.time(),
            config=config,
            architecture=architecture or os.uname().machine,
        )
        self._layers.setdefault(digest, layer)
        self._tags[name] = digest
        return Image(reference=name, layer=self._layers[digest])

    def resolve(self, reference: str) -> Image:
        """Find an image."""
        name, tag, digest = ids.parse_reference(reference)
        shown = reference if digest else f"{name}:{tag}"
        found = self._layers.get(digest or self._tags.get(shown, ""))
        if found is None:
            raise ImageUnavailable(f"there is no image {shown}", reference=shown)
        return Image(reference=shown, layer=found)

    def compose(self, base: str, workspace: str | None, toolkits: Sequence[str]) -> Environment:
        """Resolve and merge."""
        return compose_layers(
            self.resolve(base),
            self.resolve(workspace) if workspace is not None else None,
            [self.resolve(toolkit) for toolkit in toolkits],
        )

    async def import_tar(
        self,
        reference: str,
        data: AsyncIterator[bytes],
        *,
        kind: str,
        config: ImageConfig | None,
        report: ProgressReport,
    ) -> Image:
        """Take the bytes for the content."""
        content = b"".join([chunk async for chunk in data])
        if not content:
            raise InvalidArgument("the tar is empty")
        return self._import(reference, content, kind, config, report)

    async def import_folder(
        self, reference: str, root: Path, *, kind: str, config: ImageConfig | None, report: ProgressReport
    ) -> Image:
        """Take the folder's name for the content."""
        return self._import(reference, os.fsencode(root), kind, config, report)

    async def import_debian(
        self,
        reference: str,
        source: DebianSource,
        *,
        kind: str,
        config: ImageConfig | None,
        report: ProgressReport,
    ) -> Image:
        """Take the request for the content."""
        return self._import(reference, msgspec.json.encode(source), kind, config, report)

    def _import(
        self, reference: str, content: bytes, kind: str, config: ImageConfig | None, report: ProgressReport
    ) -> Image:
        check_kind(kind)
        check_config(config or ImageConfig())
        _tag_name(reference)
        report("importing", 0.0)
        if self.fail_imports is not None:
            raise self.fail_imports
        image = self.add(reference, kind, config, content=content)
        report("done", 1.0)
        return image

    def list(self) -> list[Image]:
        """Return all tags, sorted."""
        return [Image(reference=name, layer=self._layers[digest]) for name, digest in sorted(self._tags.items())]

    def tag(self, source: str, target: str) -> Image:
        """Tag."""
        name = _tag_name(target)
        layer = self.resolve(source).layer
        self._tags[name] = layer.digest
        return Image(reference=name, layer=layer)

    def remove(self, reference: str, *, in_use: Callable[[str], bool]) -> None:
        """Remove a tag, and the layer with the last one."""
        image = self.resolve(reference)
        digest = image.layer.digest
        others = [name for name, target in self._tags.items() if target == digest and name != image.reference]
        if image.reference not in self._tags and others:
            raise Conflict(f"{image.reference} is still tagged {', '.join(sorted(others))}")
        if not others:
            if in_use(digest):
                raise Conflict(f"{image.reference} is in use by a live sandbox", digest=digest)
            del self._layers[digest]
        self._tags.pop(image.reference, None)

    def layer_path(self, digest: str) -> Path:
        """Return where the layer would be."""
        if digest not in self._layers:
            raise ImageUnavailable(f"layer {digest} is not in the store", digest=digest)
        return self.root / digest.removeprefix("blake3:") / "layer.erofs"


def _tag_name(reference: str) -> str:
    name, tag, digest = ids.parse_reference(reference)
    if digest is not None:
        raise InvalidArgument(f"{reference[:80]!r} names content: give a name:tag")
    return f"{name}:{tag}"


class FakeLayerMounts:
    """Counts users of layers and mounts nothing; the paths it returns need not exist.

    Args:
        layer_path: the store's ``layer_path``, so that unknown layers are refused; absent: all are known.
        root: parent of the paths that ``acquire`` returns.
    """

    def __init__(
        self,
        layer_path: Callable[[str], Path] | None = None,
        *,
        root: Path = Path("/nonexistent/layers/mnt"),
    ) -> None:
        self.root = root
        self._layer_path = layer_path
        self._lock = threading.Lock()
        self._owners: dict[str, set[str]] = {}
        self._mounted: set[str] = set()

    def acquire(self, owner: str, digests: Sequence[str]) -> list[Path]:
        """Note a user."""
        if self._layer_path is not None:
            for digest in digests:
                self._layer_path(digest)
        with self._lock:
            for digest in digests:
                self._owners.setdefault(digest, set()).add(owner)
            self._mounted.update(digests)
        return [self.root / digest.removeprefix("blake3:") for digest in digests]

    def release(self, owner: str) -> None:
        """Forget a user; the layer stays warm until ``unmount_idle``."""
        with self._lock:
            for owners in self._owners.values():
                owners.discard(owner)

    def reconcile(self, owners: dict[str, Sequence[str]]) -> None:
        """Take the owners given for the truth."""
        with self._lock:
            self._owners = {}
            for owner, digests in owners.items():
                for digest in digests:
                    self._owners.setdefault(digest, set()).add(owner)
            self._mounted &= self._owners.keys()

    def mounted(self) -> list[str]:
        """Return what would be mounted."""
        with self._lock:
            return sorted(self._mounted)

    def users(self, digest: str) -> set[str]:
        """Return the owners of a layer."""
        with self._lock:
            return set(self._owners.get(digest, ()))

    def unmount_idle(self, older_than_seconds: float = 0.0) -> list[str]:
        """Let go of layers without users; ages are not kept, so only 0 does something."""
        if older_than_seconds > 0:
            return []
        with self._lock:
            idle = sorted(digest for digest in self._mounted if not self._owners.get(digest))
            self._mounted.difference_update(idle)
        return idle

    def drop(self, digest: str) -> None:
        """Let go of one layer.

        Raises:
            Conflict: it has users.
        """
        with self._lock:
            if self._owners.get(digest):
                raise Conflict(f"layer {digest} is in use", digest=digest)
            self._mounted.discard(digest)
