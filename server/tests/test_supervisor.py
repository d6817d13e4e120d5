"""The supervisor: starts, restarts, stops and never orphans its programs."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from opendsec.api.errors import Conflict, Unavailable
from opendsec_server.platform.config import ApiserverConfig, Config
from opendsec_server.supervisor import Program, Supervisor, environment, hold_data_dir, wait_healthy

#: A program that answers /healthz on the socket argv[1] and appends its pid to argv[2]; argv[3] may change its manners.
SERVER = """
import os, signal, socket, sys
path, log, manner = sys.argv[1:4]
with open(log, "a") as file:
    file.write(f"{os.getpid()}\\n")
if manner == "dies":
    sys.exit(3)
if manner == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.path.exists(path):
    os.unlink(path)
server = socket.socket(socket.AF_UNIX)
server.bind(path)
server.listen()
while True:
    peer, _ = server.accept()
    peer.recv(1000)
    peer.sendall(b"HTTP/1.1 200 OK\\r\\ncontent-length: 0\\r\\n\\r\\n")
    peer.close()
"""


def program(folder: Path, name: str, manner: str = "") -> Program:
    socket = folder / f"{name}.sock"
    argv = (sys.executable, "-S", "-c", SERVER, str(socket), str(folder / f"{name}.pids"), manner)
    return Program(name, argv, f"unix:{socket}")


def pids(folder: Path, name: str) -> list[int]:
    path = folder / f"{name}.pids"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


async def until(condition, seconds=20.0):
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


class Running:
    """A supervisor in this process."""

    def __init__(self, *programs: Program, **options) -> None:
        self.ready = asyncio.Event()
        self.supervisor = Supervisor(programs, environ=dict(os.environ), on_ready=lambda _: self.ready.set(), **options)

    async def __aenter__(self):
        self.task = asyncio.ensure_future(self.supervisor.run())
        async with asyncio.timeout(20):
            await self.ready.wait()
        return self.supervisor

    async def __aexit__(self, *_):
        self.supervisor.stop_nowait()
        await self.task


async def test_it_is_ready_when_all_answer_and_stops_them(tmp_path):
    """Both programs run while it runs, and none after."""
    async with Running(program(tmp_path, "a"), program(tmp_path, "b")) as supervisor:
        running = supervisor.pids
        assert set(running) == {"a", "b"}
        assert all(alive(pid) for pid in running.values())
    assert not any(alive(pid) for pid in running.values())


async def test_a_program_that_dies_is_restarted_at_once(tmp_path):
    """A program that had answered is started again without a pause, as often as it dies."""
    async with Running(program(tmp_path, "a"), program(tmp_path, "b"), pauses=(30.0,)) as supervisor:
        for round_ in range(1, 4):
            before = supervisor.pids
            os.kill(before["a"], signal.SIGKILL)
            await until(lambda n=round_: supervisor.restarts["a"] == n and "a" in supervisor.pids)
            await wait_healthy(f"unix:{tmp_path}/a.sock")
            await until(supervisor._healthy["a"].is_set)
            assert supervisor.pids["b"] == before["b"]


async def test_a_program_that_never_starts_is_given_up(tmp_path):
    """At first start, a program that keeps dying ends the supervisor with its name; the other one is stopped."""
    supervisor = Supervisor(
        (program(tmp_path, "a"), program(tmp_path, "b", "dies")), environ=dict(os.environ), pauses=(0.0, 0.01)
    )
    with pytest.raises(Unavailable, match="b does not start: it ended with status 3"):
        await supervisor.run()
    assert len(pids(tmp_path, "b")) == 3
    assert not any(alive(pid) for pid in pids(tmp_path, "a") + pids(tmp_path, "b"))


async def test_a_program_that_ignores_the_signal_is_killed(tmp_path):
    """Stopping takes a bounded time."""
    async with Running(program(tmp_path, "a", "stubborn"), stop_seconds=0.2) as supervisor:
        pid = supervisor.pids["a"]
    assert not alive(pid)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_signals_stop_everything(tmp_path, number):
    """SIGTERM and SIGINT to the supervisor end the programs and then itself."""
    running = Running(program(tmp_path, "a"))
    async with running as supervisor:
        pid = supervisor.pids["a"]
        os.kill(os.getpid(), number)
        await running.task
        assert not alive(pid)


OUTER = """
import asyncio, os, sys
from opendsec_server.supervisor import Program, Supervisor
programs = tuple(Program(name, tuple(argv), address) for name, argv, address in {programs!r})
asyncio.run(Supervisor(programs, environ=dict(os.environ), on_ready=lambda pids: print("ready", flush=True)).run())
"""


def test_killing_the_supervisor_leaves_no_orphan(tmp_path):
    """SIGKILL of the supervisor ends both programs as well."""
    programs = [(p.name, p.argv, p.address) for p in (program(tmp_path, "a"), program(tmp_path, "b", "stubborn"))]
    with subprocess.Popen([sys.executable, "-c", OUTER.format(programs=programs)], stdout=subprocess.PIPE) as outer:
        assert outer.stdout is not None
        assert outer.stdout.readline() == b"ready\n"
        children = pids(tmp_path, "a") + pids(tmp_path, "b")
        outer.kill()
    deadline = time.monotonic() + 5
    while any(alive(pid) for pid in children) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(alive(pid) for pid in children)


def test_a_data_folder_has_one_supervisor(tmp_path):
    """The second is told who holds the folder; once the first is gone the next may start."""
    config = Config(data_dir=str(tmp_path / "d"), run_dir=str(tmp_path / "r"))
    first = hold_data_dir(config)
    with pytest.raises(Conflict, match=f"already runs on .* \\(process {os.getpid()}\\)"):
        hold_data_dir(config)
    os.close(first)
    os.close(hold_data_dir(config))


def test_the_programs_get_the_same_configuration(tmp_path):
    """What the command line said reaches both programs through their environment."""
    config = Config(
        data_dir=str(tmp_path), run_dir="/run/x", apiserver=ApiserverConfig(listen=("unix:/run/x/a.sock", "[::1]:80"))
    )
    environ = environment(config, Path("/etc/o.toml"), {"PATH": "/bin"})
    assert environ == {
        "PATH": "/bin",
        "OPENDSEC_CONFIG": "/etc/o.toml",
        "OPENDSEC_DATA_DIR": str(tmp_path),
        "OPENDSEC_RUN_DIR": "/run/x",
        "OPENDSEC_APISERVER__LISTEN": "unix:/run/x/a.sock,[::1]:80",
    }
    assert json.dumps(environ)
