"""Loop devices: attach a file, find it again, let go."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import stat
from pathlib import Path

_LOOP_CLR_FD = 0x4C01
_LOOP_GET_STATUS64 = 0x4C05
_LOOP_CONFIGURE = 0x4C0A
_LOOP_CTL_GET_FREE = 0x4C82
_FLAG_AUTOCLEAR, _FLAG_DIRECT_IO = 4, 16
_SYS_BLOCK = Path("/sys/block")
#: Attaching races with other programs for the free device.
_ATTEMPTS = 64


class _Info(ctypes.Structure):
    """``struct loop_info64``."""

    _fields_ = (
        ("device", ctypes.c_uint64),
        ("inode", ctypes.c_uint64),
        ("rdevice", ctypes.c_uint64),
        ("offset", ctypes.c_uint64),
        ("size_limit", ctypes.c_uint64),
        ("number", ctypes.c_uint32),
        ("encrypt_type", ctypes.c_uint32),
        ("encrypt_key_size", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("file_name", ctypes.c_char * 64),
        ("crypt_name", ctypes.c_char * 64),
        ("encrypt_key", ctypes.c_uint8 * 32),
        ("init", ctypes.c_uint64 * 2),
    )


class _Config(ctypes.Structure):
    """``struct loop_config``."""

    _fields_ = (
        ("fd", ctypes.c_uint32),
        ("block_size", ctypes.c_uint32),
        ("info", _Info),
        ("reserved", ctypes.c_uint64 * 8),
    )


def attach(image: Path, *, direct_io: bool = True) -> tuple[Path, int]:
    """Attach a file to a free loop device.

    Returns the device and an open descriptor. The device lets go of the file by itself when its last user (a
    mount, or the descriptor) is gone, so the caller closes the descriptor after mounting.

    Args:
        image: the file.
        direct_io: bypass the page cache of the file if its file system can.

    Raises:
        OSError: no loop devices, or none is free.
    """
    backing = os.open(image, os.O_RDWR | os.O_CLOEXEC)
    try:
        for _ in range(_ATTEMPTS):
            device, fd = _free_device()
            config = _Config(fd=backing)
            config.info.flags = _FLAG_AUTOCLEAR | (_FLAG_DIRECT_IO if direct_io else 0)
            config.info.file_name = os.fsencode(image)[-63:]
            try:
                fcntl.ioctl(fd, _LOOP_CONFIGURE, config)
            except OSError as error:
                os.close(fd)
                if error.errno == errno.EINVAL and direct_io:
                    direct_io = False
                elif error.errno != errno.EBUSY:
                    raise
            else:
                return device, fd
        raise OSError(errno.EBUSY, "no loop device is free", str(image))
    finally:
        os.close(backing)


def _free_device() -> tuple[Path, int]:
    control = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
    try:
        number = fcntl.ioctl(control, _LOOP_CTL_GET_FREE)
    finally:
        os.close(control)
    device = Path(f"/dev/loop{number}")
    if not device.exists():
        # Containers and small systems have no udev that would make it.
        os.mknod(device, stat.S_IFBLK | 0o600, os.makedev(7, number))
    return device, os.open(device, os.O_RDWR | os.O_CLOEXEC)


def devices_of(image: Path) -> list[Path]:
    """Return the loop devices that a file is attached to, told by its inode."""
    try:
        wanted = image.stat()
    except FileNotFoundError:
        return []
    found = []
    for name in _attached():
        info = _status(Path("/dev") / name)
        if info is not None and info == (wanted.st_dev, wanted.st_ino):
            found.append(Path("/dev") / name)
    return found


def attached_below(folder: Path) -> dict[Path, Path]:
    """Return devices and their files for all files below a folder (also files that are deleted by now)."""
    prefix = f"{folder.resolve()}/"
    return {Path("/dev") / name: Path(backing) for name, backing in _attached().items() if backing.startswith(prefix)}


def _attached() -> dict[str, str]:
    found = {}
    for entry in _SYS_BLOCK.glob("loop*/loop/backing_file"):
        try:
            found[entry.parents[1].name] = entry.read_text().rstrip("\n")
        except OSError:  # detached meanwhile
            continue
    return found


def _status(device: Path) -> tuple[int, int] | None:
    info = _Info()
    try:
        fd = os.open(device, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.ioctl(fd, _LOOP_GET_STATUS64, info)
    except OSError:
        return None
    finally:
        os.close(fd)
    return int(info.device), int(info.inode)


def detach(device: Path) -> None:
    """Let a device go of its file, at once or when its last user is gone; one that has is fine.

    Raises:
        OSError: what the kernel said.
    """
    try:
        fd = os.open(device, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        fcntl.ioctl(fd, _LOOP_CLR_FD)
    except OSError as error:
        if error.errno not in {errno.ENXIO, errno.EBUSY}:
            raise
    finally:
        os.close(fd)
