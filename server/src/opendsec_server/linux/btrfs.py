"""btrfs by its ioctls: subvolumes with a limit each, made and removed in a fraction of a millisecond."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_MAGIC = 0x94
_NAME = struct.Struct("=q4088s")
_LIMIT = struct.Struct("=QQQQQQ")
_QUOTA = struct.Struct("=QQ")
_QGROUP = struct.Struct("=QQ")


def _ioctl(direction: int, number: int, size: int) -> int:
    return (direction << 30) | (size << 16) | (_MAGIC << 8) | number


_SUBVOL_CREATE = _ioctl(1, 14, 4096)
_SNAP_DESTROY = _ioctl(1, 15, 4096)
_QUOTA_CTL = _ioctl(3, 40, _QUOTA.size)
_QGROUP_CREATE = _ioctl(1, 42, _QGROUP.size)
_QGROUP_LIMIT = _ioctl(2, 43, _LIMIT.size)
_QUOTA_ENABLE, _QUOTA_ENABLE_SIMPLE = 1, 4
_LIMIT_MAX_REFERENCED = 1
#: Inode number of the root of every subvolume.
SUBVOLUME_INODE = 256


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        yield fd
    finally:
        os.close(fd)


def enable_quota(root: Path) -> str:
    """Turn quotas on and return their kind: ``simple`` (Linux 6.7 and newer, no rescans) or ``full``."""
    with _opened(root) as fd:
        for kind, command in (("simple", _QUOTA_ENABLE_SIMPLE), ("full", _QUOTA_ENABLE)):
            try:
                fcntl.ioctl(fd, _QUOTA_CTL, bytearray(_QUOTA.pack(command, 0)))
            except OSError as error:
                if kind == "full" or error.errno not in {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTTY}:
                    raise
            else:
                return kind
    raise AssertionError


def create_subvolume(parent: Path, name: str) -> None:
    """Make an empty subvolume (``FileExistsError`` if the name is taken)."""
    with _opened(parent) as fd:
        fcntl.ioctl(fd, _SUBVOL_CREATE, bytearray(_NAME.pack(0, name.encode())))


def limit_subvolume(path: Path, max_bytes: int) -> None:
    """Limit what a subvolume may hold."""
    with _opened(path) as fd:
        fcntl.ioctl(fd, _QGROUP_LIMIT, bytearray(_LIMIT.pack(0, _LIMIT_MAX_REFERENCED, max_bytes, 0, 0, 0)))


def destroy_subvolume(parent: Path, name: str) -> None:
    """Remove a subvolume with all it holds; the space comes back in the background. An unknown name is fine."""
    try:
        with _opened(parent) as fd:
            fcntl.ioctl(fd, _SNAP_DESTROY, bytearray(_NAME.pack(0, name.encode())))
    except FileNotFoundError:
        pass


def is_subvolume(path: Path) -> bool:
    """Tell whether a folder is the root of a subvolume."""
    return os.lstat(path).st_ino == SUBVOLUME_INODE


_INO_LOOKUP = _ioctl(3, 18, 4096)
_FS_INFO = _ioctl(2, 31, 1024)
#: Counters of a quota group that make up what its limit is compared with.
_COUNTERS = ("referenced", "rsv_data", "rsv_meta_pertrans", "rsv_meta_prealloc")


def used_bytes(path: Path) -> int | None:
    """Return what the quota of a subvolume counts now, or None without one.

    The counters in memory are asked: those on disk are as old as the last commit.
    """
    with _opened(path) as fd:
        lookup = bytearray(struct.pack("=QQ4080s", 0, SUBVOLUME_INODE, b""))
        fcntl.ioctl(fd, _INO_LOOKUP, lookup)
        info = bytearray(1024)
        fcntl.ioctl(fd, _FS_INFO, info)
    (subvolume,) = struct.unpack_from("=Q", lookup)
    group = Path(f"/sys/fs/btrfs/{uuid.UUID(bytes=bytes(info[16:32]))}/qgroups/0_{subvolume}")
    try:
        return sum(int((group / name).read_text()) for name in _COUNTERS)
    except FileNotFoundError:
        return None
