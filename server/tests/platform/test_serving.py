"""Serving an application on our own loop."""

from __future__ import annotations

import asyncio
import socket
import stat

import pytest

from opendsec.api.errors import Conflict, InvalidArgument, Unavailable
from opendsec_server.platform.serving import open_server


async def app(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


async def ask(opened) -> bytes:
    reader, writer = await opened
    writer.write(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    answer = await reader.read()
    writer.close()
    return answer


async def test_it_serves_on_a_socket_and_a_port(tmp_path):
    """One application, two addresses, closed with the context; the socket is private unless asked."""
    path = tmp_path / "a.sock"
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    async with open_server(app, (f"unix:{path}", f"127.0.0.1:{port}")):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert (await ask(asyncio.open_unix_connection(str(path)))).endswith(b"ok")
        assert (await ask(asyncio.open_connection("127.0.0.1", port))).endswith(b"ok")
    with pytest.raises(OSError):
        await asyncio.open_connection("127.0.0.1", port)


async def test_a_socket_left_by_a_killed_process_is_replaced(tmp_path):
    """A socket file without a listener does not stop a start."""
    path = tmp_path / "a.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    async with open_server(app, (f"unix:{path}",), unix_mode=0o666):
        assert stat.S_IMODE(path.stat().st_mode) == 0o666
        assert (await ask(asyncio.open_unix_connection(str(path)))).endswith(b"ok")


async def test_a_served_address_is_refused(tmp_path):
    """Nobody's socket is taken away."""
    path = tmp_path / "a.sock"
    async with open_server(app, (f"unix:{path}",)):
        with pytest.raises(Conflict):
            async with open_server(app, (f"unix:{path}",)):
                pass
        assert (await ask(asyncio.open_unix_connection(str(path)))).endswith(b"ok")


async def test_bad_addresses_are_named(tmp_path):
    """What cannot be an address says why."""
    (tmp_path / "file").touch()
    for address, error in (
        ("nonsense", InvalidArgument),
        ("host:0", InvalidArgument),
        (f"unix:{tmp_path}/file", Conflict),
        (f"unix:{tmp_path}/{'x' * 120}", Unavailable),
        (f"unix:{tmp_path}/none/a.sock", Unavailable),
    ):
        with pytest.raises(error):
            async with open_server(app, (address,)):
                pass


async def test_many_calls_can_wait_at_once(tmp_path):
    """Calls that wait for a command do not lock out others."""
    path, gate, waiting = tmp_path / "a.sock", asyncio.Event(), 0

    async def slow(scope, receive, send):
        nonlocal waiting
        waiting += 1
        await gate.wait()
        await app(scope, receive, send)

    async with open_server(slow, (f"unix:{path}",)):
        calls = [asyncio.ensure_future(ask(asyncio.open_unix_connection(str(path)))) for _ in range(1500)]
        async with asyncio.timeout(20):
            while waiting < 1500:
                await asyncio.sleep(0.01)
            gate.set()
            answers = await asyncio.gather(*calls)
            assert all(answer.endswith(b"ok") for answer in answers)
