"""SDK of OpenDSec: sandboxes for agent training and evaluation.

::

    async with DSecClient() as client:
        sandbox = await client.run_container(DSecContainerRunArgs(container_image="debian:bookworm"))
        result = await sandbox.run_shell("echo hello world")

``opendsec.sync`` has the same names without ``await``; ``opendsec.api.errors`` has the tree of errors.
"""

from opendsec._args import DSecContainerRunArgs, DSecFnCallArgs, DSecFullVMRunArgs, DSecMicroVMRunArgs, RunArgs
from opendsec._client import DSecClient
from opendsec._creates import BatchFailed
from opendsec._files import Files, SandboxPath
from opendsec._images import Images
from opendsec._nodes import Nodes
from opendsec._process import Process
from opendsec._results import CommandFailed, CommandTimedOut, ExecResult, OutputEvent
from opendsec._sandbox import Sandbox
from opendsec._trees import Transfer
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
