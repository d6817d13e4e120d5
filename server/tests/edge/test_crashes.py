"""An edge that is killed at each of its steps in turn: nothing is lost, nothing leaks, a repeated request works."""

from __future__ import annotations

import asyncio
import os
import sys
import traceback

import pytest

from opendsec.api.models import TERMINAL
from opendsec_server.edge.execlog import ExecLog
from opendsec_server.edge.journal import Journal
from opendsec_server.testing.backend import FakeBackend
from opendsec_server.testing.guest import FakeGuest

from .conftest import Host, create, shell


class FolderBackend(FakeBackend):
    """Sandboxes of which a folder remains when the process dies."""

    def __init__(self, root):
        super().__init__()
        self.root = root
        root.mkdir(exist_ok=True)
        for path in root.iterdir():
            self.guests[path.name] = FakeGuest()

    async def start(self, spec):
        (self.root / spec.id).mkdir()
        try:
            return await super().start(spec)
        except BaseException:
            (self.root / spec.id).rmdir()
            raise

    async def remove(self, sandbox_id):
        await super().remove(sandbox_id)
        if (self.root / sandbox_id).exists():
            (self.root / sandbox_id).rmdir()


class Fuse:
    """Ends the process before or after the n-th step."""

    def __init__(self, step: int):
        self.left = step

    def burn(self) -> None:
        self.left -= 1
        if self.left == 0:
            os._exit(99)

    def wrap(self, function):
        def wrapped(*args):
            self.burn()
            result = function(*args)
            self.burn()
            return result

        return wrapped

    def wrap_async(self, function):
        async def wrapped(*args):
            self.burn()
            result = await function(*args)
            self.burn()
            return result

        return wrapped


def host_at(folder) -> Host:
    """The host as a new process finds it."""
    host = Host(folder)
    host.backend = FolderBackend(folder / "sandboxes")
    return host


async def life_of_a_sandbox(host: Host, told: int) -> None:
    """Create, run a command, stop; tells what was answered."""
    edge = await host.boot()
    box = await edge.create(create(request_id="r"))
    os.write(told, f"created {box.id}\n".encode())
    result = await edge.run(box.id, shell("echo out", id="e"))
    assert result.stdout == b"out\n"
    os.write(told, b"ran\n")
    await edge.stop(box.id)
    os.write(told, b"stopped\n")


def killed_at(folder, step: int) -> tuple[bool, list[str]]:
    """Run the life in a process of its own that dies at a step; tells whether it died and what it had answered."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            host, fuse = host_at(folder), Fuse(step)
            Journal.put = fuse.wrap(Journal.put)
            ExecLog.append_raw = fuse.wrap(ExecLog.append_raw)
            FolderBackend.start = fuse.wrap_async(FolderBackend.start)
            FolderBackend.remove = fuse.wrap_async(FolderBackend.remove)
            asyncio.run(life_of_a_sandbox(host, writing))
            os._exit(0)
        except BaseException:
            traceback.print_exc(file=sys.__stderr__)
        os._exit(1)
    os.close(writing)
    _, status = os.waitpid(child, 0)
    with os.fdopen(reading) as pipe:
        told = pipe.read().split("\n")[:-1]
    code = os.waitstatus_to_exitcode(status)
    assert code in {0, 99}
    return code == 99, told


async def aftermath(folder, told: list[str]) -> None:
    """Check the host with a new edge, use it, and leave nothing."""
    host = host_at(folder)
    edge = await host.boot()
    backend = host.backend
    live = {record.id for record in edge.list({}, None, (), None) if record.state not in TERMINAL}
    assert await backend.inventory() == live
    created = told[0].split()[1] if told else None
    if created is not None and "stopped" not in told:
        # What was answered is not taken back: it lives, or its delete was finished.
        record = edge.get(created)
        assert (record.state, record.cause) in {("running", None), ("stopped", "deleted")}
    if "ran" in told:
        result = await edge.run(created, shell("echo twice", id="e"))
        assert (result.state, result.exit_code, result.stdout) == ("exited", 0, b"out\n")
    again = await edge.create(create(request_id="r"))
    assert created is None or again.id == created
    if again.state == "running":
        assert (await edge.run(again.id, shell("echo more", id="more"))).stdout == b"more\n"
    assert (await edge.stop(again.id)).state == "stopped"
    assert await backend.inventory() == set()
    assert all(record.state in TERMINAL for record in edge.list({}, None, (), None))
    await host.close()


@pytest.mark.slow
def test_killed_at_any_step_it_loses_and_leaks_nothing(tmp_path):
    """Each step of journal, exec log and backend in turn is the last one, before it and after it."""
    step, died = 0, True
    while died:
        step += 1
        folder = tmp_path / str(step)
        folder.mkdir()
        died, told = killed_at(folder, step)
        asyncio.run(aftermath(folder, told))
    assert step > 15
