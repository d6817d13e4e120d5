"""SDK of OpenDSec: sandboxes for agent training and evaluation.

::

    async with DSecClient() as client:
        sandbox = await client.run_container(DSecContainerRunArgs(container_image="debian:bookworm"))
        result = await sandbox.run_shell("echo hello world")

``opendsec.sync`` has the same names without ``await``; ``opendsec.api.errors`` has the tree of errors.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from opendsec._args import DSecContainerRunArgs, DSecFnCallArgs, DSecFullVMRunArgs, DSecMicroVMRunArgs, RunArgs
from opendsec._results import CommandFailed, CommandTimedOut, ExecResult, OutputEvent
from opendsec._version import __version__
from opendsec.api.errors import (
    CapacityUnavailable,
    Conflict,
    DiskFull,
    ExecTimeout,
    ImageUnavailable,
    Internal,
    InternalFault,
    InvalidArgument,
    LimitExceeded,
    NodeLost,
    NotFound,
    OutcomeUnknown,
    OutOfMemory,
    OutputLimit,
    PermissionDenied,
    PlatformError,
    PolicyDenied,
    Preempted,
    QuotaExceeded,
    RequestRefused,
    SandboxGone,
    SandboxLost,
    TryAgain,
    Unauthenticated,
    Unavailable,
    UnsupportedCapability,
    WaitTimeout,
)
from opendsec.api.models import (
    DebianSource,
    Exec,
    FileInfo,
    Image,
    ImageConfig,
    Layer,
    Limits,
    Metrics,
    Node,
    Progress,
)
from opendsec.api.models import Sandbox as SandboxInfo

if TYPE_CHECKING:
    from opendsec._client import DSecClient
    from opendsec._creates import BatchFailed
    from opendsec._files import Files, SandboxPath
    from opendsec._images import Images
    from opendsec._nodes import Nodes
    from opendsec._process import Process
    from opendsec._sandbox import Sandbox
    from opendsec._trees import Transfer

__all__ = [
    "BatchFailed",
    "CapacityUnavailable",
    "CommandFailed",
    "CommandTimedOut",
    "Conflict",
    "DSecClient",
    "DSecContainerRunArgs",
    "DSecFnCallArgs",
    "DSecFullVMRunArgs",
    "DSecMicroVMRunArgs",
    "DebianSource",
    "DiskFull",
    "Exec",
    "ExecResult",
    "ExecTimeout",
    "FileInfo",
    "Files",
    "Image",
    "ImageConfig",
    "ImageUnavailable",
    "Images",
    "Internal",
    "InternalFault",
    "InvalidArgument",
    "Layer",
    "LimitExceeded",
    "Limits",
    "Metrics",
    "Node",
    "NodeLost",
    "Nodes",
    "NotFound",
    "OutOfMemory",
    "OutcomeUnknown",
    "OutputEvent",
    "OutputLimit",
    "PermissionDenied",
    "PlatformError",
    "PolicyDenied",
    "Preempted",
    "Process",
    "Progress",
    "QuotaExceeded",
    "RequestRefused",
    "RunArgs",
    "Sandbox",
    "SandboxGone",
    "SandboxInfo",
    "SandboxLost",
    "SandboxPath",
    "Transfer",
    "TryAgain",
    "Unauthenticated",
    "Unavailable",
    "UnsupportedCapability",
    "WaitTimeout",
    "__version__",
]

#: Loaded at their first use: they need an HTTP library, which who only wants the wire types (the server) does not.
_LAZY = {
    "BatchFailed": "_creates",
    "DSecClient": "_client",
    "Files": "_files",
    "Images": "_images",
    "Nodes": "_nodes",
    "Process": "_process",
    "Sandbox": "_sandbox",
    "SandboxPath": "_files",
    "Transfer": "_trees",
}


def __getattr__(name: str) -> Any:
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module 'opendsec' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"opendsec.{module}"), name)
    return value


def __dir__() -> list[str]:
    return __all__
