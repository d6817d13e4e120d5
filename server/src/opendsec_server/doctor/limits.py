"""Limits of the host that bound how many sandboxes it can hold."""

from __future__ import annotations

import resource
from pathlib import Path

from opendsec_server.doctor.finding import Finding
from opendsec_server.platform.config import Config

#: Name, file, how much a full node wants, and what runs out.
_SYSCTLS = (
    ("kernel.pid_max", 131_072, "processes and threads of all sandboxes"),
    ("fs.mount-max", 100_000, "mounts in one namespace"),
    ("fs.inotify.max_user_instances", 1_024, "inotify users in all sandboxes of one account"),
    ("net.ipv4.neigh.default.gc_thresh3", 8_192, "neighbours on one network (once sandboxes have one)"),
    ("user.max_net_namespaces", 8_192, "network namespaces, one a sandbox"),
)
_NOFILE = 65_536
_LOOPS = 1


def probe(_config: Config) -> list[Finding]:
    """Compare the host's limits with what thousands of sandboxes take."""
    return [*(_sysctl(*entry) for entry in _SYSCTLS), _open_files(), _loop_devices()]


def _sysctl(name: str, wanted: int, purpose: str) -> Finding:
    path = Path("/proc/sys") / name.replace("net.ipv4.neigh.default.", "net/ipv4/neigh/default/").replace(".", "/")
    try:
        value = int(path.read_text())
    except (OSError, ValueError) as error:
        return Finding(name=name, state="missing", purpose=purpose, detail=str(error))
    enough = value >= wanted
    return Finding(
        name=name,
        state="ok" if enough else "degraded",
        purpose=purpose,
        detail=f"{value}, a full node wants {wanted}",
        remedy="" if enough else f"sysctl -w {name}={wanted}",
    )


def _open_files() -> Finding:
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = hard == resource.RLIM_INFINITY or hard >= _NOFILE
    return Finding(
        name="nofile",
        state="ok" if enough else "degraded",
        purpose="descriptors of the edge, a few a sandbox",
        detail=f"hard limit {hard}, a full node wants {_NOFILE}",
        remedy="" if enough else f"LimitNOFILE={_NOFILE} in the service, or ulimit -n {_NOFILE}",
    )


def _loop_devices() -> Finding:
    devices = list(Path("/sys/block").glob("loop*"))
    free = sum(1 for path in devices if not (path / "loop/backing_file").exists())
    enough = free >= _LOOPS or Path("/dev/loop-control").exists()
    return Finding(
        name="loop-devices",
        state="ok" if enough else "degraded",
        purpose="the scratch image takes one",
        detail=f"{free} of {len(devices)} free" + (", more on demand" if Path("/dev/loop-control").exists() else ""),
        remedy="" if enough else "modprobe loop max_loop=8",
    )
