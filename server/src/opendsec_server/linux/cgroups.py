"""cgroup v1, v2 and hybrid hosts: find, read and remove the groups of sandboxes. The OCI runtime makes them."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterable
from pathlib import Path

from opendsec_server.core.spec import Usage
from opendsec_server.linux import processes
from opendsec_server.linux.mounts import mountinfo

#: How long a group may stay busy while the kernel lets go of its last processes, in seconds.
BUSY_SECONDS = 10.0


def _find_hierarchies() -> dict[str, Path]:
    found: dict[str, Path] = {}
    for mounted in mountinfo():
        if mounted.fstype == "cgroup2":
            found["unified"] = Path(mounted.target)
        elif mounted.fstype == "cgroup":
            found[Path(mounted.target).name] = Path(mounted.target)
    return found


class Cgroups:
    """The groups below one parent in every hierarchy of this host.

    Args:
        parent: path of the parent, relative to each hierarchy's root.
        hierarchies: mount point by name (``memory``, ``pids``, … for v1, ``unified`` for v2); found if absent.
    """

    def __init__(self, parent: str, hierarchies: dict[str, Path] | None = None) -> None:
        self.parent = parent
        self.hierarchies = _find_hierarchies() if hierarchies is None else hierarchies
        file = "memory.oom_control" if "memory" in self.hierarchies else "memory.events"
        self._oom_file = f"{self._base('memory')}/{parent}/%s/{file}"
        #: Open file of each group's kills: it is read twice for each command.
        self._oom_fds: dict[str, int] = {}

    @property
    def mode(self) -> str:
        """``v1``, ``v2`` or ``hybrid``."""
        if "unified" not in self.hierarchies:
            return "v1"
        return "hybrid" if "memory" in self.hierarchies else "v2"

    def _base(self, controller: str) -> Path:
        return self.hierarchies.get(controller) or self.hierarchies.get("unified", Path("/nonexistent"))

    def group(self, name: str, controller: str) -> Path:
        """Return the folder of a sandbox's group for a controller."""
        return self._base(controller) / self.parent / name

    def names(self) -> set[str]:
        """Return the names of all groups below the parent, in whatever hierarchy."""
        found: set[str] = set()
        for root in self.hierarchies.values():
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                found.update(entry.name for entry in (root / self.parent).iterdir() if entry.is_dir())
        return found

    def pids(self, name: str) -> set[int]:
        """Return the processes in a sandbox's groups."""
        found: set[int] = set()
        for root in self.hierarchies.values():
            with contextlib.suppress(OSError):
                found.update(map(int, (root / self.parent / name / "cgroup.procs").read_text().split()))
        # 0 stands for a process that this process cannot see.
        return found - {0}

    def prepare(self, *, memory_bytes: int, pids: int) -> None:
        """Make the parent and bound what all sandboxes take together, so that those without limits spare the host.

        Args:
            memory_bytes: most memory of all.
            pids: most processes and threads of all.

        Raises:
            OSError: the hierarchies cannot be written.
        """
        if self.mode == "v2":
            group = self.hierarchies["unified"]
            for part in Path(self.parent).parts:
                _enable(group)
                group /= part
                group.mkdir(exist_ok=True)
            _enable(group)
            _bound(group / "memory.max", memory_bytes)
            _bound(group / "pids.max", pids)
            return
        for controller, file, limit in (
            ("memory", "memory.limit_in_bytes", memory_bytes),
            ("pids", "pids.max", pids),
        ):
            if controller in self.hierarchies:
                group = self.hierarchies[controller] / self.parent
                group.mkdir(parents=True, exist_ok=True)
                _bound(group / file, limit)

    def kill(self, name: str) -> None:
        """Kill all processes in a sandbox's groups and return when none is left. Blocking.

        Raises:
            TimeoutError: some do not die.
        """
        if self.mode == "v2":
            with contextlib.suppress(OSError):  # absent before Linux 5.14: one by one then
                (self.group(name, "unified") / "cgroup.kill").write_text("1")
        deadline = time.monotonic() + BUSY_SECONDS
        delay = 0.001
        while found := self.pids(name):
            if time.monotonic() > deadline:
                raise TimeoutError(f"processes of {name} do not die: {sorted(found)[:10]}")
            for pid in found:
                self._kill_one(pid, name)
            # A v1 group tells nobody when it is empty.
            time.sleep(delay)
            delay = min(delay * 2, 0.05)

    def _kill_one(self, pid: int, name: str) -> None:
        pidfd = processes.open_pidfd(pid)
        if pidfd is None:
            return
        try:
            # Looked at after the descriptor was had: the number cannot change hands any more.
            if processes.in_cgroup(pid, f"{self.parent}/{name}"):
                processes.kill(pidfd)
        finally:
            os.close(pidfd)

    def oom_kills(self, name: str) -> int:
        """Return how many processes the kernel killed for the memory limit; 0 if there is no such group."""
        fd = self._oom_fds.get(name)
        try:
            if fd is None:
                fd = self._oom_fds[name] = os.open(self._oom_file % name, os.O_RDONLY | os.O_CLOEXEC)
            return _value(os.pread(fd, 4096, 0), b"oom_kill")
        except OSError:
            return 0

    def usage(self, name: str) -> Usage:
        """Return the use of a sandbox.

        Raises:
            FileNotFoundError: there is no such group.
        """
        memory, pids = self.group(name, "memory"), self.group(name, "pids")
        if "memory" in self.hierarchies:
            return Usage(
                memory_bytes=_number(memory / "memory.usage_in_bytes"),
                memory_peak_bytes=_number(memory / "memory.max_usage_in_bytes"),
                cpu_seconds=_number(self.group(name, "cpuacct") / "cpuacct.usage") / 1e9,
                pids=_number(pids / "pids.current"),
                oom_kills=self.oom_kills(name),
                pids_refused=_field(pids / "pids.events", "max"),
            )
        peak = memory / "memory.peak"
        return Usage(
            memory_bytes=_number(memory / "memory.current"),
            memory_peak_bytes=_number(peak) if peak.exists() else 0,
            cpu_seconds=_field(self.group(name, "cpu") / "cpu.stat", "usage_usec") / 1e6,
            pids=_number(pids / "pids.current"),
            oom_kills=self.oom_kills(name),
            pids_refused=_field(pids / "pids.events", "max"),
        )

    def remove(self, name: str) -> None:
        """Kill what is in a sandbox's groups and remove them in all hierarchies; blocks until they are gone.

        Raises:
            TimeoutError: processes do not die.
            OSError: a group stays busy.
        """
        fd = self._oom_fds.pop(name, None)
        if fd is not None:
            os.close(fd)
        busy = [group for root in self.hierarchies.values() if not _removed(group := root / self.parent / name)]
        if busy:
            self.kill(name)
        for group in busy:
            _remove_tree(group)

    def remove_parent(self) -> None:
        """Remove the parent, and what is above it if it is ours and empty."""
        for root in self.hierarchies.values():
            path = root / self.parent
            while path != root:
                try:
                    path.rmdir()
                except FileNotFoundError:
                    pass
                except OSError:
                    break
                path = path.parent


def _bound(file: Path, limit: int) -> None:
    try:
        file.write_text(str(limit))
    except OSError as error:
        # Adopted sandboxes use more already: the old bound stays.
        if error.errno != errno.EBUSY:
            raise


def _enable(group: Path) -> None:
    """Let the children of a v2 group be limited, as far as the controllers are there."""
    there = (group / "cgroup.controllers").read_text().split()
    wanted = [f"+{name}" for name in ("cpu", "cpuset", "io", "memory", "pids") if name in there]
    (group / "cgroup.subtree_control").write_text(" ".join(wanted))


def _removed(group: Path) -> bool:
    try:
        group.rmdir()
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno not in {errno.EBUSY, errno.ENOTEMPTY}:
            raise
        return False
    return True


def _remove_tree(group: Path) -> None:
    deadline = time.monotonic() + BUSY_SECONDS
    delay = 0.001
    while not _removed(group):
        if time.monotonic() > deadline:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(group))
        for child in _children(group):
            _remove_tree(child)
        # The kernel has no event for a v1 group that becomes removable.
        time.sleep(delay)
        delay = min(delay * 2, 0.05)


def _children(group: Path) -> Iterable[Path]:
    try:
        return [entry for entry in group.iterdir() if entry.is_dir()]
    except FileNotFoundError:
        return ()


def _number(path: Path) -> int:
    return int(path.read_text())


def _field(path: Path, name: str) -> int:
    try:
        return _value(path.read_bytes(), name.encode())
    except OSError:
        return 0


def _value(text: bytes, name: bytes) -> int:
    for line in text.splitlines():
        key, _, value = line.partition(b" ")
        if key == name:
            return int(value)
    return 0
