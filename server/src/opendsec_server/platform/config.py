"""The one place for configuration: typed, frozen, unknown keys refused.

Precedence, lowest first: defaults here, the TOML file (``--config`` or ``OPENDSEC_CONFIG``), environment variables
``OPENDSEC_<SECTION>__<KEY>``. The environment is read nowhere else in the server.
"""

from __future__ import annotations

import hashlib
import os
import tomllib
from pathlib import Path
from typing import Any

import msgspec

from opendsec.api.errors import InvalidArgument


class Section(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Base of all configuration."""


class EdgeConfig(Section, frozen=True):
    """One edge: the node's sandboxes."""

    #: Name of the node; part of every sandbox id.
    node: str = "local"
    #: Address of the edge's HTTP API: ``unix:<path>`` or ``host:port``; empty: ``unix:<run_dir>/edge.sock``.
    listen: str = ""
    #: Idle time in seconds after which a running sandbox is stopped, when the request names none.
    default_ttl_running_stop_seconds: float = 3600.0
    #: How long the record of an ended sandbox is kept, in seconds.
    retention_seconds: float = 3600.0
    #: Creates are refused below this much available memory, in bytes.
    min_memory_available_bytes: int = 512 * 1024 * 1024
    #: Creates are refused below this much free space on the data disk, in bytes.
    min_disk_free_bytes: int = 1024 * 1024 * 1024
    #: Creates are refused above this memory pressure (PSI some, average over 10 s, percent).
    max_memory_pressure_percent: float = 60.0
    #: Most live sandboxes.
    max_sandboxes: int = 4000
    #: Creates that may be under way at once; further ones wait.
    max_creating: int = 8
    #: Bytes kept of each output stream: the first ``spool_head_bytes`` and the newest rest.
    spool_limit_bytes: int = 16 * 1024 * 1024
    #: Bytes kept from the start of a stream that is cut.
    spool_head_bytes: int = 1024 * 1024
    #: Ended execs kept for each sandbox; older ones are forgotten.
    execs_kept: int = 1000
    #: Oci runtime if the request names none.
    default_runtime: str = "runc"


class ScratchConfig(Section, frozen=True):
    """Where the writable side of sandboxes lives."""

    #: ``btrfs-image`` (sparse btrfs file under the data folder) or ``folder`` (then disk limits are refused).
    kind: str = "btrfs-image"
    #: Size of the sparse image in bytes; only what is written takes space.
    size_bytes: int = 64 * 1024 * 1024 * 1024


class ApiserverConfig(Section, frozen=True):
    """The front door."""

    #: Addresses: ``unix:<path>`` or ``host:port``; empty: ``unix:<run_dir>/api.sock``.
    listen: tuple[str, ...] = ()
    #: Addresses of the edges; empty: the edge of this machine.
    edges: tuple[str, ...] = ()
    #: SQLAlchemy URL of the IAM database; empty: SQLite in the data folder.
    database_url: str = ""
    #: Period of the watcher's polls, in seconds.
    watch_period_seconds: float = 1.0
    #: How long one poll may take, in seconds.
    watch_deadline_seconds: float = 2.0


class Config(Section, frozen=True):
    """Configuration of all programs on a node."""

    #: Persistent state: images, journal, spools, scratch.
    data_dir: str = "/var/lib/opendsec"
    #: Sockets and runtime state; does not survive a reboot.
    run_dir: str = "/run/opendsec"
    #: Folder of chronus and the static shells; empty: the installed default.
    tools_dir: str = ""
    #: Parent of our cgroups, relative to each hierarchy; empty: ``opendsec/<node>-<hash of data_dir>``.
    cgroup_parent: str = ""
    #: ``debug``, ``info``, ``warning``, ``error``.
    log_level: str = "info"
    edge: EdgeConfig = EdgeConfig()
    scratch: ScratchConfig = ScratchConfig()
    apiserver: ApiserverConfig = ApiserverConfig()

    @property
    def data(self) -> Path:
        """The data folder."""
        return Path(self.data_dir)

    @property
    def run(self) -> Path:
        """The folder of sockets."""
        return Path(self.run_dir)

    @property
    def edge_address(self) -> str:
        """Where the edge listens."""
        return self.edge.listen or f"unix:{self.run_dir}/edge.sock"

    @property
    def api_addresses(self) -> tuple[str, ...]:
        """Where the apiserver listens."""
        return self.apiserver.listen or (f"unix:{self.run_dir}/api.sock",)

    @property
    def cgroup(self) -> str:
        """Parent of our cgroups in each hierarchy; two nodes on one machine never share it."""
        if self.cgroup_parent:
            return self.cgroup_parent
        place = hashlib.blake2b(bytes(Path(self.data_dir).resolve()), digest_size=4).hexdigest()
        return f"opendsec/{self.edge.node}-{place}"

    @property
    def tools(self) -> Path:
        """The folder of chronus and the static shells."""
        return Path(self.tools_dir) if self.tools_dir else self.data / "tools"


#: Keys whose value in the environment is a list, separated by commas.
_LISTS = frozenset({("apiserver", "listen"), ("apiserver", "edges")})


def _merge(base: dict[str, Any], path: list[str], value: str) -> None:
    listed = tuple(path) in _LISTS
    for part in path[:-1]:
        base = base.setdefault(part, {})
    base[path[-1]] = [item for item in value.split(",") if item] if listed else value


def load(path: Path | None = None, environ: dict[str, str] | None = None) -> Config:
    """Read the configuration.

    Raises:
        InvalidArgument: unreadable file, unknown key or a value of the wrong type.
    """
    env = dict(os.environ) if environ is None else environ
    raw: dict[str, Any] = {}
    name = path or (Path(env["OPENDSEC_CONFIG"]) if env.get("OPENDSEC_CONFIG") else None)
    if name is not None:
        try:
            raw = tomllib.loads(name.read_text())
        except (OSError, tomllib.TOMLDecodeError) as error:
            raise InvalidArgument(f"cannot read configuration {name}: {error}") from error
    sections = {"EDGE", "SCRATCH", "APISERVER"}
    top = {"DATA_DIR", "RUN_DIR", "TOOLS_DIR", "CGROUP_PARENT", "LOG_LEVEL"}
    for key, value in env.items():
        if not key.startswith("OPENDSEC_"):
            continue
        parts = key.removeprefix("OPENDSEC_").split("__")
        if (len(parts) == 1 and parts[0] in top) or (len(parts) == 2 and parts[0] in sections):
            _merge(raw, [part.lower() for part in parts], value)
    try:
        return msgspec.convert(raw, Config, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidArgument(f"configuration: {error}") from error
