"""Wire types of the HTTP API v1, shared by SDK, apiserver and edge.

Unknown fields are refused on input. Bytes cross as base64 strings. Times are seconds since the epoch (float),
durations are seconds, sizes are bytes unless a name says otherwise (``_mb`` is MiB, as in the paper).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

Positive = Annotated[int, Meta(gt=0)]
Seconds = Annotated[float, Meta(gt=0, le=31_536_000)]

#: States of a sandbox (design section 7); the last three are terminal.
State = Literal[
    "requested",
    "preparing",
    "running",
    "pausing",
    "paused",
    "resuming",
    "stopping",
    "stopped",
    "failed",
    "expired",
]
TERMINAL: frozenset[str] = frozenset({"stopped", "failed", "expired"})
BackendName = Literal["fncall", "container", "microvm", "fullvm"]
#: Largest batch of one create (paper, section 11.1: jobs of up to 32K sandboxes).
MAX_BATCH = 32_768


class Wire(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Base of what the platform sends."""


class WireInput(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of what the platform accepts."""


class CreateSandbox(WireInput):
    """A request for one sandbox, or for ``count`` equal ones (paper, section 2 and listing 1)."""

    #: Base image, ``name:tag`` or ``name@blake3:…``.
    container_image: str
    backend: BackendName = "container"
    #: OCI runtime of a container; the node's default if absent.
    runtime: Literal["runc", "crun", "runsc"] | None = None
    #: Workspace layer on top of the base image.
    workspace: str | None = None
    #: Toolkit layers, each on top of the one before.
    toolkits: list[str] = []
    #: Memory limit in MiB.
    memory_limit_mb: Annotated[int, Meta(ge=8, le=16_777_216)] | None = None
    #: CPU limit in cores.
    cpu_cores_limit: Annotated[float, Meta(gt=0, le=4096)] | None = None
    #: Limit of what the sandbox may write to its disk, in MiB.
    disk_limit_mb: Annotated[int, Meta(ge=1, le=16_777_216)] | None = None
    #: Limit of processes and threads.
    pids_limit: Annotated[int, Meta(ge=8, le=4_194_304)] | None = None
    #: Limit of open files of each process.
    open_files_limit: Annotated[int, Meta(ge=64, le=1_048_576)] | None = None
    #: Idle time in seconds after which a running sandbox is stopped; the node's default if absent.
    ttl_running_stop: Seconds | None = None
    #: Life time in seconds after which a sandbox is stopped in any state.
    ttl_hard: Seconds | None = None
    #: Named services the sandbox may reach; absent or ``False`` means no.
    network_rules: dict[str, bool] = {}
    #: User of the commands, by name or id, with ``:group`` if wanted; the image's user if absent.
    init_user: str | None = None
    #: Directory of the commands; the image's if absent.
    workdir: str | None = None
    #: Environment on top of the image's.
    env: dict[str, str] = {}
    labels: dict[str, str] = {}
    job: str | None = None
    #: Idempotency key: repeating it returns the same sandbox (``conflict`` if it asks for another).
    #: In a batch, item ``n`` uses ``<request_id>/<n>``.
    request_id: Annotated[str, Meta(min_length=1, max_length=200)] | None = None
    #: If set, the sandbox is stopped unless it is used or claimed within this many seconds of its creation.
    lease_seconds: Seconds | None = None
    #: Allow set-user-id programs to gain privileges (``no_new_privileges`` off).
    allow_new_privileges: bool = False
    count: Annotated[int, Meta(ge=1, le=MAX_BATCH)] | None = None


class Limits(Wire):
    """Limits in force for a sandbox; absent means none."""

    memory_mb: int | None = None
    cpu_cores: float | None = None
    disk_mb: int | None = None
    pids: int | None = None
    open_files: int | None = None


class Sandbox(Wire):
    """What is known of a sandbox, live or (for the retention time) ended."""

    id: str
    state: State
    node: str
    backend: BackendName
    runtime: str
    container_image: str
    created_at: float
    #: Digests of the layers, base first.
    layers: list[str] = []
    workspace: str | None = None
    toolkits: list[str] = []
    limits: Limits = msgspec.field(default_factory=Limits)
    labels: dict[str, str] = {}
    job: str | None = None
    request_id: str | None = None
    ttl_running_stop: float | None = None
    ttl_hard: float | None = None
    running_at: float | None = None
    ended_at: float | None = None
    last_used_at: float | None = None
    #: Why a terminal sandbox ended: ``deleted``, ``idle_ttl``, ``hard_ttl``, ``unclaimed``, ``chronus_lost``,
    #: ``oom``, ``create_failed``, ``node_restart``.
    cause: str | None = None
    #: One sentence for people.
    cause_detail: str | None = None
    #: The infrastructure ended it, not the workload or its user.
    is_infra: bool = False
    #: Names of limits that were hit in its life: ``memory``, ``pids``, ``disk``.
    limits_hit: list[str] = []


class CreateResult(Wire):
    """One line of the answer to a batch create: a sandbox, or the error of this item."""

    index: int
    sandbox: Sandbox | None = None
    error: dict[str, Any] | None = None


class Claim(WireInput):
    """Sandboxes whose creator has learned their ids: their leases end."""

    ids: list[str]


class Metrics(Wire):
    """Resource use of one sandbox now."""

    memory_bytes: int = 0
    memory_peak_bytes: int = 0
    cpu_seconds: float = 0.0
    pids: int = 0
    disk_bytes: int | None = None
    oom_kills: int = 0


class ExecRequest(WireInput):
    """A command. Exactly one of ``argv`` and ``shell`` is given."""

    #: Chosen by the client; repeating it attaches to the same exec instead of starting another.
    id: Annotated[str, Meta(pattern="^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")] | None = None
    #: Program and arguments; the program is looked up in ``PATH`` of the command's environment.
    argv: list[str] | None = None
    #: A shell line, run by ``shell_program``.
    shell: str | None = None
    #: ``sh`` and ``bash`` are the platform's own static shells; anything else is a path inside the sandbox.
    shell_program: str = "sh"
    cwd: str | None = None
    env: dict[str, str] = {}
    user: str | None = None
    #: Bytes for standard input, followed by end of file. Absent: standard input is closed (empty).
    stdin: bytes | None = None
    #: Standard input stays open for ``attach`` and ``stdin`` calls.
    stdin_open: bool = False
    #: Seconds until the process tree gets TERM, then after ``grace_seconds`` KILL; absent: none.
    timeout: Seconds | None = None
    grace_seconds: Annotated[float, Meta(ge=0, le=600)] = 2.0
    #: Wait at most this long for the end and answer with the result; 0 answers at once.
    wait_seconds: Annotated[float, Meta(ge=0, le=86_400)] = 0.0


class Exec(Wire):
    """A command, running or ended.

    A command that could not be started (no such program, not executable) is an ended exec with exit code 127 or
    126 and the reason on stderr, as a shell has it.
    """

    id: str
    sandbox_id: str
    state: Literal["starting", "running", "exited", "lost"]
    argv: list[str] = []
    started_at: float = 0.0
    ended_at: float | None = None
    exit_code: int | None = None
    #: Signal name such as ``SIGKILL`` if a signal ended it; then ``exit_code`` is 128 + its number.
    signal: str | None = None
    timed_out: bool = False
    oom_killed: bool = False
    #: Total bytes produced so far on each stream, kept or not.
    stdout_bytes: int = 0
    stderr_bytes: int = 0
    duration: float | None = None
    #: User and system time of the main process and the children it waited for.
    cpu_seconds: float | None = None
    #: Largest resident set of the main process or a child it waited for.
    peak_memory_bytes: int | None = None
    #: The infrastructure lost it: the outcome is unknown and it is never repeated on its own.
    is_infra: bool = False


class ExecResult(Exec):
    """An exec with its output: present when the call waited and the command ended (or its wait ran out)."""

    stdout: bytes = b""
    stderr: bytes = b""
    #: A cut was made in a stream: the head and the newest rest are kept, ``[… n bytes cut …]`` marks it.
    truncated: bool = False


class OutputChunk(Wire):
    """A piece of output, one line of the NDJSON answer of ``GET …/output``."""

    stream: Literal["stdout", "stderr"]
    #: Position of the first byte of ``data`` in the stream.
    offset: int
    data: bytes = b""
    #: Bytes before ``offset`` that were asked for but are not kept.
    lost: int = 0


class Signal(WireInput):
    """A signal for an exec."""

    #: Name with or without ``SIG``, or number as a string.
    signal: str = "TERM"
    #: Send it to the whole process tree, not only to the main process.
    tree: bool = False


class FileInfo(Wire):
    """A directory entry or the target of ``stat`` (never following the last symbolic link)."""

    #: Path as text; bytes that are no UTF-8 are replaced, then ``path_raw`` has them.
    path: str
    kind: Literal["file", "directory", "symlink", "fifo", "socket", "char", "block"]
    size: int = 0
    #: Permission bits such as ``0o755``.
    mode: int = 0
    uid: int = 0
    gid: int = 0
    mtime: float = 0.0
    target: str | None = None
    path_raw: bytes | None = None


class ImageConfig(Wire):
    """What an image says about running commands in it."""

    env: dict[str, str] = {}
    user: str | None = None
    workdir: str | None = None


class Layer(Wire):
    """A content-addressed, read-only layer."""

    digest: str
    kind: Literal["base", "workspace", "toolkit", "snapshot"]
    size: int
    created_at: float
    config: ImageConfig = msgspec.field(default_factory=ImageConfig)
    #: Machine architecture of its binaries as ``uname -m`` has it; absent: none found.
    architecture: str | None = None


class Image(Wire):
    """A tagged name and the layer it points to."""

    reference: str
    layer: Layer


class DebianSource(WireInput):
    """Build a layer from Debian packages with mmdebstrap."""

    suite: str = "bookworm"
    packages: list[str] = []
    variant: Literal["minbase", "apt", "essential", "important"] = "minbase"


class ImportImage(WireInput):
    """Import from what the node can reach; a tar is sent as the body of its own call."""

    reference: str
    kind: Literal["base", "workspace", "toolkit"] = "base"
    debian: DebianSource | None = None
    config: ImageConfig | None = None


class TagImage(WireInput):
    """Let a reference point to what another one (or a digest) points to."""

    source: str
    target: str


class Progress(Wire):
    """One line of the answer to long work; the last has ``image`` or ``error``."""

    message: str = ""
    fraction: float | None = None
    image: Image | None = None
    error: dict[str, Any] | None = None


class Node(Wire):
    """An edge as the watcher sees it."""

    id: str
    state: Literal["ready", "draining", "suspect", "dead"]
    version: str = ""
    backends: list[str] = []
    runtimes: list[str] = []
    sandboxes: int = 0
    creating: int = 0
    memory_total_bytes: int = 0
    memory_available_bytes: int = 0
    cpu_count: int = 0
    #: PSI ``some`` average over 10 s, in percent, by resource.
    pressure: dict[str, float] = {}
    disk_free_bytes: int = 0
    by_job: dict[str, int] = {}
    started_at: float = 0.0


class Job(Wire):
    """A job: the sandboxes that carry its name, counted by state (ended ones for the retention time)."""

    id: str
    by_state: dict[str, int] = {}


class JobStopped(Wire):
    """Answer of stopping a job."""

    stopped: int


class LeakReport(Wire):
    """Things of ours on this host that no live sandbox, layer or process of ours owns, counted by kind."""

    processes: int = 0
    mounts: int = 0
    cgroups: int = 0
    namespaces: int = 0
    loop_devices: int = 0
    subvolumes: int = 0
    files: int = 0
    #: Name of each, by kind.
    items: dict[str, list[str]] = {}
