"""What the edge and the backends need of images (the concrete classes are in the sibling modules)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from opendsec.api.models import DebianSource, Image, ImageConfig, Layer

#: Called with one sentence and, if known, how much is done (0 to 1).
ProgressReport = Callable[[str, float | None], None]


class Environment(msgspec.Struct, kw_only=True, frozen=True):
    """Base, workspace and toolkits composed for one sandbox."""

    #: Base first.
    layers: tuple[Layer, ...]
    #: Merged: env of upper layers wins (PATH entries of toolkits are put in front), topmost user and workdir win.
    config: ImageConfig


class ImageStore(Protocol):
    """Layers and tags on this node's storage. Safe for several processes; a half-written layer is never visible."""

    def resolve(self, reference: str) -> Image:
        """Find what a reference points to.

        Raises:
            ImageUnavailable: no such tag or digest.
            InvalidArgument: malformed reference.
        """

    def compose(self, base: str, workspace: str | None, toolkits: Sequence[str]) -> Environment:
        """Resolve and merge; a workspace or toolkit layer as base is refused, and the reverse."""

    async def import_tar(
        self,
        reference: str,
        data: AsyncIterator[bytes],
        *,
        kind: str,
        config: ImageConfig | None,
        report: ProgressReport,
    ) -> Image:
        """Make a layer of a tar stream and tag it (path traversal refused, attributes kept)."""

    async def import_folder(
        self, reference: str, root: Path, *, kind: str, config: ImageConfig | None, report: ProgressReport
    ) -> Image:
        """Make a layer of a root folder and tag it."""

    async def import_debian(
        self,
        reference: str,
        source: DebianSource,
        *,
        kind: str,
        config: ImageConfig | None,
        report: ProgressReport,
    ) -> Image:
        """Build a Debian root with mmdebstrap, make a layer of it and tag it."""

    def list(self) -> list[Image]:
        """Return all tags, sorted."""

    def tag(self, source: str, target: str) -> Image:
        """Point ``target`` at what ``source`` points to, atomically."""

    def remove(self, reference: str, *, in_use: Callable[[str], bool]) -> None:
        """Remove a tag, and its layer when nothing else points to it and ``in_use(digest)`` is false.

        Raises:
            Conflict: a live sandbox uses the layer.
        """

    def layer_path(self, digest: str) -> Path:
        """Return the EROFS image of a layer (``ImageUnavailable`` if absent)."""


class LayerMounts(Protocol):
    """One file-backed EROFS mount per layer and node, shared by all sandboxes and counted."""

    def acquire(self, owner: str, digests: Sequence[str]) -> list[Path]:
        """Mount what is not mounted and note ``owner`` as a user of each; returns mount points in order. Blocking."""

    def release(self, owner: str) -> None:
        """Forget ``owner``; a layer nobody uses is unmounted (possibly after a while, to stay warm). Blocking."""

    def reconcile(self, owners: dict[str, Sequence[str]]) -> None:
        """After a restart: take over existing mounts for the given owners and unmount the rest."""

    def mounted(self) -> list[str]:
        """Return the digests that are mounted."""

    def unmount_idle(self, older_than_seconds: float = 0.0) -> list[str]:
        """Unmount what nobody has used for that long; returns the digests. Blocking."""

    def drop(self, digest: str) -> None:
        """Unmount a layer that is to be removed (``Conflict`` if it has users). Blocking."""
