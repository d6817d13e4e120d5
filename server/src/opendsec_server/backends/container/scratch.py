"""The writable side of sandboxes: one folder each, on a btrfs image with a limit each, or plain.

A sandbox's folder holds its overlay ``upper`` and ``work``, its OCI bundle and its small files, so that one removal
removes all of it.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Protocol

from opendsec.api.errors import DiskFull, Unavailable, UnsupportedCapability
from opendsec_server.linux import btrfs, loop
from opendsec_server.linux.mounts import MountFlag, mount, mountinfo, umount
from opendsec_server.platform.config import ScratchConfig

#: No device and no set-user-id program of a sandbox means anything on the host.
_FLAGS = MountFlag.NOATIME | MountFlag.NODEV | MountFlag.NOSUID
#: Nobody needs checksums of what does not outlive the host (``nodatacow``); freed space goes back to its disk.
_OPTIONS = "nodatacow,discard=async,commit=120"
#: Longest time to wait for a loop device after the unmount, in seconds.
_RELEASE_SECONDS = 10.0


class Scratch(Protocol):
    """Makes and removes the folders of sandboxes."""

    #: Limits can be enforced.
    has_limits: bool

    def open(self) -> None:
        """Make it ready; what is there already is taken over."""

    def create(self, name: str, limit_mb: int | None) -> Path:
        """Make a sandbox's folder and return it.

        Raises:
            DiskFull: no room.
        """

    def path(self, name: str) -> Path:
        """Return where a sandbox's folder is or would be."""

    def remove(self, name: str) -> None:
        """Remove a sandbox's folder; an unknown name is fine."""

    def names(self) -> set[str]:
        """Return the names of all folders."""

    def used_bytes(self, name: str) -> int | None:
        """Return what a sandbox holds, if that is known cheaply."""

    def tear_down(self) -> None:
        """Unmount what ``open`` mounted."""


class FolderScratch:
    """A plain folder: no limits."""

    has_limits = False

    def __init__(self, root: Path) -> None:
        self._root = root

    def open(self) -> None:
        """Make the folder."""
        self._root.mkdir(parents=True, exist_ok=True, mode=0o700)

    def path(self, name: str) -> Path:
        """Return where a sandbox's folder is."""
        return self._root / name

    def create(self, name: str, limit_mb: int | None) -> Path:
        """Make a sandbox's folder."""
        if limit_mb is not None:
            raise UnsupportedCapability("a plain scratch folder cannot limit disk use", field="disk_limit_mb")
        self.path(name).mkdir(mode=0o700)
        return self.path(name)

    def remove(self, name: str) -> None:
        """Remove a sandbox's folder."""
        # The workload made it: trees may be deeper than Python can walk.
        if self.path(name).exists():
            _run(["rm", "-rf", "--one-file-system", "--", str(self.path(name))])

    def names(self) -> set[str]:
        """Return the names of all folders."""
        return {entry.name for entry in self._root.iterdir()} if self._root.exists() else set()

    def used_bytes(self, name: str) -> int | None:  # noqa: ARG002 - counting a tree is not cheap
        """Return None: nobody keeps count."""
        return None

    def tear_down(self) -> None:
        """Nothing was mounted."""


class BtrfsScratch:
    """A sparse btrfs image file under the data folder; a subvolume and a quota each."""

    has_limits = True

    def __init__(self, data: Path, config: ScratchConfig) -> None:
        self._image = data / "scratch.btrfs"
        self._root = data / "scratch"
        self._size = config.size_bytes

    def _device(self) -> str | None:
        """Return the device that is mounted, or None."""
        target = str(self._root.resolve())
        return next((one.source for one in mountinfo() if one.target == target and one.fstype == "btrfs"), None)

    def open(self) -> None:
        """Make and mount the image, unless an earlier edge has.

        Raises:
            UnsupportedCapability: this host has no btrfs.
            OSError: no loop device is free.
        """
        self._root.mkdir(parents=True, exist_ok=True, mode=0o700)
        if self._device() is not None:
            return
        if not self._image.exists():
            self._make()
        attached = loop.devices_of(self._image)
        if attached:
            # Still in use by sandboxes of an edge whose mount namespace is gone.
            mount(attached[0], self._root, "btrfs", _FLAGS, _OPTIONS)
        else:
            device, fd = loop.attach(self._image)
            try:
                mount(device, self._root, "btrfs", _FLAGS, _OPTIONS)
            finally:
                os.close(fd)
        btrfs.enable_quota(self._root)

    def _make(self) -> None:
        fresh = self._image.with_suffix(".new")
        with fresh.open("wb") as file:
            file.truncate(self._size)
        _run(["mkfs.btrfs", "--quiet", "--force", "--metadata", "single", "--data", "single", str(fresh)])
        fresh.rename(self._image)

    def path(self, name: str) -> Path:
        """Return where a sandbox's subvolume is."""
        return self._root / name

    def create(self, name: str, limit_mb: int | None) -> Path:
        """Make a sandbox's subvolume and limit it."""
        try:
            btrfs.create_subvolume(self._root, name)
            if limit_mb is not None:
                btrfs.limit_subvolume(self.path(name), limit_mb * 2**20)
        except OSError as error:
            if error.errno in {errno.ENOSPC, errno.EDQUOT}:
                raise DiskFull("the node's scratch disk is full") from error
            raise
        return self.path(name)

    def remove(self, name: str) -> None:
        """Remove a sandbox's subvolume."""
        path = self.path(name)
        try:
            if btrfs.is_subvolume(path):
                btrfs.destroy_subvolume(self._root, name)
            else:
                shutil.rmtree(path)
        except FileNotFoundError:
            pass

    def names(self) -> set[str]:
        """Return the names of all subvolumes."""
        return {entry.name for entry in self._root.iterdir()} if self._root.exists() else set()

    def used_bytes(self, name: str) -> int | None:
        """Return what the subvolume's quota counts."""
        return btrfs.used_bytes(self.path(name))

    def tear_down(self) -> None:
        """Unmount the image and return when its loop device is free again."""
        device = self._device()
        if device is None:
            return
        umount(self._root)
        # The kernel lets go of the device with the last mount namespace that saw it, a moment after its processes are
        # gone. There is no event for that.
        backing = Path("/sys/block") / Path(device).name / "loop/backing_file"
        deadline = time.monotonic() + _RELEASE_SECONDS
        while _reads(backing) == str(self._image) and time.monotonic() < deadline:
            time.sleep(0.005)


def _reads(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def make_scratch(data: Path, config: ScratchConfig) -> Scratch:
    """Return the configured kind.

    Raises:
        UnsupportedCapability: there is no such kind.
    """
    if config.kind == "btrfs-image":
        return BtrfsScratch(data, config)
    if config.kind == "folder":
        return FolderScratch(data / "scratch")
    raise UnsupportedCapability(f"scratch kind {config.kind!r} is unknown: use btrfs-image or folder")


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "LC_ALL": "C"})
    except FileNotFoundError:
        raise UnsupportedCapability(f"{command[0]} is not installed") from None
    if done.returncode != 0:
        raise Unavailable(f"{command[0]} failed: {done.stderr.strip()[-300:]}")
