"""Overlay mounts by the mount API of descriptors: as many layers as wanted, where an option string ends at a page.

Directories are given to the kernel by their last names, from the working directory: whoever reads the mount's options
inside learns nothing of the host's folders.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
# System call numbers that all machines share.
_MOVE_MOUNT, _FSOPEN, _FSCONFIG, _FSMOUNT = 429, 430, 431, 432
_FSOPEN_CLOEXEC = _FSMOUNT_CLOEXEC = 1
_SET_FLAG, _SET_STRING, _CMD_CREATE = 0, 1, 6
_MOVE_FROM_EMPTY_PATH = 4
_AT_FDCWD = -100


def _call(number: int, what: str, *args: object) -> int:
    result: int = _libc.syscall(ctypes.c_long(number), *args)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), what)
    return result


def mount_overlay(
    target: Path,
    layers: Sequence[Path],
    upper: Path,
    work: Path,
    *,
    options: Sequence[str] = (),
) -> None:
    """Mount an overlay in the calling thread's mount namespace.

    The thread must have a working directory of its own (``mounts.unshare_mounts``): it changes.

    Args:
        target: mount point.
        layers: read-only directories, topmost first.
        upper: directory that takes the changes.
        work: empty directory beside ``upper``.
        options: ``key=value`` or a flag, such as ``index=off``.

    Raises:
        OSError: what the kernel said (Linux 6.5 or newer is needed).
    """
    what = f"overlay at {target}"
    fs = _call(_FSOPEN, what, b"overlay", _FSOPEN_CLOEXEC)
    try:

        def set_string(key: bytes, value: bytes) -> None:
            _call(_FSCONFIG, f"{what}: {key.decode()}", fs, _SET_STRING, key, value, 0)

        set_string(b"source", b"overlay")
        for layer in layers:
            os.chdir(layer.parent)
            set_string(b"lowerdir+", os.fsencode(layer.name))
        os.chdir(upper.parent)
        set_string(b"upperdir", os.fsencode(upper.name))
        set_string(b"workdir", os.fsencode(work.name))
        for option in options:
            key, equals, value = option.encode().partition(b"=")
            if equals:
                set_string(key, value)
            else:
                _call(_FSCONFIG, f"{what}: {option}", fs, _SET_FLAG, key, None, 0)
        _call(_FSCONFIG, what, fs, _CMD_CREATE, None, None, 0)
        mount = _call(_FSMOUNT, what, fs, _FSMOUNT_CLOEXEC, 0)
    finally:
        os.close(fs)
    try:
        _call(_MOVE_MOUNT, what, mount, b"", _AT_FDCWD, os.fsencode(target), _MOVE_FROM_EMPTY_PATH)
    finally:
        os.close(mount)
