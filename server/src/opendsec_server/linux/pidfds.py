"""Processes of other namespaces, held by pidfd so that a reused number is never mistaken."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
from pathlib import Path

CAP_SYS_RESOURCE = 24


def has_capability(number: int) -> bool:
    """Tell whether this process holds a capability."""
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "CapEff":
            return bool(int(value, 16) >> number & 1)
    return False


def in_cgroup(pid: int, group: str) -> bool:
    """Tell whether a process lives in a cgroup whose path ends in ``group``; False if there is no such process."""
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    except OSError:
        return False
    return any(line.rpartition(":")[2].endswith(f"/{group}") for line in lines)


def open_pidfd(pid: int) -> int | None:
    """Return a descriptor of a process, or None if it is gone; the caller closes it."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None


def is_dead(pidfd: int) -> bool:
    """Tell whether the process has ended."""
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(0))


def kill(pidfd: int) -> None:
    """Send SIGKILL; an ended process is fine."""
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)


async def wait_dead(pidfd: int) -> None:
    """Return when the process has ended (a zombie has)."""
    loop = asyncio.get_running_loop()
    done = loop.create_future()
    # Several may wait for one process, and a loop knows one reader a descriptor: each waits on its own.
    own = os.dup(pidfd)
    loop.add_reader(own, _settle, done)
    try:
        await done
    finally:
        loop.remove_reader(own)
        os.close(own)


def _settle(done: asyncio.Future[None]) -> None:
    if not done.done():
        done.set_result(None)
