"""Immutable folders in a local directory: staged where nobody looks, published by one rename.

Layout under the root (mode 700, as its content holds set-user-id programs of images)::

    lock            flock: exclusive while something is published or removed, shared while a stage is made
    tmp/<random>/   stages; each is flocked by the process that fills it, so that the sweep spares live ones
    <name>/<key>/   published folders (``collection``)

A process may be killed at any line: what it leaves is a stage without a lock holder, removed by the next ``sweep``.
Several processes may use one root at once.
"""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from opendsec.api.errors import DiskFull


@contextmanager
def disk_full_mapped(place: Path | str) -> Iterator[None]:
    """Turn "no space left" of the body into ``DiskFull``.

    Raises:
        DiskFull: the disk or its quota is full.
    """
    try:
        yield
    except OSError as error:
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            raise DiskFull(f"the disk of {place} is full") from error
        raise


def remove_tree(path: Path) -> None:
    """Remove a tree of any depth without following links or crossing into mounts; a missing one is fine. Blocking.

    Raises:
        OSError: something could not be removed.
    """
    # rm walks by descriptors, so neither depth nor path length limits it (shutil.rmtree recurses).
    done = subprocess.run(
        ["rm", "-rf", "--one-file-system", "--", str(path)], check=False, capture_output=True, text=True
    )
    if done.returncode != 0:
        raise OSError(errno.EBUSY, f"cannot remove: {done.stderr.strip()[-500:]}", str(path))


class LocalFolder:
    """A root as described by this module. Making one creates its folders."""

    def __init__(self, root: Path, collections: tuple[str, ...]) -> None:
        self.root = root
        self._tmp = root / "tmp"
        root.mkdir(parents=True, exist_ok=True)
        root.chmod(0o700)
        for name in ("tmp", *collections):
            (root / name).mkdir(exist_ok=True)

    @contextmanager
    def locked(self, *, shared: bool = False) -> Iterator[None]:
        """Hold the root's lock against other threads and processes. Blocking."""
        fd = os.open(self.root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def open_stage(self) -> Stage:
        """Make a folder to fill; ``close`` removes what is left of it. Blocking.

        Raises:
            DiskFull: no room.
        """
        with disk_full_mapped(self.root), self.locked(shared=True):
            path = Path(tempfile.mkdtemp(dir=self._tmp))
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return Stage(path, fd)

    def publish(self, folder: Path, collection: str, key: str) -> bool:
        """Move a staged folder to its place; call it with the lock held.

        Returns:
            False if something is there already (the stage then keeps the folder).
        """
        try:
            folder.rename(self.root / collection / key)
        except OSError as error:
            if error.errno in {errno.ENOTEMPTY, errno.EEXIST}:
                return False
            raise
        return True

    def retire(self, collection: str, key: str) -> Path | None:
        """Make a published folder vanish at once; call it with the lock held.

        Returns:
            Where it is now: hand it to ``remove_tree`` after the lock is released. None if it did not exist.
        """
        grave = Path(tempfile.mkdtemp(dir=self._tmp))
        try:
            (self.root / collection / key).rename(grave)
        except FileNotFoundError:
            grave.rmdir()
            return None
        return grave

    def sweep(self) -> int:
        """Remove stages that no process fills any more; returns how many. Blocking."""
        dead: list[tuple[Path, int]] = []
        with self.locked():
            for path in self._tmp.iterdir():
                fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    os.close(fd)
                else:
                    dead.append((path, fd))
        for path, fd in dead:
            try:
                remove_tree(path)
            finally:
                os.close(fd)
        return len(dead)


class Stage:
    """A folder being filled by this process."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock

    def close(self) -> None:
        """Remove what is left. Blocking."""
        try:
            remove_tree(self.path)
        finally:
            os.close(self._lock)
