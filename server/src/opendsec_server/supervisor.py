"""``opendsec serve``: one edge and one apiserver on this machine, as two ordinary processes joined by a Unix socket.

The supervisor holds the data folder (a second one is refused), starts both, restarts one that dies (at once if it had
answered ``/healthz``, with a growing pause while it keeps dying before it does), passes on SIGTERM and SIGINT, and
waits. Killed with SIGKILL it takes both with it (parent-death signal); sandboxes live on and are adopted by the next
start. It talks to its children by signals and ``/healthz`` only, and imports nothing of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

import msgspec
import structlog

from opendsec.api.errors import Conflict, Unavailable
from opendsec_server.platform.config import Config

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)
_log = structlog.get_logger(__name__)

#: Pauses before restarts of a program that ended before it ever answered, in seconds; the last one repeats.
PAUSES = (0.0, 0.1, 0.3, 1.0, 2.0)


class Program(msgspec.Struct, frozen=True):
    """A child process."""

    name: str
    argv: tuple[str, ...]
    #: Where it answers ``/healthz``: ``unix:<path>`` or ``host:port``.
    address: str


class Ready(msgspec.Struct, frozen=True):
    """What ``serve`` says once both programs answer."""

    addresses: tuple[str, ...]
    key_file: str
    edge_pid: int
    apiserver_pid: int


def programs(config: Config) -> tuple[Program, Program]:
    """Return the two programs of the embedded installation."""
    python = (sys.executable, "-m")
    return (
        Program("edge", (*python, "opendsec_server.edge.main"), config.edge_address),
        Program("apiserver", (*python, "opendsec_server.apiserver.main"), config.api_addresses[0]),
    )


def hold_data_dir(config: Config) -> int:
    """Lock the data folder for this process and return the descriptor that holds the lock.

    Raises:
        Conflict: another supervisor holds it.
        Unavailable: the folder cannot be made.
    """
    path = config.data / "serve.lock"
    try:
        config.data.mkdir(parents=True, exist_ok=True, mode=0o700)
        config.run.mkdir(parents=True, exist_ok=True, mode=0o755)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise Unavailable(f"cannot use {error.filename}: {error.strerror}") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(fd, 64, 0).decode("ascii", "replace").strip()
        os.close(fd)
        raise Conflict(
            f"opendsec serve already runs on {config.data} (process {holder or 'unknown'}): "
            "stop it, or choose another --data-dir and --run-dir",
            pid=holder,
        ) from None
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd


class Supervisor:
    """Runs programs until told to stop.

    Args:
        programs: what to run, in the order of their start; they stop in the reverse order.
        environ: environment of the programs.
        on_ready: called once when all answer ``/healthz``.
        stop_seconds: how long a program may take to stop before it is killed.
        pauses: pauses before the restarts of a program that never answered, in seconds.
    """

    def __init__(
        self,
        programs: tuple[Program, ...],
        *,
        environ: Mapping[str, str],
        on_ready: Callable[[Mapping[str, int]], None] = lambda _pids: None,
        stop_seconds: float = 30.0,
        pauses: tuple[float, ...] = PAUSES,
    ) -> None:
        self._programs = programs
        self._environ = dict(environ)
        self._on_ready = on_ready
        self._stop_seconds = stop_seconds
        self._pauses = pauses
        self._stop = asyncio.Event()
        self._children: dict[str, asyncio.subprocess.Process] = {}
        self._healthy = {program.name: asyncio.Event() for program in programs}
        self._announced = False
        self.restarts: dict[str, int] = dict.fromkeys((program.name for program in programs), 0)

    def stop_nowait(self) -> None:
        """Begin to stop."""
        self._stop.set()

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by name of program."""
        return {name: child.pid for name, child in self._children.items() if child.returncode is None}

    async def run(self) -> None:
        """Run until ``stop_nowait``, SIGTERM or SIGINT; return when all programs have ended.

        Raises:
            Unavailable: a program keeps ending before everything was ready for the first time.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop_nowait)
        tasks: list[asyncio.Task[None]] = []
        try:
            for program in self._programs:
                await self._start(program)
                tasks.append(asyncio.create_task(self._keep(program)))
            ready = asyncio.create_task(self._announce())
            stop = asyncio.create_task(self._stop.wait())
            await asyncio.wait({stop, *tasks}, return_when=asyncio.FIRST_COMPLETED)
            for task in (ready, stop):
                task.cancel()
            await asyncio.gather(ready, stop, return_exceptions=True)
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._end_all()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    # -- inside ----------------------------------------------------------------------------------------------------

    async def _start(self, program: Program) -> None:
        self._children[program.name] = await asyncio.create_subprocess_exec(
            *program.argv,
            env=self._environ,
            stdin=asyncio.subprocess.DEVNULL,
            preexec_fn=_die_with(os.getpid()),
            start_new_session=True,  # a Ctrl-C at the terminal reaches the supervisor only, which passes it on
        )

    async def _keep(self, program: Program) -> None:
        failures = 0
        healthy = self._healthy[program.name]
        while True:
            health = asyncio.create_task(self._note_health(program))
            try:
                status = await self._children[program.name].wait()
            finally:
                health.cancel()
            failures = 0 if healthy.is_set() else failures + 1
            healthy.clear()
            self.restarts[program.name] += 1
            _log.warning("program_ended", program=program.name, status=status, failures=failures)
            if not self._announced and failures > len(self._pauses):
                raise Unavailable(f"{program.name} does not start: it ended with status {status}; its log says why")
            if failures:
                await asyncio.sleep(self._pauses[min(failures, len(self._pauses)) - 1])
            await self._start(program)

    async def _note_health(self, program: Program) -> None:
        await wait_healthy(program.address)
        self._healthy[program.name].set()

    async def _announce(self) -> None:
        for event in self._healthy.values():
            await event.wait()
        self._announced = True
        self._on_ready(self.pids)

    async def _end_all(self) -> None:
        for program in reversed(self._programs):
            child = self._children.get(program.name)
            if child is None or child.returncode is not None:
                continue
            with contextlib.suppress(ProcessLookupError):
                child.send_signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(self._stop_seconds):
                    await child.wait()
            except TimeoutError:
                _log.warning("program_killed", program=program.name, after_seconds=self._stop_seconds)
                with contextlib.suppress(ProcessLookupError):
                    child.kill()
                await child.wait()


def _die_with(parent: int) -> Callable[[], None]:
    """Return what a child runs before its program: let the kernel kill it when the supervisor dies."""

    def prepare() -> None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died before the line above
            os._exit(1)

    return prepare


async def wait_healthy(address: str, first_delay: float = 0.02) -> None:
    """Return when a program answers ``GET /healthz`` with 200; the pause between two attempts grows to 0.2 s."""
    delay = first_delay
    while True:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, TimeoutError):
            async with asyncio.timeout(5.0), _connect(address) as (reader, writer):
                writer.write(b"GET /healthz HTTP/1.1\r\nhost: local\r\nconnection: close\r\n\r\n")
                if b" 200 " in await reader.readline():
                    return
        await asyncio.sleep(delay)
        delay = min(delay * 1.5, 0.2)


@contextlib.asynccontextmanager
async def _connect(address: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    if address.startswith("unix:"):
        reader, writer = await asyncio.open_unix_connection(address.removeprefix("unix:"))
    else:
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def environment(config: Config, config_file: Path | None, base: Mapping[str, str]) -> dict[str, str]:
    """Return the environment that gives both programs exactly this configuration's places and addresses."""
    environ = dict(base)
    if config_file is not None:
        environ["OPENDSEC_CONFIG"] = str(config_file.absolute())
    environ["OPENDSEC_DATA_DIR"] = str(config.data.absolute())
    environ["OPENDSEC_RUN_DIR"] = str(config.run.absolute())
    environ["OPENDSEC_APISERVER__LISTEN"] = ",".join(config.api_addresses)
    return environ


def ready_line(ready: Ready) -> str:
    """Return what goes to ``--ready-fd``: one JSON line."""
    return json.dumps(msgspec.to_builtins(ready)) + "\n"


async def serve(config: Config, *, config_file: Path | None, announce: Callable[[Ready], None]) -> None:
    """Run edge and apiserver until stopped.

    Raises:
        Conflict: another supervisor holds the data folder.
        Unavailable: a program does not start.
    """
    lock = hold_data_dir(config)

    def ready(pids: Mapping[str, int]) -> None:
        key_file = str(config.data / "admin.key")
        announce(Ready(config.api_addresses, key_file, pids.get("edge", 0), pids.get("apiserver", 0)))

    try:
        await Supervisor(programs(config), environ=environment(config, config_file, os.environ), on_ready=ready).run()
    finally:
        os.close(lock)
