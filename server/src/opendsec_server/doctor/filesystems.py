"""File systems: layers, overlay, scratch with limits. Each is tried in a mount namespace that dies with its thread."""

from __future__ import annotations

import fcntl
import os
import struct
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from opendsec.api.errors import PlatformError
from opendsec_server.doctor.finding import Finding, ProbeFailed, State, run
from opendsec_server.linux.mounts import mount, mount_erofs, private_mounts
from opendsec_server.platform.config import Config

_BTRFS_BYTES = 128 * 1024 * 1024
#: ``_IOWR(0x94, 40, struct btrfs_ioctl_quota_ctl_args)`` and its commands.
_QUOTA_CTL = 0xC010_9428
_QUOTA_ENABLE = 1
_QUOTA_ENABLE_SIMPLE = 4


def probe(_config: Config) -> list[Finding]:
    """Look at file systems and the programs that make them."""
    return [
        _attempt("erofs", "image layers, shared by all sandboxes", "a kernel with EROFS; package erofs-utils", _erofs),
        _attempt("overlay", "root file system of the sandboxes", "a kernel with overlayfs", _overlay),
        _attempt(
            "btrfs", "writable side with disk limits", "a kernel with btrfs and loop; package btrfs-progs", _btrfs
        ),
        _tool("mmdebstrap", "'opendsec image import --debian'", ["mmdebstrap", "--version"]),
    ]


def _attempt(name: str, purpose: str, remedy: str, action: Callable[[Path], tuple[str, str]]) -> Finding:
    """Run an action in a scratch folder and a private mount namespace of a worker thread."""

    def work() -> tuple[str, str]:
        with tempfile.TemporaryDirectory(prefix="opendsec-doctor-") as folder, private_mounts():
            return action(Path(folder))

    try:
        with ThreadPoolExecutor(1) as pool:
            detail, weak = pool.submit(work).result()
    except (OSError, PlatformError, ProbeFailed) as error:
        detail = error.message if isinstance(error, PlatformError) else str(error)
        return Finding(name=name, state="missing", purpose=purpose, detail=detail, remedy=remedy, required=True)
    state: State = "degraded" if weak else "ok"
    return Finding(name=name, state=state, purpose=purpose, detail=detail, remedy=weak, required=True)


def _tool(name: str, purpose: str, argv: list[str]) -> Finding:
    try:
        detail = run(argv).strip().splitlines()[0]
    except ProbeFailed as error:
        remedy = f"package {name}"
        return Finding(name=name, state="missing", purpose=purpose, detail=str(error), remedy=remedy)
    return Finding(name=name, state="ok", purpose=purpose, detail=detail)


def _erofs(folder: Path) -> tuple[str, str]:
    tree, image, target = folder / "tree", folder / "image", folder / "mnt"
    tree.mkdir()
    target.mkdir()
    (tree / "file").write_text("layer")
    run(["mkfs.erofs", "--quiet", str(image), str(tree)])
    mount_erofs(image, target)
    if (target / "file").read_text() != "layer":
        raise ProbeFailed("a mounted image reads wrongly")
    return "an image was made, mounted from its file and read", ""


def _overlay(folder: Path) -> tuple[str, str]:
    for name in ("lower", "upper", "work", "mnt"):
        (folder / name).mkdir()
    (folder / "lower/file").write_text("below")
    mount(
        "overlay",
        folder / "mnt",
        "overlay",
        data=f"lowerdir={folder}/lower,upperdir={folder}/upper,workdir={folder}/work",
    )
    (folder / "mnt/file").write_text("above")
    if (folder / "lower/file").read_text() != "below":
        raise ProbeFailed("a write went through to the lower side")
    return "mounted and written to", ""


def _btrfs(folder: Path) -> tuple[str, str]:
    image, target = folder / "image", folder / "mnt"
    target.mkdir()
    with image.open("wb") as file:
        file.truncate(_BTRFS_BYTES)
    run(["mkfs.btrfs", "--quiet", str(image)])
    run(["mount", "-o", "loop", str(image), str(target)])
    fd = os.open(target, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.ioctl(fd, _QUOTA_CTL, struct.pack("=QQ", _QUOTA_ENABLE_SIMPLE, 0))
    except OSError as error:
        fcntl.ioctl(fd, _QUOTA_CTL, struct.pack("=QQ", _QUOTA_ENABLE, 0))
        return f"loop mount and full quotas; no simple quotas: {error.strerror}", "Linux 6.7 or newer has simple quotas"
    finally:
        os.close(fd)
    return "loop mount and simple quotas", ""
