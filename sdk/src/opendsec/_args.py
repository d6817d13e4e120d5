"""Argument records of the four backends (paper, listing 1): which one is given decides the backend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from opendsec.api.models import BackendName, CreateSandbox


class _RunArgs(msgspec.Struct, kw_only=True, frozen=True):
    """What all backends take.

    Attributes:
        container_image: base image, ``name:tag`` or ``name@blake3:…``.
        workspace: layer on top of the base image.
        toolkits: layers, each on top of the one before.
        memory_limit_mb: MiB of memory.
        cpu_cores_limit: CPU cores.
        disk_limit_mb: MiB that the sandbox may write.
        pids_limit: processes and threads.
        open_files_limit: open files of each process.
        ttl_running_stop: idle seconds after which a running sandbox is stopped.
        ttl_hard: seconds after which it is stopped in any state.
        network_rules: named services it may reach; absent or ``False`` means no.
        init_user: user of the commands, by name or id, with ``:group`` if wanted.
        workdir: directory of the commands.
        env: environment on top of the image's.
        labels: for ``DSecClient.list``.
        job: name of the job it belongs to.
        request_id: idempotency key; the same key gives the same sandbox. Made by the SDK if absent.
    """

    container_image: str
    workspace: str | None = None
    toolkits: Sequence[str] = ()
    memory_limit_mb: int | None = None
    cpu_cores_limit: float | None = None
    disk_limit_mb: int | None = None
    pids_limit: int | None = None
    open_files_limit: int | None = None
    ttl_running_stop: float | None = None
    ttl_hard: float | None = None
    network_rules: Mapping[str, bool] = {}
    init_user: str | None = None
    workdir: str | None = None
    env: Mapping[str, str] = {}
    labels: Mapping[str, str] = {}
    job: str | None = None
    request_id: str | None = None


class DSecContainerRunArgs(_RunArgs, kw_only=True, frozen=True):
    """Arguments of ``DSecClient.run_container``.

    Attributes:
        runtime: OCI runtime; the node's default if absent.
        allow_new_privileges: let set-user-id programs gain privileges.
    """

    runtime: Literal["runc", "crun", "runsc"] | None = None
    allow_new_privileges: bool = False


class DSecMicroVMRunArgs(_RunArgs, kw_only=True, frozen=True):
    """Arguments of ``DSecClient.run_microvm``."""


class DSecFullVMRunArgs(_RunArgs, kw_only=True, frozen=True):
    """Arguments of ``DSecClient.run_fullvm``; ``container_image`` names a prepared VM image."""


class DSecFnCallArgs(_RunArgs, kw_only=True, frozen=True):
    """Arguments of ``DSecClient.fncall``."""


RunArgs = DSecContainerRunArgs | DSecMicroVMRunArgs | DSecFullVMRunArgs | DSecFnCallArgs

_BACKENDS: dict[type[RunArgs], BackendName] = {
    DSecContainerRunArgs: "container",
    DSecMicroVMRunArgs: "microvm",
    DSecFullVMRunArgs: "fullvm",
    DSecFnCallArgs: "fncall",
}


def create_request(args: RunArgs, *, request_id: str, lease_seconds: float, count: int | None = None) -> bytes:
    """Return the encoded request of a create.

    Raises:
        TypeError: ``args`` is no argument record.
    """
    backend = _BACKENDS.get(type(args))
    if backend is None:
        raise TypeError(f"expected an argument record such as DSecContainerRunArgs, got {type(args).__name__}")
    request = CreateSandbox(
        container_image=args.container_image,
        backend=backend,
        workspace=args.workspace,
        toolkits=list(args.toolkits),
        memory_limit_mb=args.memory_limit_mb,
        cpu_cores_limit=args.cpu_cores_limit,
        disk_limit_mb=args.disk_limit_mb,
        pids_limit=args.pids_limit,
        open_files_limit=args.open_files_limit,
        ttl_running_stop=args.ttl_running_stop,
        ttl_hard=args.ttl_hard,
        network_rules=dict(args.network_rules),
        init_user=args.init_user,
        workdir=args.workdir,
        env=dict(args.env),
        labels=dict(args.labels),
        job=args.job,
        request_id=request_id,
        lease_seconds=lease_seconds,
        count=count,
    )
    if isinstance(args, DSecContainerRunArgs):
        request.runtime = args.runtime
        request.allow_new_privileges = args.allow_new_privileges
    return msgspec.json.encode(request)
