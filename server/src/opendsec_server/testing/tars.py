"""Tars made by hand for tests of imports, and a look into layers by really mounting them."""

from __future__ import annotations

import io
import tarfile
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

from opendsec.api.models import Image, ImageConfig
from opendsec_server.images.interface import ImageStore
from opendsec_server.linux import mounts


def quiet(message: str, fraction: float | None) -> None:
    """Take a progress report and drop it."""


def member(name: str, kind: bytes = tarfile.REGTYPE, **fields: object) -> tarfile.TarInfo:
    """Describe a member; ``fields`` are attributes of ``TarInfo``."""
    info = tarfile.TarInfo(name)
    info.type = kind
    info.mode = 0o755 if kind == tarfile.DIRTYPE else 0o644
    for key, value in fields.items():
        setattr(info, key, value)
    return info


def make_tar(*members: tarfile.TarInfo | tuple[tarfile.TarInfo, bytes], fmt: int = tarfile.PAX_FORMAT) -> bytes:
    """Make a tar of members, with content where given."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=fmt, encoding="utf-8", errors="surrogateescape") as archive:
        for item in members:
            info, data = item if isinstance(item, tuple) else (item, b"")
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


async def chunks(data: bytes, size: int = 1000) -> AsyncIterator[bytes]:
    """Send bytes in pieces of ``size``."""
    for start in range(0, len(data), size):
        yield data[start : start + size]


async def import_bytes(
    store: ImageStore,
    data: bytes,
    reference: str = "image:1",
    *,
    kind: str = "base",
    config: ImageConfig | None = None,
) -> Image:
    """Import a tar that is in memory."""
    return await store.import_tar(reference, chunks(data, 65536), kind=kind, config=config, report=quiet)


@contextmanager
def mounted_layer(image: Path, target: Path) -> Iterator[Path]:
    """See the content of a layer at ``target``."""
    target.mkdir(exist_ok=True)
    mounts.mount_erofs(image, target)
    try:
        yield target
    finally:
        mounts.umount(target, lazy=True)


def mounts_below(path: Path) -> list[str]:
    """Return the mount points below a folder."""
    return [mount.target for mount in mounts.mountinfo() if mount.target.startswith(f"{path}/")]
