"""From a request to the command that chronus gets: exactly one of argv and shell, merged environment, user, folder."""

from __future__ import annotations

from opendsec.api import ids
from opendsec.api.errors import InvalidArgument
from opendsec.api.models import ExecRequest
from opendsec_server.channel.interface import ExecSpec
from opendsec_server.core.spec import SandboxSpec

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
#: Linux takes no single argument longer than this, in bytes.
MAX_ARGUMENT = 128 * 1024 - 1
#: Bytes of arguments and environment together.
MAX_ARGUMENTS = 1536 * 1024


def _bytes(kind: str, text: str) -> bytes:
    if "\0" in text:
        raise InvalidArgument(f"{kind} must not hold a NUL character", field=kind)
    return text.encode("utf-8", "surrogateescape")


def exec_spec(request: ExecRequest, sandbox: SandboxSpec) -> ExecSpec:
    """Build the command.

    Raises:
        InvalidArgument: neither or both of argv and shell, an empty argv, NUL characters, arguments beyond what Linux
            takes.
    """
    if (request.argv is None) == (request.shell is None):
        raise InvalidArgument("give exactly one of argv and shell")
    if request.stdin is not None and request.stdin_open:
        raise InvalidArgument("give either stdin or stdin_open", field="stdin")
    if request.argv is not None:
        if not request.argv or not request.argv[0]:
            raise InvalidArgument("argv must name a program", field="argv")
        if request.argv[0].startswith("@"):
            raise InvalidArgument(f"no program is called {request.argv[0][:40]!r}", field="argv")
        argv = [_bytes("argv", arg) for arg in request.argv]
    else:
        program = request.shell_program
        if program in {"sh", "bash"}:
            program = f"@{program}"
        elif not program.startswith("/"):
            raise InvalidArgument("shell_program must be sh, bash or an absolute path", field="shell_program")
        argv = [_bytes("shell_program", program), b"-c", _bytes("shell", request.shell or "")]
    config = sandbox.config
    env = {"PATH": DEFAULT_PATH, **config.env, **request.env}
    for name, value in request.env.items():
        if not name or "=" in name or "\0" in name or "\0" in value:
            raise InvalidArgument(f"{name[:80]!r} is not a valid environment variable", field="env")
    total = sum(map(len, argv)) + sum(len(name) + len(value) for name, value in env.items())
    if max(map(len, argv)) > MAX_ARGUMENT or total > MAX_ARGUMENTS:
        raise InvalidArgument(
            f"arguments and environment are too long: Linux takes {MAX_ARGUMENT} bytes each, {MAX_ARGUMENTS} together"
        )
    cwd = request.cwd or config.workdir or "/"
    user = request.user or config.user or "0"
    if user == "root":
        # An image without /etc/passwd has this user too.
        user = "0"
    if not cwd.startswith("/") or "\0" in cwd:
        raise InvalidArgument("cwd must be an absolute path", field="cwd")
    if "\0" in user or "\n" in user or len(user) > 256:
        raise InvalidArgument("user must be a name or an id, with :group if wanted", field="user")
    return ExecSpec(
        id=request.id or ids.new_exec_id(),
        argv=argv,
        env=env,
        cwd=cwd,
        user=user,
        stdin=request.stdin_open or bool(request.stdin),
        timeout_ms=round(request.timeout * 1000) if request.timeout is not None else None,
        grace_ms=round(request.grace_seconds * 1000),
    )
