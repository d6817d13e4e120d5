"""What a sandbox's root gets before its first process: the layers' own attributes, and who it is on the network.

Paths are the image's, which may hold anything: a symbolic link is never followed.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

#: Files of ``/etc`` that every sandbox has of its own; a ``pack_diff`` must leave them out.
IDENTITY_FILES = ("hosts", "hostname", "resolv.conf")


def copy_root_attributes(layer: Path, upper: Path) -> None:
    """Give the upper directory mode and owner of the topmost layer's root: it is what ``/`` shows.

    Raises:
        OSError: what the kernel said.
    """
    seen = layer.stat()
    if (seen.st_uid, seen.st_gid) != (0, 0):
        os.chown(upper, seen.st_uid, seen.st_gid)
    upper.chmod(seen.st_mode & 0o7777)


def write_identity(root: Path, hostname: str) -> None:
    """Write ``/etc/hosts``, ``hostname`` and ``resolv.conf``, as any container engine does.

    An image without a directory ``/etc`` stays without. Names do not resolve beyond the hosts file: there is no
    network but loopback, and an image's own list of servers would only tell where it was built.

    Args:
        root: the mounted root, writable.
        hostname: of the sandbox.

    Raises:
        OSError: the scratch is full.
    """
    try:
        etc = os.open(root / "etc", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return
    hosts = f"127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n127.0.1.1\t{hostname}\n"
    try:
        for name, text in zip(IDENTITY_FILES, (hosts, f"{hostname}\n", "# no network\n"), strict=True):
            _replace(etc, name, text.encode())
    finally:
        os.close(etc)


def _replace(folder: int, name: str, content: bytes) -> None:
    with contextlib.suppress(FileNotFoundError):
        try:
            os.unlink(name, dir_fd=folder)
        except IsADirectoryError:
            return  # whatever the image means by it
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(name, flags, 0o644, dir_fd=folder)
    try:
        os.fchmod(fd, 0o644)
        os.write(fd, content)
    finally:
        os.close(fd)
