"""Serve an ASGI application inside our own event loop: uvicorn, on any number of addresses.

Everything is one process: killed with SIGKILL, nothing of it stays behind but socket files, which the next start
removes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import uvicorn

from opendsec.api.errors import Conflict, InvalidArgument, Unavailable

#: Length of the listen queue; the kernel cuts it to ``net.core.somaxconn``.
_BACKLOG = 4096
#: How long an idle connection is kept, in seconds.
_KEEP_ALIVE_SECONDS = 24 * 3600
#: How long requests under way may take after the programs' own draining, in seconds.
_SHUTDOWN_SECONDS = 5


@contextlib.asynccontextmanager
async def open_server(app: Any, addresses: Sequence[str], *, unix_mode: int = 0o600) -> AsyncIterator[None]:
    """Serve while the context is open; connections are accepted once it is entered.

    Args:
        app: ASGI application; it gets no lifespan events.
        addresses: each ``unix:<path>`` or ``host:port``.
        unix_mode: file mode of the sockets.

    Raises:
        InvalidArgument: this is no address.
        Conflict: somebody serves at an address.
        Unavailable: an address cannot be listened on.
    """
    servers: list[tuple[uvicorn.Server, asyncio.Task[None]]] = []
    try:
        for address in addresses:
            listener = await _listener(address, unix_mode)
            server = uvicorn.Server(_config(app))
            # Not ``serve``: that would take the process' signals over.
            task = asyncio.ensure_future(server._serve([listener]))
            servers.append((server, task))
            await _wait_accepting(address, task)
        yield
    finally:
        for server, _ in servers:
            server.should_exit = True
        await asyncio.gather(*(task for _, task in servers), return_exceptions=True)


def _config(app: Any) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http="httptools",
        ws="websockets-sansio",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        backlog=_BACKLOG,
        # Our own clients keep connections for good: a server that closed them would look like one that broke.
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
    )


async def _listener(address: str, unix_mode: int) -> socket.socket:
    if address.startswith("unix:"):
        path = Path(address.removeprefix("unix:"))
        await _remove_stale(path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(str(path))
            os.chmod(path, unix_mode)  # noqa: PTH101 - as the line above
        except OSError as error:
            listener.close()
            raise Unavailable(f"cannot listen on {address}: {error.strerror}") from error
        listener.listen(_BACKLOG)
        return listener
    host, port = split_address(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise Unavailable(f"cannot listen on {address}: {error.strerror or error}") from error


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of a TCP address.

    Raises:
        InvalidArgument: this is not ``host:port``.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise InvalidArgument(f"{address!r} is not an address: use unix:<path> or host:port")
    return host.strip("[]"), int(port)


async def _remove_stale(path: Path) -> None:
    """Remove the socket of a process that was killed.

    Raises:
        Conflict: its process is alive, or the path is something else.
        Unavailable: the path is too long for a socket or cannot be used.
    """
    if len(str(path).encode()) > 107:
        raise Unavailable(f"the path {path} is too long for a socket: at most 107 bytes")
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise Conflict(f"{path} exists and is no socket")
        if await _accepts(f"unix:{path}"):
            raise Conflict(f"somebody already serves at {path}")
        os.unlink(path)  # noqa: PTH108 - as the line above
    except FileNotFoundError:
        return
    except OSError as error:
        raise Unavailable(f"cannot use {path}: {error.strerror}") from error


async def _wait_accepting(address: str, task: asyncio.Task[None]) -> None:
    """Return when connections are accepted; the server does not say when."""
    delay = 0.001
    while not await _accepts(address):
        if task.done():
            reason = task.exception()
            raise Unavailable(f"cannot listen on {address}: {reason or 'the server ended'}") from reason
        await asyncio.sleep(delay)
        delay = min(delay * 2, 0.05)


async def _accepts(address: str) -> bool:
    try:
        if address.startswith("unix:"):
            _, writer = await asyncio.open_unix_connection(address.removeprefix("unix:"))
        else:
            host, port = split_address(address)
            any_host = host in ("0.0.0.0", "::")
            _, writer = await asyncio.open_connection("localhost" if any_host else host, port)
    except OSError:
        return False
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return True
