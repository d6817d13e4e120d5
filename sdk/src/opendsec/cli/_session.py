"""How a command of the CLI runs: one client, one event loop, errors as exit codes."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from typing import Annotated

import typer

from opendsec import DSecClient, PlatformError
from opendsec.cli._errors import INTERRUPTED, USAGE, describe, exit_code

Json = Annotated[bool, typer.Option("--json", help="Machine-readable output on stdout, errors as JSON on stderr.")]


def run_client(
    work: Callable[[DSecClient], Awaitable[int | None]], *, as_json: bool, platform_code: int | None = None
) -> None:
    """Open a client, do the work and leave with its exit code.

    Args:
        work: returns an exit code; None means 0.
        as_json: how errors are told.
        platform_code: exit code of all errors of the platform but wrong usage; default: each its own.

    Raises:
        typer.Exit: always.
    """

    async def session() -> int | None:
        client = DSecClient(retry_seconds=20.0)
        await client.open(timeout=0)
        try:
            return await work(client)
        finally:
            await client.close()

    try:
        code = asyncio.run(session()) or 0
    except PlatformError as error:
        print(describe(error, as_json=as_json), file=sys.stderr)
        code = exit_code(error)
        if platform_code is not None and code != USAGE:
            code = platform_code
    except KeyboardInterrupt:
        code = INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output is gone; nothing more can be told to it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 141
    raise typer.Exit(code)


def key_values(pairs: list[str], option: str) -> dict[str, str]:
    """Return ``KEY=VALUE`` options as a dictionary.

    Raises:
        typer.BadParameter: one has no ``=``.
    """
    found = {}
    for pair in pairs:
        key, mark, value = pair.partition("=")
        if not mark or not key:
            raise typer.BadParameter(f"{pair!r} is not KEY=VALUE", param_hint=option)
        found[key] = value
    return found
