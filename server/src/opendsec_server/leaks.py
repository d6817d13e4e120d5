"""Everything of ours on this host that has no owner: what a crash or a defect left behind, counted by kind.

Owners are the sandboxes that the journal holds as live, and, for what sandboxes share (scratch, layers, sockets), an
edge that answers. The journal is read as a file, so that the count works with and without a running edge.
"""

from __future__ import annotations

import contextlib
import socket
import sqlite3
from collections.abc import Iterable
from pathlib import Path

import msgspec

from opendsec.api.models import TERMINAL, LeakReport
from opendsec_server.backends.container.runtime import at_work
from opendsec_server.core.spec import SandboxSpec
from opendsec_server.linux.cgroups import Cgroups
from opendsec_server.linux.mounts import mountinfo
from opendsec_server.platform.config import Config

_NAMESPACES = ("mnt", "net", "pid", "ipc", "uts", "cgroup")


class Owners(msgspec.Struct, kw_only=True):
    """Who may own things on this node."""

    live: set[str] = set()
    #: Sandboxes whose record is kept, live or ended: their exec logs may exist.
    known: set[str] = set()
    layers: set[str] = set()
    edge_answers: bool = False

    @property
    def any(self) -> bool:
        """Whether anybody owns what sandboxes share."""
        return self.edge_answers or bool(self.live)


def report(config: Config, owners: Owners | None = None) -> LeakReport:
    """Count what has no owner.

    Args:
        config: the node's configuration.
        owners: who may own things; found out if absent.
    """
    owners = owners or find_owners(config)
    cgroups = Cgroups(config.cgroup)
    strays = cgroups.names() - owners.live
    found = {pid for name in strays for pid in cgroups.pids(name)}
    if not owners.edge_answers:
        found.update(at_work(config.run / "runc"))
    processes = sorted(found)
    items = {
        "processes": [f"{pid} {_command(pid)}" for pid in processes],
        "mounts": sorted(_mounts(config, owners)),
        "cgroups": sorted(_groups(cgroups, strays, owners)),
        "namespaces": sorted(_namespaces(processes)),
        "loop_devices": sorted(_loop_devices(config, owners)),
        "subvolumes": sorted(str(path) for path in _entries(config.data / "scratch", owners.live)),
        "files": sorted(_files(config, owners)),
    }
    return LeakReport(
        **{kind: len(names) for kind, names in items.items()},
        items={kind: names for kind, names in items.items() if names},
    )


def find_owners(config: Config) -> Owners:
    """Read the journal and ask whether an edge answers."""
    owners = Owners(edge_answers=_answers(config.edge_address))
    journal = config.data / "journal.db"
    if not journal.exists():
        return owners
    with contextlib.closing(sqlite3.connect(f"file:{journal}?mode=ro", uri=True, timeout=5)) as db:
        try:
            rows = db.execute("SELECT id, state, spec FROM sandboxes").fetchall()
        except sqlite3.OperationalError:
            # Killed before the first table was made: nothing was ever started.
            return owners
    for sandbox_id, state, spec in rows:
        owners.known.add(sandbox_id)
        if state not in TERMINAL:
            owners.live.add(sandbox_id)
            if spec is not None:
                owners.layers.update(msgspec.json.decode(spec, type=SandboxSpec).layers)
    return owners


def _answers(address: str) -> bool:
    if not address.startswith("unix:"):
        return True
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as probe:
        try:
            probe.connect(address.removeprefix("unix:"))
        except OSError:
            return False
    return True


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "?"


def _mounts(config: Config, owners: Owners) -> Iterable[str]:
    data, run = str(config.data.resolve()), str(config.run.resolve())
    for mounted in mountinfo():
        if not mounted.target.startswith((f"{data}/", f"{run}/")):
            continue
        is_layer = mounted.fstype == "erofs" and f"blake3:{Path(mounted.target).name}" in owners.layers
        if not (owners.edge_answers or is_layer or (mounted.target == f"{data}/scratch" and owners.live)):
            yield f"{mounted.target} ({mounted.fstype})"


def _groups(cgroups: Cgroups, strays: set[str], owners: Owners) -> Iterable[str]:
    for root in cgroups.hierarchies.values():
        for name in strays:
            if (root / cgroups.parent / name).is_dir():
                yield str(root / cgroups.parent / name)
        if not owners.any and (root / cgroups.parent).is_dir():
            yield str(root / cgroups.parent)


def _namespaces(processes: Iterable[int]) -> set[str]:
    ours = {str(Path(f"/proc/self/ns/{kind}").readlink()) for kind in _NAMESPACES}
    found: set[str] = set()
    for pid in processes:
        for kind in _NAMESPACES:
            with contextlib.suppress(OSError):
                found.add(str(Path(f"/proc/{pid}/ns/{kind}").readlink()))
    return found - ours


def _loop_devices(config: Config, owners: Owners) -> Iterable[str]:
    data = str(config.data.resolve())
    for device in Path("/sys/block").glob("loop*"):
        with contextlib.suppress(OSError):
            backing = (device / "loop" / "backing_file").read_text().strip()
            if backing.startswith(f"{data}/") and not owners.any:
                yield f"/dev/{device.name} ({backing})"


def _entries(folder: Path, owned: set[str]) -> Iterable[Path]:
    try:
        return [entry for entry in folder.iterdir() if entry.name not in owned]
    except FileNotFoundError:
        return ()


def _files(config: Config, owners: Owners) -> Iterable[str]:
    for folder in (config.run / "s", config.run / "runc"):
        yield from map(str, _entries(folder, owners.live))
    yield from map(str, _entries(config.data / "sandboxes", owners.known))
    yield from map(str, (config.data / "images").glob("tmp/*") if not owners.edge_answers else ())
