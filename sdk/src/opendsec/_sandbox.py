"""A sandbox as the trainer sees it."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from types import TracebackType
from typing import Self

import msgspec

from opendsec._core import Core
from opendsec._execs import Execs, request_for
from opendsec._files import Files, SandboxPath
from opendsec._process import Process
from opendsec._results import ExecResult
from opendsec._trees import Transfer, download, upload
from opendsec.api.errors import NotFound
from opendsec.api.ids import new_request_id
from opendsec.api.models import TERMINAL, Exec, Image, Metrics
from opendsec.api.models import Sandbox as SandboxInfo

_info = msgspec.json.Decoder(SandboxInfo)
_metrics = msgspec.json.Decoder(Metrics)
_execs = msgspec.json.Decoder(list[Exec])
_image = msgspec.json.Decoder(Image)
#: A sandbox may take its time to stop or pause.
_CHANGE_IDLE = 180.0


class Sandbox:
    """An isolated environment that keeps its state between calls; made by ``DSecClient``.

    As ``async with`` block it is stopped at the end.

    All calls raise ``SandboxGone`` (or ``NodeLost``, ``Preempted``) once the sandbox has ended, ``Unavailable`` when
    the platform does not answer, and ``OutcomeUnknown`` when a connection broke and the call could not be repeated.

    Attributes:
        id: its id.
        info: what was last heard of it; ``refresh`` asks anew.
        files: file calls.
    """

    def __init__(self, core: Core, info: SandboxInfo) -> None:
        self._core = core
        self._execs = Execs(core, info.id)
        self._target = f"/v1/sandboxes/{info.id}"
        self.id = info.id
        self.info = info
        self.files = Files(core, info.id)

    def __repr__(self) -> str:
        return f"<Sandbox {self.id} {self.info.state}>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._core.cleanup(self.stop(), seconds=_CHANGE_IDLE)

    # -- commands --------------------------------------------------------------------------------------------------

    async def run_shell(
        self,
        command: str,
        *,
        timeout: float | None = None,
        cwd: str | PurePath | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        stdin: bytes | str | None = None,
        shell_program: str = "sh",
        check: bool = False,
        detach: bool = False,
        grace: float = 2.0,
        exec_id: str | None = None,
    ) -> ExecResult:
        """Run a shell line and return how it ended (paper, listing 1).

        A lost connection is taken up again: the command runs once and its real result is returned. Cancelling the call
        kills the command's process tree.

        Args:
            command: the line, for ``shell_program``.
            timeout: seconds until the platform ends the process tree; then the result has ``timed_out`` and the output
                so far. Default: none.
            cwd: directory.
            env: environment on top of the image's and the sandbox's.
            user: by name or id, with ``:group`` if wanted.
            stdin: standard input; default empty.
            shell_program: ``sh`` or ``bash`` (the platform's own), or a path in the sandbox.
            check: raise if the command fails.
            detach: let the command go on if this call is cancelled.
            grace: seconds between TERM and KILL at the timeout.
            exec_id: id of the exec; repeating one gives the same command's result.

        Raises:
            CommandFailed: with ``check``, another exit code than 0; ``CommandTimedOut`` (also ``ExecTimeout``) at the
                timeout.
            OutcomeUnknown: the platform lost the command.
            PlatformError: the platform failed.
        """
        request = request_for(
            command,
            timeout=timeout,
            cwd=cwd,
            env=env,
            user=user,
            stdin=stdin,
            shell_program=shell_program,
            grace=grace,
            exec_id=exec_id,
        )
        return await self._execs.run(request, check=check, detach=detach)

    async def exec(
        self,
        argv: Sequence[str | PurePath],
        *,
        timeout: float | None = None,
        cwd: str | PurePath | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        stdin: bytes | str | None = None,
        check: bool = False,
        detach: bool = False,
        grace: float = 2.0,
        exec_id: str | None = None,
    ) -> ExecResult:
        """Run a program with its arguments, without a shell; else like ``run_shell``.

        Raises:
            TypeError: ``argv`` is a string.
            CommandFailed: see ``run_shell``.
            PlatformError: the platform failed.
        """
        if isinstance(argv, str):
            raise TypeError("exec() takes a list of arguments; use run_shell() for a shell line")
        request = request_for(
            argv, timeout=timeout, cwd=cwd, env=env, user=user, stdin=stdin, grace=grace, exec_id=exec_id
        )
        return await self._execs.run(request, check=check, detach=detach)

    async def start(
        self,
        command: str | Sequence[str | PurePath],
        *,
        stdin: bool = False,
        timeout: float | None = None,
        cwd: str | PurePath | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        shell_program: str = "sh",
        grace: float = 2.0,
        exec_id: str | None = None,
    ) -> Process:
        """Start a shell line (a string) or a program with arguments (a sequence) and return at once.

        Args:
            command: what.
            stdin: keep standard input open for ``Process.write_stdin``.
            timeout: see ``run_shell``; so are the others.
            cwd: directory.
            env: environment.
            user: who.
            shell_program: for a shell line.
            grace: seconds between TERM and KILL.
            exec_id: id of the exec.

        Raises:
            PlatformError: the platform failed.
        """
        request = request_for(
            command,
            timeout=timeout,
            cwd=cwd,
            env=env,
            user=user,
            stdin_open=stdin,
            shell_program=shell_program,
            grace=grace,
            exec_id=exec_id,
        )
        started = await self._execs.start(request)
        return Process(self._core, self._execs, started.id)

    def attach(self, exec_id: str, *, offsets: tuple[int, int] = (0, 0)) -> Process:
        """Return the process of an exec that was started elsewhere or before.

        Args:
            exec_id: its id; an unknown one is noticed at the first call.
            offsets: where to go on in stdout and stderr.
        """
        return Process(self._core, self._execs, exec_id, offsets)

    async def execs(self) -> list[Exec]:
        """Return the commands of this sandbox, running and ended, that are still on record."""
        return _execs.decode(await self._core.transport.call("GET", self._execs.target))

    # -- trees -----------------------------------------------------------------------------------------------------

    async def upload(self, local: str | PurePath, remote: SandboxPath, *, user: str | None = None) -> None:
        """Copy a file, or the content of a directory, into the sandbox; missing directories are made.

        Args:
            local: on this machine. Modes, times and links are kept, owners are not.
            remote: path of the file, or the directory that receives the content.
            user: on whose behalf.

        Raises:
            NotFound: nothing is at ``local``.
            PlatformError: it could not be written.
        """
        await upload(self._core, self.files, self.id, Path(local), remote, user=user)

    async def download(
        self,
        remote: SandboxPath,
        local: str | PurePath,
        *,
        user: str | None = None,
        skip_unsafe: bool = False,
        limit_bytes: int = 64 * 1024**3,
    ) -> Transfer:
        """Copy a file, or the content of a directory, to this machine.

        What comes from a sandbox is not trusted: names and links that leave ``local``, devices and set-id bits never
        get onto this machine.

        Args:
            remote: in the sandbox.
            local: path of the file, or the directory that receives the content (made if missing, then complete or not
                there at all).
            user: on whose behalf.
            skip_unsafe: pass over what is not safe (absolute links, say) and name it in the result, instead of failing.
            limit_bytes: most bytes to accept.

        Raises:
            PolicyDenied: a member is not safe.
            OutputLimit: more than ``limit_bytes``.
            PlatformError: it could not be read.
        """
        return await download(
            self._core,
            self.files,
            self.id,
            remote,
            Path(local),
            user=user,
            skip_unsafe=skip_unsafe,
            limit_bytes=limit_bytes,
        )

    # -- life ------------------------------------------------------------------------------------------------------

    async def refresh(self) -> SandboxInfo:
        """Ask for the present state and return it; works for the retention time after the sandbox has ended, too."""
        self.info = _info.decode(await self._core.transport.call("GET", self._target))
        return self.info

    async def metrics(self) -> Metrics:
        """Return its use of memory, CPU, processes and disk now."""
        return _metrics.decode(await self._core.transport.call("GET", f"{self._target}/metrics"))

    async def stop(self) -> SandboxInfo:
        """End the sandbox, whatever its state, and return its last record; doing it twice does no harm.

        Returns when nothing of it is left on the node.
        """
        self._core.unclaim(self.id)
        with contextlib.suppress(NotFound):
            self.info = _info.decode(await self._core.transport.call("DELETE", self._target, idle=_CHANGE_IDLE))
        return self.info

    @property
    def is_terminal(self) -> bool:
        """Whether it had ended when it was last heard of."""
        return self.info.state in TERMINAL

    async def pause(self) -> SandboxInfo:
        """Freeze it and give its memory back.

        Raises:
            UnsupportedCapability: the platform cannot do it yet.
        """
        return await self._change("/pause")

    async def resume(self) -> SandboxInfo:
        """Let a paused sandbox go on.

        Raises:
            UnsupportedCapability: the platform cannot do it yet.
        """
        return await self._change("/resume")

    async def pack_diff(self, reference: str) -> Image:
        """Freeze what was changed since the sandbox began as a new layer with a name.

        Raises:
            UnsupportedCapability: the platform cannot do it yet.
        """
        body = msgspec.json.encode({"reference": reference})
        target = f"{self._target}/pack_diff"
        return _image.decode(await self._core.transport.call("POST", target, body, idempotent=False, idle=_CHANGE_IDLE))

    async def fork(self) -> Sandbox:
        """Return a new sandbox with a copy of this one's disk.

        Raises:
            UnsupportedCapability: the platform cannot do it yet.
        """
        body = msgspec.json.encode({"request_id": new_request_id()})
        answer = await self._core.transport.call("POST", f"{self._target}/fork", body, idle=_CHANGE_IDLE)
        return Sandbox(self._core, _info.decode(answer))

    async def set_network_rules(self, rules: Mapping[str, bool]) -> None:
        """Replace the network rules.

        Args:
            rules: service → may be reached.

        Raises:
            UnsupportedCapability: a rule is ``True``, which the platform cannot enforce yet.
        """
        await self._core.transport.call("PUT", f"{self._target}/network", msgspec.json.encode(dict(rules)))

    async def _change(self, what: str) -> SandboxInfo:
        answer = await self._core.transport.call("POST", self._target + what, idle=_CHANGE_IDLE)
        self.info = _info.decode(answer)
        return self.info
