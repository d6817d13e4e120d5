"""The manifest of a layer: what its digest covers, and how it is stored.

``digest = "blake3:" + hex(blake3(C))`` where ``C`` is this JSON, keys sorted, no blanks::

    {"config":{…},"format":1,"image":{"digest":"blake3:<of the EROFS bytes>","size":<bytes>},"kind":"base"}

So the same files, times and config give the same layer wherever and whenever it is made; ``created_at`` and
``architecture`` (a fact derived from the files) are outside.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args

import msgspec
from blake3 import blake3

from opendsec.api.errors import ImageUnavailable, InvalidArgument
from opendsec.api.models import ImageConfig, Layer

#: Version of the manifest this program writes and the only one it reads.
FORMAT = 1
Kind = Literal["base", "workspace", "toolkit", "snapshot"]
KINDS: tuple[Kind, ...] = get_args(Kind)
#: File names inside a layer's folder.
IMAGE_NAME, MANIFEST_NAME = "layer.erofs", "manifest.json"


class Blob(msgspec.Struct, kw_only=True, frozen=True):
    """A file by content."""

    digest: str
    size: int


class Content(msgspec.Struct, kw_only=True, frozen=True):
    """The part of a manifest that its digest covers."""

    format: int
    kind: Kind
    config: ImageConfig
    image: Blob

    def digest(self) -> str:
        """Return the digest of a layer with this content."""
        return f"blake3:{blake3(msgspec.json.encode(self, order='sorted')).hexdigest()}"


class Manifest(msgspec.Struct, kw_only=True, frozen=True):
    """What ``manifest.json`` holds."""

    format: int
    digest: str
    content: Content
    created_at: float
    architecture: str | None = None

    def layer(self) -> Layer:
        """Return the wire form."""
        return Layer(
            digest=self.digest,
            kind=self.content.kind,
            size=self.content.image.size,
            created_at=self.created_at,
            config=self.content.config,
            architecture=self.architecture,
        )


class _Version(msgspec.Struct):
    format: int


def check_kind(kind: str) -> Kind:
    """Return ``kind`` if an importer may make such a layer.

    Raises:
        InvalidArgument: it is none of base, workspace and toolkit.
    """
    for known in KINDS:
        if kind == known and known != "snapshot":
            return known
    raise InvalidArgument(f"{kind[:80]!r} is no kind of layer to import: use base, workspace or toolkit", field="kind")


def hash_file(path: Path) -> Blob:
    """Return digest and size of a file. Blocking."""
    return Blob(digest=f"blake3:{blake3().update_mmap(path).hexdigest()}", size=path.stat().st_size)


def read_manifest(folder: Path, digest: str) -> Manifest:
    """Read and check the manifest of a layer.

    Raises:
        ImageUnavailable: it is missing, damaged, of an unknown format, or belongs to something else; the message
            tells which.
    """
    try:
        raw = (folder / MANIFEST_NAME).read_bytes()
        size = (folder / IMAGE_NAME).stat().st_size
    except OSError as error:
        raise ImageUnavailable(f"layer {digest} is not in the store: {error.strerror}", digest=digest) from error
    try:
        version = msgspec.json.decode(raw, type=_Version).format
        if version != FORMAT:
            raise ImageUnavailable(
                f"layer {digest} has format {version}, but this version of opendsec reads format {FORMAT} only",
                digest=digest,
            )
        manifest = msgspec.json.decode(raw, type=Manifest)
    except msgspec.MsgspecError as error:
        raise ImageUnavailable(f"the manifest of layer {digest} is damaged: {error}", digest=digest) from error
    if manifest.digest != digest or manifest.content.digest() != digest:
        raise ImageUnavailable(f"the manifest of layer {digest} is damaged: its content has another digest")
    if size != manifest.content.image.size:
        raise ImageUnavailable(
            f"layer {digest} is damaged: its image has {size} bytes instead of {manifest.content.image.size}"
        )
    return manifest


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest into a staged folder. Blocking."""
    (folder / MANIFEST_NAME).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n")
