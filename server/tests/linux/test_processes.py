"""Processes held by descriptor."""

from __future__ import annotations

import asyncio
import os
import subprocess

import pytest

from opendsec_server.linux import processes


@pytest.fixture
def child():
    """A process that sleeps."""
    made = subprocess.Popen(["sleep", "1000"])
    yield made
    made.kill()
    made.wait()


@pytest.fixture
def pidfd(child):
    """A descriptor of it."""
    fd = processes.open_pidfd(child.pid)
    assert fd is not None
    yield fd
    os.close(fd)


async def test_all_who_wait_learn_of_a_death(child, pidfd):
    """Two waiters on one descriptor, and one who gives up."""
    waiters = [asyncio.create_task(processes.wait_dead(pidfd)) for _ in range(3)]
    await asyncio.sleep(0)
    waiters[2].cancel()
    assert not processes.is_dead(pidfd)
    processes.kill(pidfd)
    await asyncio.gather(*waiters[:2])
    assert processes.is_dead(pidfd)
    with pytest.raises(asyncio.CancelledError):
        await waiters[2]


def test_the_dead_are_told_from_the_living(child, pidfd):
    """A zombie counts as dead, killing it again is fine, and a reaped one has no descriptor."""
    processes.kill(pidfd)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert processes.is_dead(pidfd)
    processes.kill(pidfd)
    child.wait()
    assert processes.open_pidfd(child.pid) is None
    assert not processes.in_cgroup(child.pid, "any")


def test_capabilities_are_read_from_the_kernel():
    """Root has the one to kill."""
    assert processes.has_capability(5) == (os.geteuid() == 0)
