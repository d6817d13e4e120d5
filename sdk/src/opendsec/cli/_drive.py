"""Running one command with the terminal's streams joined to it."""

from __future__ import annotations

import asyncio
import os
import stat
import sys
import threading
from collections.abc import Sequence

from opendsec import ExecResult, PlatformError, Process, Sandbox
from opendsec._core import Core
from opendsec.cli._errors import TIMED_OUT
from opendsec.cli._output import print_json


def stdin_is_given() -> bool:
    """Tell whether standard input is a pipe, a file or a socket."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError, AttributeError):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISSOCK(mode)


async def drive(
    sandbox: Sandbox,
    argv: Sequence[str],
    *,
    shell: bool,
    stdin: bool,
    timeout: float | None,
    cwd: str | None,
    env: dict[str, str],
    user: str | None,
    as_json: bool,
) -> int:
    """Run a command, join its streams to ours and return its exit code; an interrupt kills it."""
    command: str | Sequence[str] = " ".join(argv) if shell else argv
    process = await sandbox.start(command, stdin=stdin, timeout=timeout, cwd=cwd, env=env, user=user)
    feeder = asyncio.create_task(_feed(process)) if stdin else None
    try:
        if not as_json:
            async for event in process:
                _write(event.stream, event.data)
        result = await process.wait() if as_json else None
        ended = result or await process.info()
        if ended.exit_code is None:
            ended = await process.wait()
    except BaseException:
        core: Core = process._core
        await core.cleanup(process.kill())
        raise
    finally:
        if feeder is not None:
            feeder.cancel()
            await asyncio.gather(feeder, return_exceptions=True)
    if result is not None:
        print_json(_report(result))
    if ended.timed_out:
        if not as_json:
            print(f"opendsec: the command was ended after {timeout:g} s", file=sys.stderr)
        return TIMED_OUT
    if ended.oom_killed and not as_json:
        print("opendsec: the command was killed: out of memory", file=sys.stderr)
    return ended.exit_code or 0


def _report(result: ExecResult) -> dict[str, object]:
    return {
        "sandbox_id": result.sandbox_id,
        "exec_id": result.id,
        "exit_code": result.exit_code,
        "signal": result.signal,
        "stdout": result.stdout,
        "stderr": result.stderr,
        "truncated": result.truncated,
        "timed_out": result.timed_out,
        "oom_killed": result.oom_killed,
        "duration": result.duration,
        "cpu_seconds": result.cpu_seconds,
        "peak_memory_bytes": result.peak_memory_bytes,
    }


def _write(stream: str, data: bytes) -> None:
    out = sys.stdout.buffer if stream == "stdout" else sys.stderr.buffer
    out.write(data)
    out.flush()


async def _feed(process: Process) -> None:
    """Pass our standard input on; what the command no longer reads is dropped."""
    loop = asyncio.get_running_loop()
    pieces: asyncio.Queue[bytes] = asyncio.Queue(maxsize=4)

    def read() -> None:
        # A thread of its own: a blocked read must not keep the program from ending.
        while True:
            try:
                piece = os.read(sys.stdin.fileno(), 65536)
                asyncio.run_coroutine_threadsafe(pieces.put(piece), loop).result()
            except (OSError, ValueError, RuntimeError, asyncio.CancelledError):
                return
            if not piece:
                return

    threading.Thread(target=read, name="stdin", daemon=True).start()
    try:
        while piece := await pieces.get():
            await process.write_stdin(piece)
        await process.close_stdin()
    except PlatformError:
        return
