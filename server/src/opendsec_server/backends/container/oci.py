"""The OCI configuration of one sandbox."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

import msgspec

from opendsec.api.errors import UnsupportedCapability
from opendsec_server.backends.container.seccomp import profile
from opendsec_server.core.spec import SandboxSpec
from opendsec_server.linux.processes import CAP_SYS_RESOURCE, has_capability

#: Where chronus and the static shells are inside; nothing else of ours is visible there.
TOOLS_INSIDE = "/.opendsec"
#: Docker's default without NET_RAW, MKNOD, AUDIT_WRITE and SETFCAP.
CAPABILITIES = (
    "CAP_CHOWN",
    "CAP_DAC_OVERRIDE",
    "CAP_FOWNER",
    "CAP_FSETID",
    "CAP_KILL",
    "CAP_NET_BIND_SERVICE",
    "CAP_SETGID",
    "CAP_SETPCAP",
    "CAP_SETUID",
    "CAP_SYS_CHROOT",
)
_MASKED = (
    "/proc/acpi", "/proc/asound", "/proc/config.gz", "/proc/interrupts", "/proc/kallsyms", "/proc/kcore", "/proc/keys",
    "/proc/key-users", "/proc/kmsg", "/proc/kpagecgroup", "/proc/kpagecount", "/proc/kpageflags", "/proc/latency_stats",
    "/proc/modules", "/proc/pagetypeinfo", "/proc/sched_debug", "/proc/schedstat", "/proc/scsi", "/proc/slabinfo",
    "/proc/timer_list", "/proc/timer_stats", "/proc/vmallocinfo", "/sys/firmware", "/sys/kernel/debug",
    "/sys/kernel/security", "/sys/kernel/mm", "/sys/devices/virtual/powercap", "/sys/fs/bpf", "/sys/fs/pstore",
)  # fmt: skip
_READ_ONLY = ("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger")
#: Group 5 is ``tty`` wherever there is one.
_PTS_OPTIONS = ("ptmxmode=0666", "mode=0620", "gid=5")
_CPU_PERIOD = 100_000
_OPEN_FILES = 65_536
_encode = msgspec.json.Encoder().encode


def _mount(target: str, kind: str, source: str, *options: str) -> dict[str, Any]:
    return {"destination": target, "type": kind, "source": source, "options": list(options)}


class OciConfig:
    """Builds configurations; what is equal for all sandboxes is built once.

    Args:
        root: the folder that is the root of each sandbox in the mount namespace of its runtime.
        tools: folder of chronus and the static shells.
        cgroup_parent: parent of the sandboxes' cgroups, relative to each hierarchy.
        limit_swap: the kernel counts swap for cgroups (v1 may not).
    """

    def __init__(self, *, root: Path, tools: Path, cgroup_parent: str, limit_swap: bool) -> None:
        self._root = root
        self._tools = tools
        self._cgroup_parent = cgroup_parent
        self._limit_swap = limit_swap
        # Without CAP_SYS_RESOURCE (a host that is a container itself) neither can be more than this process has.
        privileged = has_capability(CAP_SYS_RESOURCE)
        self._oom_score = {"oomScoreAdj": -1000} if privileged else {}
        self._max_open_files = 2**20 if privileged else resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        self._seccomp = msgspec.Raw(_encode(profile(os.uname().machine)))

    def render(self, spec: SandboxSpec, *, filtered: bool = False) -> bytes:
        """Return ``config.json`` for a sandbox.

        Args:
            spec: the sandbox.
            filtered: chronus gets the system call filter as descriptor 4 and loads it; else the runtime compiles it.

        Raises:
            UnsupportedCapability: this process may not give as many open files.
        """
        open_files = spec.limits.open_files or min(_OPEN_FILES, self._max_open_files)
        if open_files > self._max_open_files:
            raise UnsupportedCapability(
                f"open_files_limit can be {self._max_open_files} at most on this node", field="open_files_limit"
            )
        memory = spec.limits.memory_mb
        # Shared memory counts for the memory limit; a smaller limit of its own would only break programs.
        shm_size = [f"size={memory}m"] if memory is not None else []
        capabilities = list(CAPABILITIES)
        config = {
            "ociVersion": "1.0.2",
            "hostname": spec.hostname,
            "root": {"path": str(self._root), "readonly": False},
            "process": {
                "terminal": False,
                "user": {"uid": 0, "gid": 0},
                "args": [f"{TOOLS_INSIDE}/chronus", "--tools", TOOLS_INSIDE, *(["--filter"] if filtered else [])],
                "env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"],
                "cwd": "/",
                "noNewPrivileges": not spec.allow_new_privileges,
                **self._oom_score,
                "capabilities": {"bounding": capabilities, "effective": capabilities, "permitted": capabilities},
                "rlimits": [
                    {"type": "RLIMIT_NOFILE", "soft": open_files, "hard": open_files},
                    {"type": "RLIMIT_CORE", "soft": 0, "hard": 0},
                ],
            },
            "mounts": [
                _mount("/proc", "proc", "proc", "nosuid", "noexec", "nodev"),
                _mount("/dev", "tmpfs", "tmpfs", "nosuid", "strictatime", "mode=755", "size=64k"),
                _mount(
                    "/dev/pts",
                    "devpts",
                    "devpts",
                    "nosuid",
                    "noexec",
                    "newinstance",
                    "ptmxmode=0666",
                    "mode=0620",
                    "gid=5",
                ),
                _mount("/dev/shm", "tmpfs", "shm", "nosuid", "noexec", "nodev", "mode=1777", *shm_size),  # noqa: S108
                _mount("/dev/mqueue", "mqueue", "mqueue", "nosuid", "noexec", "nodev"),
                _mount("/sys", "sysfs", "sysfs", "nosuid", "noexec", "nodev", "ro"),
                _mount(TOOLS_INSIDE, "bind", str(self._tools), "bind", "ro", "nosuid", "nodev"),
            ],
            "linux": {
                "namespaces": [{"type": kind} for kind in ("pid", "network", "ipc", "uts", "mount", "cgroup")],
                "cgroupsPath": f"/{self._cgroup_parent}/{spec.id}",
                "resources": self._resources(spec),
                **({} if filtered else {"seccomp": self._seccomp}),
                "maskedPaths": list(_MASKED),
                "readonlyPaths": list(_READ_ONLY),
            },
        }
        return _encode(config)

    def _resources(self, spec: SandboxSpec) -> dict[str, Any]:
        limits = spec.limits
        resources: dict[str, Any] = {"devices": [{"allow": False, "access": "rwm"}]}
        if limits.memory_mb is not None:
            size = limits.memory_mb * 2**20
            resources["memory"] = {"limit": size, "swap": size} if self._limit_swap else {"limit": size}
        if limits.cpu_cores is not None:
            resources["cpu"] = {
                "quota": max(1000, round(limits.cpu_cores * _CPU_PERIOD)),
                "period": _CPU_PERIOD,
                "shares": max(2, min(262_144, round(limits.cpu_cores * 1024))),
            }
        if limits.pids is not None:
            resources["pids"] = {"limit": limits.pids}
        return resources
