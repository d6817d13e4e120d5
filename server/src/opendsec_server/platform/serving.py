"""Serve an ASGI application inside our own event loop: granian's embedded server, on any number of addresses.

Everything is one process: killed with SIGKILL, nothing of it stays behind but socket files, which the next start
removes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from granian.constants import HTTPModes, Interfaces
from granian.http import HTTP1Settings
from granian.server.embed import Server

from opendsec.api.errors import Conflict, InvalidArgument, Unavailable

#: Length of the listen queue; the kernel cuts it to ``net.core.somaxconn``.
_BACKLOG = 4096
#: Connections served at once. Granian's own default is its backlog: calls that wait for a command hold one each.
_CONNECTIONS = 200_000
#: Bytes of a request head, and of what is buffered of a body.
_BUFFER_BYTES = 512 * 1024


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
    servers: list[tuple[Server, asyncio.Task[None]]] = []
    try:
        for address in addresses:
            server = await _server(app, address, unix_mode)
            task = asyncio.ensure_future(server.serve())
            servers.append((server, task))
            await _wait_accepting(address, task)
        yield
    finally:
        for server, task in servers:
            if not task.done():
                server.stop()  # type: ignore[no-untyped-call]
        await asyncio.gather(*(task for _, task in servers), return_exceptions=True)


async def _server(app: Any, address: str, unix_mode: int) -> Server:
    options: dict[str, Any] = {
        "interface": Interfaces.ASGINL,
        "http": HTTPModes.http1,
        "backlog": _BACKLOG,
        "backpressure": _CONNECTIONS,
        "http1_settings": HTTP1Settings(max_buffer_size=_BUFFER_BYTES),
        "log_enabled": False,
    }
    if address.startswith("unix:"):
        path = Path(address.removeprefix("unix:"))
        await _remove_stale(path)
        server = Server(app, uds=path, **options)
        server.uds_permissions = unix_mode
        return server
    host, port = split_address(address)
    return Server(app, address=host, port=port, **options)


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
    """Return when connections are accepted; granian listens from a thread of its own and does not say when."""
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
