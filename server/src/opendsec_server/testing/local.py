"""A real ``opendsec serve`` on folders of its own: for functional tests, benchmarks and the demo.

``LocalServer`` starts the supervisor as a child process, waits until it says that it is ready, finds the processes
under it, and counts at the end what they left on the host.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Self

import psutil

from opendsec.api.errors import Unavailable
from opendsec_server import leaks
from opendsec_server.linux.cgroups import Cgroups
from opendsec_server.linux.mounts import mountinfo, umount
from opendsec_server.platform.config import Config, load

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)

ProgramName = Literal["edge", "apiserver"]


class LocalServer:
    """One node on this machine, in folders of its own.

    Args:
        data_dir: persistent state; a new temporary folder if absent, removed by ``discard``.
        settings: further ``OPENDSEC_<SECTION>__<KEY>`` variables.
    """

    def __init__(self, data_dir: Path | None = None, settings: Mapping[str, str] | None = None) -> None:
        self._owns_data = data_dir is None
        self.data_dir = data_dir or Path(tempfile.mkdtemp(prefix="opendsec-data-"))
        self.data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Under /run: the path of a Unix socket holds 107 bytes.
        self.run_dir = Path(tempfile.mkdtemp(prefix="opendsec-", dir="/run"))
        name = self.run_dir.name
        self.settings = {
            "OPENDSEC_DATA_DIR": str(self.data_dir),
            "OPENDSEC_RUN_DIR": str(self.run_dir),
            "OPENDSEC_CGROUP_PARENT": name,
            **(settings or {}),
        }
        self.log = self.data_dir / "serve.log"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.discard()
            raise
        return self

    def __exit__(self, *_exc: object) -> None:
        try:
            self.stop()
        finally:
            self.discard()

    @property
    def config(self) -> Config:
        """The configuration that the server runs with."""
        return load(environ=self.settings)

    @property
    def url(self) -> str:
        """Address for clients."""
        return f"unix://{self.run_dir}/api.sock"

    @property
    def api_key(self) -> str:
        """Key of the administrator."""
        return (self.data_dir / "admin.key").read_text().strip()

    @property
    def environ(self) -> dict[str, str]:
        """Environment for the command line of this server."""
        base = {name: value for name, value in os.environ.items() if not name.startswith("OPENDSEC_")}
        return {**base, **self.settings}

    def start(self, seconds: float = 60.0) -> None:
        """Start the server and return when edge and apiserver answer.

        Raises:
            Unavailable: it did not become ready; the text has the end of its log.
        """
        reader, writer = os.pipe()
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "opendsec.cli.main", "serve", "--ready-fd", str(writer)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(writer,),
                env=self.environ,
                start_new_session=True,
                # Whoever kills the tests does not leave a server behind.
                preexec_fn=lambda: _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0),
            )
        os.close(writer)
        with os.fdopen(reader, "rb") as pipe:
            ready, _, _ = select.select([pipe], [], [], seconds)
            line = pipe.readline() if ready else b""
        if not line:
            self.kill()
            raise Unavailable(f"opendsec serve did not become ready:\n{self.log_tail()}")
        json.loads(line)

    def stop(self, seconds: float = 60.0) -> None:
        """Stop the server politely; sandboxes live on until the next start.

        Raises:
            TimeoutExpired: it did not end in time and was killed.
        """
        process = self._process
        if process is None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        self._process = None

    def kill(self) -> None:
        """Kill the supervisor and wait until the kernel has killed edge and apiserver with it."""
        if self._process is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                children = psutil.Process(self._process.pid).children()
                self._process.kill()
                psutil.wait_procs(children, timeout=10)
            self._process.wait()
            self._process = None

    def discard(self) -> None:
        """Remove the folders (data only if they were made here) and whatever a failed test has left running in them."""
        self.kill()
        scrub(self.config)
        shutil.rmtree(self.run_dir, ignore_errors=True)
        if self._owns_data:
            shutil.rmtree(self.data_dir, ignore_errors=True)

    def program(self, name: ProgramName) -> int:
        """Return the process id of a program.

        Raises:
            ProcessLookupError: it does not run at this moment.
        """
        module = f"opendsec_server.{name}.main"
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.supervisor).children():
                with contextlib.suppress(psutil.NoSuchProcess):
                    if child.status() != psutil.STATUS_ZOMBIE and module in child.cmdline():
                        return int(child.pid)
        raise ProcessLookupError(f"no {name} runs")

    @property
    def supervisor(self) -> int:
        """Process id of ``opendsec serve``."""
        if self._process is None:
            raise ProcessLookupError("the server does not run")
        return self._process.pid

    async def wait_program(self, name: ProgramName, seconds: float = 60.0) -> int:
        """Return the process id of a program, waiting while the supervisor restarts it."""
        deadline = time.monotonic() + seconds
        while True:
            with contextlib.suppress(ProcessLookupError):
                return self.program(name)
            if time.monotonic() > deadline:
                raise ProcessLookupError(f"no {name} runs:\n{self.log_tail()}")
            await asyncio.sleep(0.02)

    def leaks(self) -> dict[str, list[str]]:
        """Return what this node has left on the host without an owner, by kind; empty if nothing."""
        report = leaks.report(self.config)
        kinds = (name for name in report.__struct_fields__ if name != "items")
        return {kind: report.items.get(kind, ["?"]) for kind in kinds if getattr(report, kind)}

    def subvolumes(self) -> list[str]:
        """Return the btrfs subvolumes of this node's scratch file system, by path."""
        for mounted in mountinfo(self.program("edge")):
            if mounted.fstype == "btrfs" and mounted.target.startswith(f"{self.data_dir}/"):
                listing = subprocess.run(
                    ["btrfs", "subvolume", "list", mounted.target], capture_output=True, text=True, check=True
                )
                return [line.split(" path ", 1)[1] for line in listing.stdout.splitlines()]
        return []

    def log_tail(self, lines: int = 40) -> str:
        """Return the end of the server's log."""
        if not self.log.exists():
            return ""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


def scrub(config: Config) -> None:
    """Kill and unmount what a node has left: for tests that failed half way; a clean stop leaves nothing to do."""
    groups = [root / config.cgroup for root in Cgroups(config.cgroup).hierarchies.values()]
    groups = [path for path in groups if path.is_dir()]
    members = [child for group in groups for child in (*group.rglob("*/"), group)]
    for member in members:
        # What is being removed may be gone at any moment.
        with contextlib.suppress(OSError):
            for pid in (member / "cgroup.procs").read_text().split():
                os.kill(int(pid), signal.SIGKILL)
    for member in sorted(members, key=lambda path: len(path.parts), reverse=True):
        _remove_group(member)
    for mounted in reversed(mountinfo()):
        if mounted.target.startswith((f"{config.data_dir}/", f"{config.run_dir}/")):
            with contextlib.suppress(OSError):
                umount(mounted.target, lazy=True)


def _remove_group(group: Path, seconds: float = 5.0) -> None:
    """Remove a cgroup whose processes are about to be gone."""
    deadline = time.monotonic() + seconds
    while group.is_dir():
        try:
            group.rmdir()
        except OSError:
            if time.monotonic() > deadline:
                return
            time.sleep(0.02)
