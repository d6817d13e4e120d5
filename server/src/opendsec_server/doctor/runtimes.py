"""OCI runtimes: each that is installed starts one tiny container."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path

from opendsec.api.errors import PlatformError
from opendsec_server import tools
from opendsec_server.doctor.finding import Finding, ProbeFailed, run
from opendsec_server.platform.config import Config

_PURPOSE = {
    "runc": "default runtime of the containers",
    "crun": "alternative runtime (asked for by a request)",
    "runsc": "gVisor, a stronger wall (asked for by a request)",
}


def probe(config: Config) -> list[Finding]:
    """Try every runtime we know."""
    return [_runtime(name, config) for name in _PURPOSE]


def _runtime(name: str, config: Config) -> Finding:
    required = name == config.edge.default_runtime
    try:
        version = run([name, "--version"]).splitlines()[0].strip()
    except ProbeFailed as error:
        return Finding(
            name=name,
            state="missing",
            purpose=_PURPOSE[name],
            detail=str(error),
            remedy=f"package {name}",
            required=required,
        )
    shell = _static_shell(config)
    if shell is None:
        detail = f"{version}; not tried: no static program at hand"
        return Finding(
            name=name, state="degraded", purpose=_PURPOSE[name], detail=detail, remedy="make", required=required
        )
    try:
        _start(name, shell)
    except (ProbeFailed, OSError) as error:
        detail = f"{version}; starts no container: {error}"
        remedy = f"see '{name} run' on this host; another runtime may do"
        return Finding(
            name=name, state="missing", purpose=_PURPOSE[name], detail=detail, remedy=remedy, required=required
        )
    detail = f"{version}; started a container"
    return Finding(name=name, state="ok", purpose=_PURPOSE[name], detail=detail, required=required)


def _static_shell(config: Config) -> Path | None:
    try:
        return tools.locate(config) / "sh"
    except PlatformError:
        found = shutil.which("busybox")
        return Path(found) if found else None


def _start(name: str, shell: Path) -> None:
    """Run ``exit 0`` in a container of its own.

    Raises:
        ProbeFailed: the runtime did not do it.
    """
    identity = f"opendsec-doctor-{os.getpid()}"
    with tempfile.TemporaryDirectory(prefix="opendsec-doctor-") as folder:
        bundle, state = Path(folder) / "bundle", Path(folder) / "state"
        (bundle / "rootfs/bin").mkdir(parents=True)
        (bundle / "rootfs/proc").mkdir()
        shutil.copy(shell, bundle / "rootfs/bin/sh")
        (bundle / "config.json").write_text(json.dumps(_bundle(f"/{identity}")))
        try:
            run([name, "--root", str(state), "run", "--bundle", str(bundle), identity])
        except ProbeFailed:
            _remove(name, state, identity)
            raise


def _remove(name: str, state: Path, identity: str) -> None:
    try:
        run([name, "--root", str(state), "delete", "--force", identity])
    except ProbeFailed:
        return  # it never came to be


def _bundle(cgroup: str) -> dict[str, object]:
    return {
        "ociVersion": "1.0.2",
        "process": {
            "terminal": False,
            "user": {"uid": 0, "gid": 0},
            "args": ["/bin/sh", "-c", "exit 0"],
            "env": ["PATH=/bin"],
            "cwd": "/",
            "noNewPrivileges": True,
        },
        "root": {"path": "rootfs", "readonly": True},
        "mounts": [{"destination": "/proc", "type": "proc", "source": "proc"}],
        "linux": {
            "cgroupsPath": cgroup,
            "resources": {"memory": {"limit": 256 * 1024 * 1024}, "pids": {"limit": 64}},
            "namespaces": [{"type": kind} for kind in ("pid", "mount", "ipc", "uts", "network")],
        },
    }
