"""Mounts and mount namespaces: thin typed wrappers of the system calls.

Every call names source and target in the ``OSError`` it raises. Calls block only as long as the kernel does and
release the interpreter lock. ``unshare_mounts`` and ``enter_mount_namespace`` change the calling *thread* alone,
so both belong in a worker thread: ``with private_mounts(): …`` does the way there and back.
"""

from __future__ import annotations

import ctypes
import enum
import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from opendsec.api.errors import CapacityUnavailable, ImageUnavailable, PlatformError, UnsupportedCapability

#: What may name a place in the file system; bytes need not be UTF-8.
AnyPath = str | bytes | os.PathLike[str]

_CLONE_NEWNS = 0x00020000
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mount.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p)
_libc.umount2.argtypes = (ctypes.c_char_p, ctypes.c_int)
_libc.unshare.argtypes = (ctypes.c_int,)
_libc.setns.argtypes = (ctypes.c_int, ctypes.c_int)


class MountFlag(enum.IntFlag):
    """Flags of mount(2)."""

    NONE = 0
    RDONLY = 0x1
    NOSUID = 0x2
    NODEV = 0x4
    NOEXEC = 0x8
    SYNCHRONOUS = 0x10
    REMOUNT = 0x20
    MANDLOCK = 0x40
    DIRSYNC = 0x80
    NOSYMFOLLOW = 0x100
    NOATIME = 0x400
    NODIRATIME = 0x800
    BIND = 0x1000
    MOVE = 0x2000
    REC = 0x4000
    SILENT = 0x8000
    UNBINDABLE = 1 << 17
    PRIVATE = 1 << 18
    SLAVE = 1 << 19
    SHARED = 1 << 20
    RELATIME = 1 << 21
    STRICTATIME = 1 << 24
    LAZYTIME = 1 << 25


class UnmountFlag(enum.IntFlag):
    """Flags of umount2(2)."""

    NONE = 0
    FORCE = 1
    DETACH = 2
    EXPIRE = 4
    NOFOLLOW = 8


class Mount(msgspec.Struct, kw_only=True, frozen=True):
    """One line of ``/proc/<pid>/mountinfo``; names are decoded as file names are (``os.fsdecode``)."""

    id: int
    parent: int
    #: ``major:minor`` of the file system.
    device: str
    #: Directory of the file system that is seen at ``target``.
    root: str
    target: str
    options: tuple[str, ...]
    #: ``shared:N``, ``master:N``, …; empty for a private mount.
    propagation: tuple[str, ...]
    fstype: str
    source: str
    super_options: tuple[str, ...]

    @property
    def read_only(self) -> bool:
        """The mount or its file system is read-only."""
        return "ro" in self.options or "ro" in self.super_options


def _check(result: int, source: AnyPath | None, target: AnyPath) -> None:
    if result == 0:
        return
    code = ctypes.get_errno()
    if source is None:
        raise OSError(code, os.strerror(code), os.fsdecode(target))
    raise OSError(code, os.strerror(code), os.fsdecode(source), None, os.fsdecode(target))


def mount(
    source: AnyPath,
    target: AnyPath,
    fstype: str | None = None,
    flags: MountFlag = MountFlag.NONE,
    data: str | bytes | None = None,
) -> None:
    """Mount a file system, or bind, move or change a mount; the system call as it is.

    Args:
        source: device, file or name; many file systems ignore it.
        target: mount point.
        fstype: file system, or ``None`` for bind, move and propagation changes.
        flags: flags of mount(2).
        data: options of the file system, at most one page (4095 bytes).

    Raises:
        OSError: what the kernel said; ``filename`` is the source, ``filename2`` the target.
    """
    options = os.fsencode(data) if data is not None else None
    if options is not None and len(options) > 4095:
        raise OSError(errno.E2BIG, "mount options are longer than a page", os.fsdecode(target))
    _check(
        _libc.mount(
            os.fsencode(source), os.fsencode(target), fstype.encode() if fstype is not None else None, flags, options
        ),
        source,
        target,
    )


def umount(target: AnyPath, *, lazy: bool = False) -> None:
    """Unmount; never follows a symbolic link at ``target``.

    Args:
        target: mount point.
        lazy: detach it from the tree now, let the last user free it.

    Raises:
        OSError: ``EBUSY`` if in use, ``EINVAL`` if nothing is mounted there.
    """
    flags = UnmountFlag.NOFOLLOW | (UnmountFlag.DETACH if lazy else UnmountFlag.NONE)
    _check(_libc.umount2(os.fsencode(target), flags), None, target)


def bind(source: AnyPath, target: AnyPath, read_only: bool = False, *, recursive: bool = False) -> None:
    """Make ``source`` visible at ``target``.

    A read-only bind takes a second call: if that fails the first is undone. Only the top mount of a recursive bind
    becomes read-only.

    Raises:
        OSError: what the kernel said.
    """
    flags = MountFlag.BIND | (MountFlag.REC if recursive else MountFlag.NONE)
    mount(source, target, None, flags)
    if read_only:
        try:
            mount("none", target, None, MountFlag.BIND | MountFlag.REMOUNT | MountFlag.RDONLY)
        except OSError:
            umount(target, lazy=True)
            raise


def move(source: AnyPath, target: AnyPath) -> None:
    """Move a mount to another place.

    Raises:
        OSError: what the kernel said.
    """
    mount(source, target, None, MountFlag.MOVE)


def make_private(target: AnyPath = "/") -> None:
    """Stop mount events from passing in or out at and below ``target``.

    Raises:
        OSError: what the kernel said.
    """
    mount("none", target, None, MountFlag.REC | MountFlag.PRIVATE)


def unshare_mounts() -> None:
    """Give the calling thread a mount namespace of its own, cut off from the host's (everything private).

    Its working directory and root stop being shared with the other threads of the process.

    Raises:
        OSError: what the kernel said.
    """
    _check(_libc.unshare(_CLONE_NEWNS), None, "mount namespace")
    make_private("/")


def open_mount_namespace() -> int:
    """Return a descriptor of the calling thread's mount namespace; the caller closes it."""
    return os.open("/proc/thread-self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)


def enter_mount_namespace(fd: int) -> None:
    """Move the calling thread into a mount namespace; its root and working directory become that one's root.

    Raises:
        OSError: ``EINVAL`` if the thread still shares root and working directory with others (it has not called
            ``unshare_mounts``) or ``fd`` is something else.
    """
    _check(_libc.setns(fd, _CLONE_NEWNS), None, "mount namespace")


@contextmanager
def private_mounts() -> Iterator[None]:
    """Run the body in a mount namespace of its own, then go back; for worker threads only.

    The namespace and all mounts made in it vanish when neither this thread nor a process started in it is left.

    Raises:
        OSError: what the kernel said.
    """
    home = open_mount_namespace()
    try:
        unshare_mounts()
        try:
            yield
        finally:
            enter_mount_namespace(home)
    finally:
        os.close(home)


def mount_erofs(image: AnyPath, target: AnyPath, *, flags: MountFlag = MountFlag.RDONLY | MountFlag.NODEV) -> None:
    """Mount an EROFS image straight from its file (no loop device; Linux 6.12 or newer).

    Raises:
        ImageUnavailable: the file is missing or is no intact EROFS image.
        UnsupportedCapability: the kernel lacks EROFS, or mounts of files.
        CapacityUnavailable: the kernel has no memory or no mounts left (``fs.mount-max``).
        OSError: anything else.
    """
    try:
        mount(image, target, "erofs", flags | MountFlag.RDONLY)
    except OSError as error:
        mapped = _erofs_error(error, os.fsdecode(image), os.fsdecode(target))
        if mapped is None:
            raise
        raise mapped from error


def _erofs_error(error: OSError, image: str, target: str) -> PlatformError | None:
    match error.errno:
        case errno.ENOENT if Path(target).is_dir():
            return ImageUnavailable(f"layer image {image} is missing")
        case errno.EINVAL | errno.EUCLEAN | errno.EBADMSG | errno.EIO if Path(image).is_file():
            return ImageUnavailable(f"layer image {image} is damaged: {error.strerror}")
        case errno.ENODEV:
            return UnsupportedCapability("this kernel has no EROFS (CONFIG_EROFS_FS)")
        case errno.ENOTBLK:
            return UnsupportedCapability("this kernel cannot mount EROFS from a file (Linux 6.12 or newer can)")
        case errno.ENOSPC | errno.ENOMEM:
            return CapacityUnavailable(f"no more mounts are possible (sysctl fs.mount-max, memory): {error.strerror}")
        case _:
            return None


_ESCAPE = re.compile(rb"\\([0-7]{3})")


def _unescape(field: bytes) -> str:
    if b"\\" in field:
        field = _ESCAPE.sub(lambda match: bytes((int(match[1], 8),)), field)
    return os.fsdecode(field)


def parse_mountinfo(text: bytes) -> list[Mount]:
    """Parse the content of a ``mountinfo`` file, in the kernel's order (a later mount covers an earlier one)."""
    mounts = []
    for line in text.split(b"\n"):  # not splitlines: a name may hold a carriage return
        head, separator, tail = line.partition(b" - ")
        fields, rest = head.split(b" "), tail.split(b" ")
        if not separator or len(fields) < 6 or len(rest) < 3:
            continue
        mounts.append(
            Mount(
                id=int(fields[0]),
                parent=int(fields[1]),
                device=fields[2].decode(),
                root=_unescape(fields[3]),
                target=_unescape(fields[4]),
                options=tuple(fields[5].decode().split(",")),
                propagation=tuple(field.decode() for field in fields[6:]),
                fstype=_unescape(rest[0]),
                source=_unescape(rest[1]),
                super_options=tuple(_unescape(rest[2]).split(",")),
            )
        )
    return mounts


def mountinfo(pid: int | None = None) -> list[Mount]:
    """Return the mounts of the calling thread's namespace, or of a process'.

    Raises:
        OSError: no such process, or its mounts may not be read.
    """
    owner = "thread-self" if pid is None else str(pid)
    return parse_mountinfo(Path(f"/proc/{owner}/mountinfo").read_bytes())
