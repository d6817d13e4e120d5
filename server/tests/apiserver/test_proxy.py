"""The pass-through: streams both ways in bounded memory, WebSocket, clients and edges that vanish."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

from opendsec_server.testing.edge import SimulatedEdge

MIB = 2**20


@pytest.fixture
async def box(api):
    """The path of a sandbox."""
    return f"/v1/sandboxes/{(await api.create())['id']}"


async def until(condition):
    """Return when a condition holds."""
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.002)


async def pieces(count):
    for _ in range(count):
        yield b"y" * 65536


@pytest.mark.parametrize("announced", [True, False])
async def test_an_upload_streams(api, edge, box, announced):
    """A large body arrives whole, with or without an announced length."""
    headers = {"content-length": str(64 * 65536)} if announced else {}
    answer = await api.json("PUT", f"{box}/files?path=/a", data=pieces(64), headers=headers)
    assert answer == {"size": 64 * 65536}


async def test_an_upload_waits_for_a_slow_edge(api, edge, box):
    """What the edge does not read is not taken from the client."""
    edge.gate.clear()
    sent = 0

    async def counted():
        nonlocal sent
        async for piece in pieces(1024):
            sent += len(piece)
            yield piece

    upload = asyncio.ensure_future(api.json("PUT", f"{box}/files?path=/a", data=counted()))
    await until(lambda: edge.seen["PUT files"])
    before = -1
    while sent != before:
        before = sent
        await asyncio.sleep(0.1)
    assert sent < 16 * MIB
    edge.gate.set()
    assert await upload == {"size": 64 * MIB}


async def test_a_download_waits_for_a_slow_client(api, edge, box):
    """What the client does not read is not taken from the edge."""
    await api.json("POST", box + "/execs", 201, json={"id": "e", "shell": "x"})
    async with api.session.get(f"{api.base}{box}/execs/e/output?chunks=1024") as response:
        await until(lambda: edge.uploaded)
        before = -1
        while edge.uploaded != before:
            before = edge.uploaded
            await asyncio.sleep(0.1)
        assert edge.uploaded < 16 * MIB
        assert len(await response.read()) == 64 * MIB


async def test_names_that_are_not_utf8_pass_unchanged(api, edge, box):
    """Percent-encoded bytes of a path reach the edge as they are."""
    reader, writer = await asyncio.open_unix_connection(str(api.socket))
    request = f"PUT {box}/files?path=%2Fa%FF%0Ab HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {api.key}\r\n"
    writer.write(request.encode() + b"connection: close\r\ncontent-length: 2\r\n\r\nhi")
    assert b" 200 " in (await reader.read())[:20]
    writer.close()
    assert [path for _, path in edge.files] == ["/a\ufffd\nb"]


async def test_a_client_that_leaves_cancels_the_request(api, edge, box):
    """Nobody waits at the edge for a client that is gone, be it before or inside the answer."""
    edge.gate.clear()
    waiting = asyncio.ensure_future(api.json("POST", box + "/execs", json={"id": "e", "shell": "x"}))
    await until(lambda: edge.seen["POST execs"])
    waiting.cancel()
    await until(lambda: edge.disconnects == 1)
    async with api.session.get(f"{api.base}{box}/execs/e/output?chunks=1&hold=1") as response:
        await response.content.read(10)
        response.close()
    await until(lambda: edge.disconnects == 2)
    await until(lambda: api.front._inflight == 0)


async def test_an_upload_that_is_cut_never_looks_complete(api, edge, box):
    """A client that dies in the middle of a body leaves no short file behind."""

    async def dying():
        yield b"y" * MIB
        raise RuntimeError("client died")

    with pytest.raises((aiohttp.ClientError, RuntimeError)):
        await api.json("PUT", f"{box}/files?path=/a", data=dying())
    await until(lambda: api.front._inflight == 0)
    assert not edge.files


async def test_an_answer_that_breaks_is_broken_for_the_client(api, edge, box):
    """A stream whose edge died has no proper end."""
    await api.json("POST", box + "/execs", 201, json={"id": "e", "shell": "x"})
    with pytest.raises(aiohttp.ClientPayloadError):
        async with api.session.get(f"{api.base}{box}/execs/e/output?chunks=8&break=1") as response:
            await response.read()


@pytest.mark.parametrize(
    ("request_line", "body", "retryable"),
    [
        ("POST /execs", {"id": "e", "shell": "x"}, True),
        ("POST /execs", {"shell": "x"}, False),
        ("GET /execs/e1", None, True),
        ("PUT /files?path=a", {}, False),
    ],
)
async def test_a_break_tells_whether_the_request_may_be_repeated(api, edge, request_line, body, retryable):
    """Only what is safe to repeat is called retryable; of the rest the outcome is unknown."""
    method, path = request_line.split()
    box = f"/v1/sandboxes/{(await api.create())['id']}"
    await api.json("POST", box + "/execs", 201, json={"id": "e1", "shell": "x"})
    edge.break_after |= {"execs", "e1", "files"}
    error = await api.json(method, box + path, 503 if retryable else 502, json=body)
    assert (error["code"], error["retryable"]) == ("unavailable" if retryable else "outcome_unknown", retryable)
    assert (error.get("detail", {}).get("outcome") == "unknown") is not retryable


async def test_requests_wait_for_a_restarting_edge(tmp_path, api_over):
    """An edge that is away for a moment delays requests and fails none."""
    async with api_over(["local"]) as api:
        async with SimulatedEdge("local").open_server(tmp_path / "local.sock"):
            made = await api.create()
        request = asyncio.ensure_future(api.json("GET", f"/v1/sandboxes/{made['id']}", 404))
        create = asyncio.ensure_future(api.create())
        await asyncio.sleep(0.05)
        async with SimulatedEdge("local").open_server(tmp_path / "local.sock"):
            assert (await request)["code"] == "not_found"
            assert (await create)["state"] == "running"


async def test_an_edge_that_stays_away_is_unavailable(api_over):
    """After a bounded wait the caller is told that nothing happened."""
    async with api_over(["local"], deadline=0.1) as api:
        error = await api.json("POST", "/v1/sandboxes/local-aaaaaaaaaaaa/execs", 503, json={"shell": "x"})
        assert (error["code"], error["retryable"]) == ("unavailable", True)


async def test_a_websocket_passes_both_ways(api, edge, box):
    """Text and bytes pass, and the edge's close code arrives."""
    await api.json("POST", box + "/execs", 201, json={"id": "e", "shell": "x"})
    async with api.session.ws_connect(f"{api.base}{box}/execs/e/attach?stdout=0&stderr=0") as socket:
        await socket.send_str('{"eof":true}')
        assert await socket.receive_str() == '{"eof":true}'
        await socket.send_bytes(b"\0" * MIB)
        assert await socket.receive_bytes() == b"\0" * MIB
        await socket.send_str("close 4001")
        assert (await socket.receive()).type is aiohttp.WSMsgType.CLOSE
        assert socket.close_code == 4001


async def test_a_client_that_closes_its_websocket_closes_the_edge_s(api, edge, box):
    """The client's close code arrives at the edge."""
    await api.json("POST", box + "/execs", 201, json={"id": "e", "shell": "x"})
    async with api.session.ws_connect(f"{api.base}{box}/execs/e/attach") as socket:
        await socket.close(code=4002)
    await until(lambda: edge.seen["closed 4002"])
    await until(lambda: api.front._inflight == 0)


@pytest.mark.parametrize(
    ("sandbox", "key", "status"),
    [(None, None, 404), ("local-aaaaaaaaaaaa", None, 404), ("nonsense", None, 400), (None, "none", 401)],
)
async def test_a_refused_websocket_has_a_status(api, box, sandbox, key, status):
    """A handshake that is refused is refused as any other request."""
    path = f"/v1/sandboxes/{sandbox}" if sandbox else box
    headers = {"authorization": key} if key else None
    with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
        await api.session.ws_connect(f"{api.base}{path}/execs/none/attach", headers=headers)
    assert caught.value.status == status


async def test_images_go_to_an_edge(api, edge):
    """An image's tar streams to the edge and its progress streams back."""
    async with api.session.put(f"{api.base}/v1/images?reference=a&kind=base", data=pieces(64)) as response:
        assert await response.read() == b'{"message":"done"}\n'
    assert edge.uploaded == 64 * 65536
    assert await api.json("GET", "/v1/images") == []


async def test_head_is_refused_without_asking_the_edge(api, edge, box):
    """No answer without a body is waited for."""
    async with api.session.head(api.base + box) as response:
        assert response.status == 404
    assert not any(name.startswith("HEAD") for name in edge.seen)
