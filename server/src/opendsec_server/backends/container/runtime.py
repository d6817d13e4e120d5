"""OCI runtimes: starting a bundle, and finding out which runtimes this host has."""

from __future__ import annotations

import fcntl
import os
import select
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from opendsec.api.errors import DiskFull, Unavailable, UnsupportedCapability
from opendsec_server.linux.processes import kill, open_pidfd

#: Bytes of a runtime's log that are looked at.
_LOG_BYTES = 64 * 1024
#: How long a runtime may take to start a container, in seconds.
RUN_SECONDS = 50.0
#: How long a killed runtime may take to end, in seconds.
ORPHAN_SECONDS = 10.0


class Runtime(Protocol):
    """Starts a container from a bundle; it is ended and removed without the runtime's help."""

    name: str

    def start(self, sandbox_id: str, bundle: Path, descriptors: Sequence[int]) -> int:
        """Start a bundle detached and return pid 1. Blocking.

        Args:
            sandbox_id: name of the container.
            bundle: folder of its ``config.json``; log and pid file go there too.
            descriptors: what pid 1 gets as descriptors 3, 4, …

        Raises:
            Unavailable: the runtime failed.
        """

    def forget(self, sandbox_id: str) -> None:
        """Remove what the runtime keeps of a container that has ended. Unknown ids are fine."""

    def end_orphans(self) -> None:
        """Kill runtimes of an edge that is no more. Blocking; only before the first start."""

    def names(self) -> set[str]:
        """Return the ids of all containers the runtime keeps something of."""


class _LogLine(msgspec.Struct):
    msg: str = ""
    level: str = ""


class Runc:
    """runc, called as ``runc run --detach``; its state folder is removed by us, which saves a second process."""

    name = "runc"

    def __init__(self, state: Path) -> None:
        self._state = state
        path = shutil.which("runc")
        if path is None:
            raise UnsupportedCapability("runc is not installed")
        self._path = path

    def start(self, sandbox_id: str, bundle: Path, descriptors: Sequence[int]) -> int:
        """Start a bundle in the calling thread's mount namespace."""
        log, pid_file = bundle / "runc.log", bundle / "pid"
        arguments = [
            "runc", "--root", str(self._state), "--log", str(log), "--log-format", "json", "run", "--detach",
            "--preserve-fds", str(len(descriptors)), "--pid-file", str(pid_file), "--bundle", str(bundle), sandbox_id,
        ]  # fmt: skip
        null = os.devnull
        # First out of the way of each other, then into place.
        apart = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in descriptors]
        try:
            # posix_spawn neither copies this process' page tables nor runs Python between fork and exec.
            child = os.posix_spawn(
                self._path,
                arguments,
                {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "GOMAXPROCS": "1"},
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, null, os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_OPEN, 1, null, os.O_WRONLY, 0),
                    (os.POSIX_SPAWN_OPEN, 2, null, os.O_WRONLY, 0),
                    *((os.POSIX_SPAWN_DUP2, fd, number) for number, fd in enumerate(apart, 3)),
                ],
            )
        finally:
            for fd in apart:
                os.close(fd)
        status = _wait(child)
        if status != 0:
            raise self._failure(log, os.waitstatus_to_exitcode(status))
        return int(pid_file.read_text())

    def _failure(self, log: Path, code: int) -> Exception:
        reason = f"exit code {code}"
        if log.exists():
            with log.open("rb") as file:
                for line in file.read(_LOG_BYTES).splitlines():
                    try:
                        entry = msgspec.json.decode(line, type=_LogLine)
                    except msgspec.MsgspecError:
                        continue
                    if entry.level == "error":
                        reason = entry.msg
        if "no space left" in reason or "disk quota exceeded" in reason:
            return DiskFull(f"no room to start the sandbox: {reason}")
        if "OOM" in reason or "signal: killed" in reason:
            return UnsupportedCapability(
                f"the memory limit is too small to start in: {reason}", field="memory_limit_mb"
            )
        return Unavailable(f"runc: {reason}")

    def forget(self, sandbox_id: str) -> None:
        """Remove runc's state folder of a container."""
        shutil.rmtree(self._state / sandbox_id, ignore_errors=True)

    def end_orphans(self) -> None:
        """Kill what an edge that was killed has left half-way: a runtime at work would go on making a container.

        Its ``runc init`` ends by itself when its pipe closes, or is in the sandbox's cgroup already.
        """
        for pid in at_work(self._state):
            pidfd = open_pidfd(pid)
            if pidfd is not None:
                kill(pidfd)
                select.select([pidfd], [], [], ORPHAN_SECONDS)
                os.close(pidfd)

    def names(self) -> set[str]:
        """Return the ids of all state folders."""
        return {entry.name for entry in self._state.iterdir()} if self._state.exists() else set()


def at_work(state: Path) -> list[int]:
    """Return the process ids of all runc calls with this state folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if words[:3] == [b"runc", b"--root", os.fsencode(state)]:
                found.append(int(entry.name))
    return found


def _wait(child: int) -> int:
    """Return the status of a child; one that takes too long is killed.

    Raises:
        Unavailable: it took too long.
    """
    pidfd = os.pidfd_open(child)
    try:
        poller = select.poll()
        poller.register(pidfd, select.POLLIN)
        in_time = bool(poller.poll(int(RUN_SECONDS * 1000)))
        if not in_time:
            kill(pidfd)
    finally:
        os.close(pidfd)
    _, status = os.waitpid(child, 0)
    if not in_time:
        raise Unavailable(f"the runtime did not start the sandbox within {RUN_SECONDS:g} s")
    return status


def missing_runtimes() -> dict[str, str]:
    """Return why each of the other runtimes cannot be used here."""
    reasons = {}
    for name in ("crun", "runsc"):
        path = shutil.which(name)
        if path is None:
            reasons[name] = "it is not installed"
        else:
            version = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
            reasons[name] = (
                f"this version of OpenDSec does not drive it ({version.splitlines()[0] if version else path})"
            )
    return reasons
