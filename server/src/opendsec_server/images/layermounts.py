"""One file-backed EROFS mount per layer, shared by all sandboxes of the node.

::

    absent ── acquire ──> in use ── last release ──> warm ── unmount_idle ──> absent
                            ^────────── acquire ──────┘

A layer stays mounted (warm) after its last user until ``unmount_idle``, which the edge calls now and then; a mount
costs no memory worth naming and saves about a millisecond of the next create. Mounts are read-only and ``nodev``, but
not ``nosuid``: set-user-id programs must work in sandboxes that may gain privileges; the parent folder is closed to
all but root instead.

After a crash ``reconcile`` reads the kernel's table: what is mounted for a known owner is taken over, the rest is
unmounted. Sandboxes hold their layers through their own overlay, so an unmount here never takes a file from one.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from opendsec.api.errors import Conflict, InvalidArgument
from opendsec_server.linux import mounts
from opendsec_server.linux.mounts import Mount

_PREFIX = "blake3:"


class _Entry:
    """A layer that has users or is mounted; fields other than ``mounted`` are guarded by the table's lock."""

    def __init__(self, digest: str, target: Path) -> None:
        self.digest = digest
        self.target = target
        self.owners: set[str] = set()
        self.idle_since = 0.0
        #: Guards the mount itself, so that a slow mount delays only those who wait for this layer.
        self.lock = threading.Lock()
        self.mounted = False


class ErofsLayerMounts:
    """The mounts below ``<data_dir>/layers/mnt``; safe for threads, one instance per node.

    Args:
        data_dir: the node's data folder.
        layer_path: finds the EROFS image of a digest (``ImageStore.layer_path``).
        clock: seconds, monotonic.
    """

    def __init__(
        self, data_dir: Path, layer_path: Callable[[str], Path], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        root = data_dir / "layers" / "mnt"
        root.mkdir(parents=True, exist_ok=True)
        self.root = root.resolve()  # as the kernel's table has it
        # Layers hold set-user-id programs: no one but root may walk in here.
        self.root.parent.chmod(0o700)
        self._layer_path = layer_path
        self._clock = clock
        self._lock = threading.Lock()
        self._entries: dict[str, _Entry] = {}
        self._owned: dict[str, set[str]] = {}

    def acquire(self, owner: str, digests: Sequence[str]) -> list[Path]:
        """Mount what is not mounted and note ``owner`` as a user of each; repeating it is fine. Blocking.

        On an error the owner keeps none of the layers that it did not have before.

        Raises:
            ImageUnavailable: a layer is not in the store, or damaged.
            UnsupportedCapability: this kernel cannot mount EROFS files.
            CapacityUnavailable: no mounts are left.
        """
        new: list[str] = []
        with self._lock:
            entries = [self._entry(digest) for digest in digests]
            owned = self._owned.setdefault(owner, set())
            for entry in entries:
                if entry.digest not in owned:
                    new.append(entry.digest)
                    owned.add(entry.digest)
                entry.owners.add(owner)
        try:
            for entry in entries:
                if not entry.mounted:
                    self._mount(entry)
        except BaseException:
            with self._lock:
                self._forget(owner, new)
            raise
        return [entry.target for entry in entries]

    def release(self, owner: str) -> None:
        """Forget ``owner``; its layers stay mounted until ``unmount_idle``. An unknown owner is fine."""
        with self._lock:
            self._forget(owner, list(self._owned.get(owner, ())))

    def reconcile(self, owners: dict[str, Sequence[str]]) -> None:
        """After a restart: take over existing mounts for the given owners and unmount the rest. Blocking."""
        with self._lock:
            self._entries.clear()
            self._owned.clear()
            for owner, digests in owners.items():
                for digest in digests:
                    self._entry(digest).owners.add(owner)
                    self._owned.setdefault(owner, set()).add(digest)
            wanted = {entry.target.name: entry for entry in self._entries.values()}
            found: dict[str, list[Mount]] = {}
            for mount in self._below():
                found.setdefault(mount.target, []).append(mount)
            for target, stack in found.items():
                entry = wanted.get(Path(target).name)
                if entry is not None and len(stack) == 1 and self._is_ours(entry, stack[0]):
                    entry.mounted = True
                else:
                    self._clear(Path(target), len(stack))
            for folder in self.root.iterdir():
                entry = wanted.get(folder.name)
                if entry is None or not entry.mounted:
                    with suppress(OSError):
                        folder.rmdir()

    def mounted(self) -> list[str]:
        """Return the digests that are mounted."""
        with self._lock:
            return sorted(entry.digest for entry in self._entries.values() if entry.mounted)

    def users(self, digest: str) -> set[str]:
        """Return the owners of a layer."""
        with self._lock:
            entry = self._entries.get(digest)
            return set(entry.owners) if entry else set()

    def unmount_idle(self, older_than_seconds: float = 0.0) -> list[str]:
        """Unmount layers that nobody has used for this long; returns their digests. Blocking."""
        limit = self._clock() - older_than_seconds
        done = []
        with self._lock:
            for entry in list(self._entries.values()):
                if not entry.owners and entry.idle_since <= limit:
                    self._unmount(entry)
                    done.append(entry.digest)
        return sorted(done)

    def drop(self, digest: str) -> None:
        """Unmount a layer that is to be removed. Blocking.

        Raises:
            Conflict: it has users.
        """
        with self._lock:
            entry = self._entries.get(digest)
            if entry is None:
                return
            if entry.owners:
                raise Conflict(f"layer {digest} is in use by {len(entry.owners)} sandboxes", digest=digest)
            self._unmount(entry)

    def _entry(self, digest: str) -> _Entry:
        entry = self._entries.get(digest)
        if entry is None:
            name = digest.removeprefix(_PREFIX)
            if not digest.startswith(_PREFIX) or not name.isalnum():
                raise InvalidArgument(f"{digest[:80]!r} is not a digest")
            entry = self._entries[digest] = _Entry(digest, self.root / name)
            entry.idle_since = self._clock()
        return entry

    def _forget(self, owner: str, digests: Sequence[str]) -> None:
        owned = self._owned.get(owner, set())
        for digest in digests:
            owned.discard(digest)
            entry = self._entries[digest]
            entry.owners.discard(owner)
            if not entry.owners:
                entry.idle_since = self._clock()
                if not entry.mounted:
                    del self._entries[digest]
        if not owned:
            self._owned.pop(owner, None)

    def _mount(self, entry: _Entry) -> None:
        with entry.lock:
            if entry.mounted:
                return
            image = self._layer_path(entry.digest).absolute()
            entry.target.mkdir(exist_ok=True)
            if entry.target.is_mount():
                stack = [mount for mount in self._below() if mount.target == str(entry.target)]
                if len(stack) == 1 and self._is_ours(entry, stack[0]):
                    entry.mounted = True
                    return
                self._clear(entry.target, len(stack))
                entry.target.mkdir(exist_ok=True)
            mounts.mount_erofs(image, entry.target)
            entry.mounted = True

    def _unmount(self, entry: _Entry) -> None:
        """Unmount a layer without users; the table's lock is held, so none can come."""
        with entry.lock:
            if entry.mounted:
                self._clear(entry.target, 1)
                entry.mounted = False
            self._entries.pop(entry.digest, None)

    def _clear(self, target: Path, times: int) -> None:
        for _ in range(times):
            try:
                # Lazy: a reader that still stands in it must not keep us.
                mounts.umount(target, lazy=True)
            except OSError as error:
                if error.errno not in {errno.EINVAL, errno.ENOENT}:
                    raise
        with suppress(OSError):
            target.rmdir()

    def _below(self) -> list[Mount]:
        prefix = f"{self.root}/"
        return [mount for mount in mounts.mountinfo() if mount.target.startswith(prefix)]

    def _is_ours(self, entry: _Entry, mount: Mount) -> bool:
        """Tell whether a mount found there is this layer's, by type and by the inode of its source."""
        try:
            image = self._layer_path(entry.digest).stat()
            source = Path(mount.source).stat()
        except Exception:  # not in the store any more, or mounted from somewhere else
            return False
        return mount.fstype == "erofs" and (image.st_dev, image.st_ino) == (source.st_dev, source.st_ino)
