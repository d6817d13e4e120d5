"""Containers: EROFS layers and a writable upper under overlayfs, started by an OCI runtime, chronus as pid 1.

What there is of a sandbox on the host, in the order it is made:

1. its socket file ``<run_dir>/s/<id>``, which exists on the host only;
2. the layers' shared EROFS mounts, counted for it;
3. its scratch folder (``upper``, ``work``, ``config.json``, ``pid``);
4. the runtime's state folder, its cgroups, its processes.

The overlay is mounted in a mount namespace of the thread that starts the runtime: nobody else ever sees it, and it goes
with the sandbox's last process. ``remove`` goes backwards and is complete from whatever line a crash left.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import os
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import psutil
import structlog

from opendsec.api.errors import DiskFull, PlatformError, SandboxGone, Unavailable, UnsupportedCapability
from opendsec_server.backends.container.filter import filter_file
from opendsec_server.backends.container.oci import OciConfig
from opendsec_server.backends.container.rootfs import copy_root_attributes, write_identity
from opendsec_server.backends.container.runtime import Runc, missing_runtimes
from opendsec_server.backends.container.scratch import make_scratch
from opendsec_server.backends.protocol import Capabilities
from opendsec_server.channel.client import connect
from opendsec_server.channel.interface import Channel
from opendsec_server.core.spec import SandboxSpec, Usage
from opendsec_server.images.interface import LayerMounts
from opendsec_server.linux import processes
from opendsec_server.linux.cgroups import Cgroups
from opendsec_server.linux.mounts import private_mounts
from opendsec_server.linux.overlay import mount_overlay
from opendsec_server.platform.config import Config
from opendsec_server.tools import locate

T = TypeVar("T")
_log = structlog.get_logger(__name__)
#: How long a runtime and chronus may take together until the first answer, in seconds.
START_SECONDS = 60.0
#: How long a pid 1 that does not answer is watched for its death before it counts as alive, in seconds.
DYING_SECONDS = 1.0
#: Connections that may wait at a sandbox's socket.
_BACKLOG = 8


class ContainerBackend:
    """The container backend of one node.

    Args:
        config: the node's configuration.
        layers: the node's layer mounts.
    """

    def __init__(self, config: Config, layers: LayerMounts) -> None:
        self._config = config
        self._layers = layers
        self._scratch = make_scratch(config.data, config.scratch)
        self._cgroups = Cgroups(config.cgroup)
        self._sockets = config.run / "s"
        self._root = config.run / "rootfs"
        self._runtime = Runc(config.run / "runc")
        self._pidfds: dict[str, int] = {}
        self._threads = ThreadPoolExecutor(config.edge.max_creating + 4, thread_name_prefix="sandbox")
        self._oci: OciConfig | None = None
        #: Descriptor of the compiled system call filter.
        self._filter: int | None = None

    # -- opening and closing --

    async def open(self) -> None:
        """Make the node ready."""
        await self._in_thread(self._open)

    def _open(self) -> None:
        for folder in (self._sockets, self._root):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._runtime.end_orphans()
        self._scratch.open()
        spare = self._config.edge.min_memory_available_bytes
        self._cgroups.prepare(
            memory_bytes=max(psutil.virtual_memory().total - spare, spare),
            # The host's own programs need process numbers too.
            pids=int(Path("/proc/sys/kernel/pid_max").read_text()) * 9 // 10,
        )
        self._filter = filter_file()
        memory = self._cgroups.hierarchies.get("memory")
        self._oci = OciConfig(
            root=self._root,
            tools=locate(self._config),
            cgroup_parent=self._config.cgroup,
            limit_swap=memory is None or (memory / "memory.memsw.limit_in_bytes").exists(),
        )

    async def close(self) -> None:
        """Let go; live sandboxes stay. Without any, the node is left as it was found."""
        if not await self.inventory():
            await self._in_thread(self._tear_down)
        for pidfd in self._pidfds.values():
            os.close(pidfd)
        self._pidfds.clear()
        self._threads.shutdown()
        if self._filter is not None:
            os.close(self._filter)
            self._filter = None

    def _tear_down(self) -> None:
        with contextlib.suppress(OSError):
            self._layers.unmount_idle()
        with contextlib.suppress(OSError):
            self._scratch.tear_down()
        self._cgroups.remove_parent()
        for folder in (self._sockets, self._root, self._config.run / "runc"):
            with contextlib.suppress(OSError):
                folder.rmdir()

    def capabilities(self) -> Capabilities:
        """Return what this backend can do here."""
        missing = dict(_missing())
        if not self._scratch.has_limits:
            missing["disk_limits"] = "the scratch is a plain folder"
        return Capabilities(
            name="container",
            runtimes=("runc",),
            default_runtime=self._config.edge.default_runtime,
            disk_limits=self._scratch.has_limits,
            missing=missing,
        )

    async def _in_thread(self, function: Callable[..., T], *args: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, functools.partial(function, *args))

    # -- starting --

    async def start(self, spec: SandboxSpec) -> Channel:
        """Bring a sandbox up."""
        if spec.runtime != self._runtime.name:
            reason = _missing().get(spec.runtime, "it is unknown")
            raise UnsupportedCapability(
                f"runtime {spec.runtime} cannot be used on this node: {reason}", field="runtime"
            )
        work = asyncio.create_task(self._bring_up(spec))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            # The thread cannot be interrupted: what it makes is removed when it is done, however often we are told.
            while not work.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([work])
            if work.exception() is None:
                await work.result().aclose()
                await asyncio.shield(self.remove(spec.id))
            raise

    async def _bring_up(self, spec: SandboxSpec) -> Channel:
        """Start and connect; whatever goes wrong, nothing is left."""
        try:
            with contextlib.closing(self._listen(spec.id)) as listener:
                # The hello waits in the socket until chronus is there: no time is lost between the two.
                greeting = asyncio.create_task(connect(self._sockets / spec.id, timeout=START_SECONDS))
                try:
                    await self._in_thread(self._start, spec, listener)
                    return await greeting
                except BaseException:
                    greeting.cancel()
                    with contextlib.suppress(Exception, asyncio.CancelledError):
                        await (await greeting).aclose()
                    raise
        except BaseException as error:
            await self.remove(spec.id)
            if isinstance(error, OSError) and not isinstance(error, PlatformError):
                raise _as_platform(error) from error
            raise

    def _listen(self, sandbox_id: str) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            listener.bind(str(self._sockets / sandbox_id))
            listener.listen(_BACKLOG)
        except BaseException:
            listener.close()
            raise
        return listener

    def _start(self, spec: SandboxSpec, listener: socket.socket) -> None:
        assert self._oci is not None, "the backend is not open"  # noqa: S101 - a defect of the caller
        layers = self._layers.acquire(spec.id, spec.layers)
        folder = self._scratch.create(spec.id, spec.limits.disk_mb)
        for name in ("upper", "work"):
            (folder / name).mkdir(mode=0o755)
        # Without no_new_privs only a process with CAP_SYS_ADMIN may load a filter, as the runtime still is.
        filters = [self._filter] if self._filter is not None and not spec.allow_new_privileges else []
        (folder / "config.json").write_bytes(self._oci.render(spec, filtered=bool(filters)))
        with private_mounts():
            self._mount_root(layers, folder)
            write_identity(self._root, spec.hostname)
            pid = self._runtime.start(spec.id, folder, [listener.fileno(), *filters])
        pidfd = processes.open_pidfd(pid)
        if pidfd is None:
            raise Unavailable("pid 1 ended at once")
        self._pidfds[spec.id] = pidfd

    def _mount_root(self, layers: list[Path], folder: Path) -> None:
        upper = folder / "upper"
        copy_root_attributes(layers[-1], upper)
        # Nothing of a sandbox outlives the host, so syncing its upper would buy nothing: ``volatile`` leaves it out.
        options = ("metacopy=off", "index=off", "volatile")
        mount_overlay(self._root, layers[::-1], upper, folder / "work", options=options)

    # -- finding --

    def _pidfd(self, sandbox_id: str) -> int | None:
        """Return a descriptor of pid 1, or None if it has ended."""
        pidfd = self._pidfds.get(sandbox_id)
        if pidfd is None:
            try:
                pid = int((self._scratch.path(sandbox_id) / "pid").read_text())
            except (OSError, ValueError):
                return None
            pidfd = processes.open_pidfd(pid)
            if pidfd is None:
                return None
            # The number may have been given to another process since.
            if not processes.in_cgroup(pid, f"{self._config.cgroup}/{sandbox_id}"):
                os.close(pidfd)
                return None
            self._pidfds[sandbox_id] = pidfd
        return None if processes.is_dead(pidfd) else pidfd

    async def reconnect(self, sandbox_id: str) -> Channel:
        """Open a new channel to a live sandbox."""
        if self._pidfd(sandbox_id) is None:
            raise SandboxGone(f"pid 1 of sandbox {sandbox_id} has ended")
        try:
            return await connect(self._sockets / sandbox_id)
        except Unavailable:
            # Pid 1 closes its socket a moment before it is seen dead.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.wait_dead(sandbox_id), DYING_SECONDS)
            if self._pidfd(sandbox_id) is None:
                raise SandboxGone(f"pid 1 of sandbox {sandbox_id} has ended") from None
            raise

    async def wait_dead(self, sandbox_id: str) -> None:
        """Return when pid 1 has ended."""
        pidfd = self._pidfd(sandbox_id)
        if pidfd is not None:
            await processes.wait_dead(pidfd)

    async def alive(self, sandbox_id: str) -> bool:
        """Tell whether pid 1 runs."""
        return self._pidfd(sandbox_id) is not None

    async def inventory(self) -> set[str]:
        """Return the ids of all sandboxes of which anything exists on this host."""
        return await self._in_thread(self._inventory)

    def _inventory(self) -> set[str]:
        sockets = {entry.name for entry in self._sockets.iterdir()} if self._sockets.exists() else set()
        return self._scratch.names() | self._runtime.names() | self._cgroups.names() | sockets

    # -- measuring --

    async def usage(self, sandbox_id: str) -> Usage:
        """Return a sandbox's resource use."""
        try:
            use = self._cgroups.usage(sandbox_id)
        except OSError:
            raise SandboxGone(f"sandbox {sandbox_id} does not exist on this node") from None
        with contextlib.suppress(OSError):
            used = self._scratch.used_bytes(sandbox_id)
            use = Usage(**{name: getattr(use, name) for name in use.__struct_fields__} | {"disk_bytes": used})
        return use

    def oom_kills(self, sandbox_id: str) -> int:
        """Return how many processes the kernel killed for the sandbox's memory limit."""
        return self._cgroups.oom_kills(sandbox_id)

    # -- removing --

    async def remove(self, sandbox_id: str) -> None:
        """Kill and remove everything of a sandbox."""
        pidfd = self._pidfd(sandbox_id)
        if pidfd is not None:
            # With pid 1 the kernel kills all of its pid namespace, and then tells.
            processes.kill(pidfd)
            await processes.wait_dead(pidfd)
        await self._in_thread(self._remove, sandbox_id)
        pidfd = self._pidfds.pop(sandbox_id, None)
        if pidfd is not None:
            os.close(pidfd)

    def _remove(self, sandbox_id: str) -> None:
        # A create that was cut off may have left the runtime's own helpers in the groups.
        self._cgroups.remove(sandbox_id)
        self._runtime.forget(sandbox_id)
        (self._sockets / sandbox_id).unlink(missing_ok=True)
        self._scratch.remove(sandbox_id)
        self._layers.release(sandbox_id)


@functools.cache
def _missing() -> dict[str, str]:
    return missing_runtimes()


def _as_platform(error: OSError) -> PlatformError:
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return DiskFull("the node's disk is full")
    return Unavailable(f"cannot start a sandbox: {error.strerror or error}")
