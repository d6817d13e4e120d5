"""The edge's HTTP API over its socket."""

from __future__ import annotations

import asyncio
import contextlib
import io
import tarfile

import aiohttp
import msgspec
import pytest

from opendsec.api import models
from opendsec_server.edge.app import EdgeApp, build_litestar
from opendsec_server.platform.serving import open_server

from .conftest import create


class Client:
    """Calls the edge and decodes its answers."""

    def __init__(self, session):
        self.session = session

    async def call(self, method, path, *, type=None, status=None, **options):  # noqa: A002
        """Return the decoded answer; the status must be as expected (2xx if not given)."""
        if "json" in options:
            options["data"] = msgspec.json.encode(options.pop("json"))
        async with self.session.request(method, "http://edge" + path, **options) as response:
            body = await response.read()
            assert response.status == status if status else response.status < 300, (response.status, body)
            if type is not None:
                return msgspec.json.decode(body, type=type)
            return body

    async def error(self, method, path, status, **options):
        """Return the error of a call that must fail."""
        from opendsec.api.errors import ErrorBody

        return await self.call(method, path, type=ErrorBody, status=status, **options)

    async def create(self, **fields) -> str:
        """Create a sandbox and return the path of its resources."""
        box = await self.call("POST", "/v1/sandboxes", json=create(**fields), type=models.Sandbox, status=201)
        return f"/v1/sandboxes/{box.id}"

    async def run(self, box, line, **fields) -> models.ExecResult:
        """Run a line."""
        request = {"shell": line, "wait_seconds": 10, **fields}
        return await self.call("POST", f"{box}/execs", json=request, type=models.ExecResult)


def lines(body, type):  # noqa: A002
    """Decode lines."""
    return [msgspec.json.decode(line, type=type) for line in body.splitlines()]


@contextlib.asynccontextmanager
async def serving(edge, path):
    """Serve an edge; gives its application and a client."""
    app = EdgeApp(edge, build_litestar(edge))
    async with open_server(app, [f"unix:{path}"]):
        connector = aiohttp.UnixConnector(path=str(path), limit=0)
        async with aiohttp.ClientSession(connector=connector) as session:
            yield app, Client(session)


@pytest.fixture
async def client(edge, tmp_path):
    """A client of a served edge."""
    async with serving(edge, tmp_path / "e.sock") as (_, client):
        yield client


async def test_a_sandbox_lives_from_create_to_delete(client):
    """Create, get, list, metrics, claim, delete, and deleting again."""
    box = await client.create(request_id="r", labels={"k": "v=w"}, lease_seconds=50)
    found = await client.call("GET", box, type=models.Sandbox)
    assert (found.state, found.request_id) == ("running", "r")
    for query in ("?label=k=v=w", "?request_id=r", "?state=running&state=stopped", ""):
        assert len(await client.call("GET", f"/v1/sandboxes{query}", type=list[models.Sandbox])) == 1
    assert await client.call("GET", "/v1/sandboxes?label=k=x", type=list[models.Sandbox]) == []
    assert (await client.call("GET", f"{box}/metrics", type=models.Metrics)).pids == 1
    await client.call("POST", "/v1/sandboxes/claim", json={"ids": [found.id]}, status=204)
    for _ in range(2):
        assert (await client.call("DELETE", box, type=models.Sandbox)).state == "stopped"
    gone = await client.error("POST", f"{box}/execs", 410, json={"shell": "true"})
    assert (gone.code, gone.detail["cause"], gone.retryable) == ("sandbox_gone", "deleted", False)
    assert (await client.error("GET", f"{box}/metrics", 410)).code == "sandbox_gone"


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("GET", "/v1/sandboxes/local-aaaaaaaaaaaa", None, 404, "not_found"),
        ("GET", "/v1/sandboxes/nonsense", None, 400, "invalid_argument"),
        ("GET", "/v1/nothing", None, 404, "not_found"),
        ("PATCH", "/v1/sandboxes", None, 405, "not_found"),
        ("POST", "/v1/sandboxes", b"{", 400, "invalid_argument"),
        ("POST", "/v1/sandboxes", b'{"container_image":"base:1","bogus":1}', 400, "invalid_argument"),
        ("POST", "/v1/sandboxes", b'{"container_image":"base:1","memory_limit_mb":-1}', 400, "invalid_argument"),
        ("POST", "/v1/sandboxes", b'{"container_image":"base:1","count":2}', 400, "invalid_argument"),
        ("POST", "/v1/sandboxes", b'{"container_image":"none:1"}', 404, "image_unavailable"),
        ("POST", "/v1/sandboxes/local-aaaaaaaaaaaa/execs", b'{"shell":"true"}', 404, "not_found"),
        ("GET", "/v1/sandboxes?state=bogus", None, 400, "invalid_argument"),
        ("GET", "/v1/sandboxes?label=nokey", None, 400, "invalid_argument"),
        ("POST", "/v1/nodes/other/drain", None, 404, "not_found"),
    ],
)
async def test_bad_requests_get_typed_errors(client, method, path, body, status, code):  # noqa: PLR0917
    """Each with the body that names the code."""
    assert (await client.error(method, path, status, data=body)).code == code


async def test_what_no_backend_can_do_is_refused(client):
    """Nothing is pretended."""
    box = await client.create()
    for operation in ("pause", "resume", "pack_diff", "fork"):
        assert (await client.error("POST", f"{box}/{operation}", 422)).code == "unsupported_capability"
    await client.call("PUT", f"{box}/network", json={"pypi": False}, status=204)
    assert (await client.error("PUT", f"{box}/network", 422, json={"pypi": True})).code == "unsupported_capability"


async def test_a_command_is_started_followed_and_asked_for(client, host):
    """Start without waiting, follow its output, ask for its state and its result."""
    box = await client.create()
    id_ = box.rsplit("/", 1)[1]
    started = await client.call(
        "POST", f"{box}/execs", json={"shell": "echo a; hold g; echo b >&2", "id": "e"}, type=models.Exec
    )
    assert started.state in {"starting", "running"}
    async with client.session.get(f"http://edge{box}/execs/e/output?follow=true") as response:
        chunk = msgspec.json.decode(await response.content.readline(), type=models.OutputChunk)
        assert (chunk.stream, chunk.offset, chunk.data) == ("stdout", 0, b"a\n")
        host.backend.guests[id_].release("g")
        rest = lines(await response.content.read(), models.OutputChunk)
    assert [(chunk.stream, chunk.data) for chunk in rest] == [("stderr", b"b\n")]
    state = await client.call("GET", f"{box}/execs/e?wait_seconds=5", type=models.Exec)
    assert (state.state, state.exit_code) == ("exited", 0)
    result = await client.call("GET", f"{box}/execs/e?output=true", type=models.ExecResult)
    assert (result.stdout, result.stderr) == (b"a\n", b"b\n")
    assert [one.id for one in await client.call("GET", f"{box}/execs", type=list[models.Exec])] == ["e"]
    part = lines(await client.call("GET", f"{box}/execs/e/output?stdout=1&stderr=2"), models.OutputChunk)
    assert [(chunk.offset, chunk.data) for chunk in part] == [(1, b"\n")]
    await client.call("DELETE", f"{box}/execs/e", status=204)
    assert (await client.error("GET", f"{box}/execs/e", 404)).code == "not_found"


async def test_a_follower_of_a_silent_command_gets_its_head_at_once(client, host):
    """Nobody waits for output to learn that the request was taken, and one who leaves is noticed."""
    box = await client.create()
    life = host.service.life(box.rsplit("/", 1)[1])
    await client.call("POST", f"{box}/execs", json={"shell": "hold g", "id": "e"})
    async with asyncio.timeout(5), client.session.get(f"http://edge{box}/execs/e/output?follow=true") as response:
        assert response.status == 200
        while not life.busy:
            await asyncio.sleep(0.001)
    while life.busy:
        await asyncio.sleep(0.001)


async def test_large_results_come_in_pieces_and_whole(client):
    """The same fields as a small one's, whatever the length of the output."""
    box = await client.create()
    for size in (600_000, 600_001, 600_002):
        result = await client.run(box, f"echo begin; flood {size}; echo end >&2; exit 3", id=f"e{size}")
        assert result.stdout == b"begin\n" + b"x" * size
        assert (result.stderr, result.exit_code, result.truncated) == (b"end\n", 3, False)
        again = await client.call("GET", f"{box}/execs/e{size}?output=true", type=models.ExecResult)
        assert again == result


async def test_signals_and_input_reach_a_command(client):
    """Over plain calls."""
    box = await client.create()
    await client.call("POST", f"{box}/execs", json={"shell": "cat", "id": "c", "stdin_open": True})
    await client.call("POST", f"{box}/execs/c/stdin", data=b"one\n", status=204)
    await client.call("POST", f"{box}/execs/c/stdin?eof=true", data=b"two\n", status=204)
    result = await client.run(box, "x", id="c")
    assert result.stdout == b"one\ntwo\n"
    await client.call("POST", f"{box}/execs", json={"shell": "hold g", "id": "h"})
    assert (await client.error("POST", f"{box}/execs/h/signal", 400, json={"signal": "NOPE"})).code
    await client.call("POST", f"{box}/execs/h/signal", json={"signal": "TERM"}, status=204)
    assert (await client.run(box, "x", id="h")).signal == "SIGTERM"
    assert (await client.error("POST", f"{box}/execs/h/signal", 404, json={})).code == "not_found"


async def test_an_attached_client_drives_a_command(client):
    """Output and final state come as text, input goes as bytes, signals and end of input as text."""
    box = await client.create()
    await client.call("POST", f"{box}/execs", json={"shell": "echo hi; cat", "id": "c", "stdin_open": True})
    async with client.session.ws_connect(f"http://edge{box}/execs/c/attach") as socket:
        assert msgspec.json.decode((await socket.receive()).data, type=models.OutputChunk).data == b"hi\n"
        await socket.send_bytes(b"in\n")
        assert msgspec.json.decode((await socket.receive()).data, type=models.OutputChunk).data == b"in\n"
        await socket.send_str('{"eof":true}')
        assert msgspec.json.decode((await socket.receive()).data, type=models.Exec).exit_code == 0
        closing = await socket.receive()
        assert (closing.type, closing.data) == (aiohttp.WSMsgType.CLOSE, 1000)
    await client.call("POST", f"{box}/execs", json={"shell": "hold g", "id": "h"})
    async with client.session.ws_connect(f"http://edge{box}/execs/h/attach") as socket:
        await socket.send_str('{"signal":"KILL","tree":true}')
        assert msgspec.json.decode((await socket.receive()).data, type=models.Exec).signal == "SIGKILL"
    async with client.session.ws_connect(f"http://edge{box}/execs/h/attach") as socket:
        assert msgspec.json.decode((await socket.receive()).data, type=models.Exec).signal == "SIGKILL"


async def test_leaving_an_attached_command_does_not_end_it(client, host):
    """A closed socket is no signal."""
    box = await client.create()
    life = host.service.life(box.rsplit("/", 1)[1])
    await client.call("POST", f"{box}/execs", json={"shell": "hold g; echo x", "id": "e"})
    async with client.session.ws_connect(f"http://edge{box}/execs/e/attach"):
        pass
    while life.busy:
        await asyncio.sleep(0.001)
    host.backend.guests[life.id].release("g")
    assert (await client.run(box, "x", id="e")).stdout == b"x\n"


async def test_leaving_a_waited_command_does_not_end_it(client, host):
    """A lost connection never ends a command."""
    box = await client.create()
    life = host.service.life(box.rsplit("/", 1)[1])
    waiting = asyncio.ensure_future(client.run(box, "hold g; echo x", id="e"))
    while "e" not in life.execs.execs:
        await asyncio.sleep(0.001)
    waiting.cancel()
    host.backend.guests[life.id].release("g")
    assert (await client.run(box, "x", id="e")).stdout == b"x\n"


async def test_leaving_a_create_does_not_end_it(client, host):
    """It is found by its request id."""
    host.backend.start_gate.clear()
    creating = asyncio.ensure_future(client.create(request_id="r"))
    while not host.backend.guests:
        await asyncio.sleep(0.001)
    creating.cancel()
    host.backend.start_gate.set()
    box = await client.create(request_id="r")
    assert host.backend.calls["start"] == 1
    assert (await client.run(box, "echo x")).stdout == b"x\n"


async def test_files_are_written_read_and_listed_by_bytes(client):
    """Names are percent-encoded bytes, contents stream, ranges and modes hold."""
    box = await client.create()
    big = bytes(range(256)) * 80_000
    query = "path=/tmp/d/%FF%0A%20%2Bx"
    written = await client.call("PUT", f"{box}/files?{query}&parents=true&mode=640", data=io.BytesIO(big))
    assert msgspec.json.decode(written) == {"written": len(big)}
    assert await client.call("GET", f"{box}/files?{query}") == big
    assert await client.call("GET", f"{box}/files?{query}&offset=10&length=5") == big[10:15]
    info = await client.call("GET", f"{box}/files/stat?{query}", type=models.FileInfo)
    assert (info.size, info.mode, info.path_raw) == (len(big), 0o640, b"/tmp/d/\xff\n +x")
    listed = lines(await client.call("GET", f"{box}/files/list?path=/tmp&recursive=true"), models.FileInfo)
    assert len(listed) == 2
    await client.call("POST", f"{box}/files/move?source=/tmp/d&target=/tmp/e", status=204)
    await client.call("POST", f"{box}/files/mkdir?path=/a/b&parents=true&mode=700", status=204)
    await client.call("DELETE", f"{box}/files?path=/tmp/e&recursive=true", status=204)
    for path, status in (("/tmp/e", 404), ("relative", 400), ("/a%00b", 400), ("", 400)):
        await client.error("GET", f"{box}/files?path={path}", status)
    await client.error("GET", f"{box}/files", 400)
    await client.error("PUT", f"{box}/files?path=/x&mode=999", 400, data=b"")


async def test_an_upload_that_is_cut_off_is_no_file(client, host, tmp_path):
    """A client that dies half-way leaves the old file as it was."""
    box = await client.create()
    await client.call("PUT", f"{box}/files?path=/tmp/f", data=b"old", status=200)
    life = host.service.life(box.rsplit("/", 1)[1])
    for head in (b"content-length: 1000000\r\n", b"transfer-encoding: chunked\r\n"):
        _, writer = await asyncio.open_unix_connection(str(tmp_path / "e.sock"))
        writer.write(b"PUT " + box.encode() + b"/files?path=/tmp/f HTTP/1.1\r\nhost: e\r\n" + head + b"\r\n")
        writer.write(b"3e8\r\n" + b"n" * 1000 + b"\r\n")
        await writer.drain()
        while not life.busy:
            await asyncio.sleep(0.001)
        writer.transport.abort()
        while life.busy:
            await asyncio.sleep(0.001)
        assert await client.call("GET", f"{box}/files?path=/tmp/f") == b"old"


async def test_a_body_that_must_be_read_whole_is_limited(client):
    """Nobody fills the memory of the edge with one request."""
    assert (await client.error("POST", "/v1/sandboxes", 413, data=io.BytesIO(b" " * 5_000_000))).code


async def test_trees_go_in_and_out_as_tar(client):
    """What was packed comes back."""
    box = await client.create()
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        info = tarfile.TarInfo("d/f")
        info.size = 3
        tar.addfile(info, io.BytesIO(b"abc"))
    await client.call("PUT", f"{box}/archive?path=/tmp", data=packed.getvalue(), status=204)
    with tarfile.open(fileobj=io.BytesIO(await client.call("GET", f"{box}/archive?path=/tmp"))) as tar:
        assert tar.extractfile("d/f").read() == b"abc"


async def test_images_are_imported_named_and_removed(client):
    """Imports answer with lines, the last holds the image; one in use is not removed."""
    last = lines(
        await client.call("PUT", "/v1/images?reference=new:1", data=io.BytesIO(b"tar" * 5_000_000)), models.Progress
    )[-1]
    assert last.image.reference == "new:1"
    body = {"reference": "deb:1", "debian": {}}
    assert lines(await client.call("POST", "/v1/images", json=body), models.Progress)[-1].image.reference == "deb:1"
    await client.call("POST", "/v1/images/tag", json={"source": "new:1", "target": "other:1"}, type=models.Image)
    names = [image.reference for image in await client.call("GET", "/v1/images", type=list[models.Image])]
    assert names == ["base:1", "deb:1", "new:1", "other:1"]
    assert (await client.call("GET", "/v1/images/resolve?reference=new:1", type=models.Image)).reference == "new:1"
    await client.create()
    assert (await client.error("DELETE", "/v1/images?reference=base:1", 409)).code == "conflict"
    await client.call("DELETE", "/v1/images?reference=new:1", status=204)
    assert (await client.error("GET", "/v1/images/resolve?reference=new:1", 404)).code == "image_unavailable"
    assert (await client.error("POST", "/v1/images", 400, json={"reference": "x:1"})).code == "invalid_argument"


async def test_the_node_is_described_drained_and_measured(client):
    """Nodes, drain, health, metrics, document."""
    (node,) = await client.call("GET", "/v1/nodes", type=list[models.Node])
    assert (node.id, node.state, node.backends) == ("local", "ready", ["container"])
    assert (await client.call("POST", "/v1/nodes/local/drain", type=models.Node)).state == "draining"
    refused = await client.error("POST", "/v1/sandboxes", 503, json=create())
    assert (refused.code, refused.retryable) == ("capacity_unavailable", True)
    assert (await client.call("POST", "/v1/nodes/local/undrain", type=models.Node)).state == "ready"
    assert await client.call("GET", "/healthz", type=dict[str, str]) == {"status": "ok"}
    await client.create()
    assert b'opendsec_edge_sandboxes{state="running"} 1.0' in await client.call("GET", "/metrics")
    assert b"openapi" in await client.call("GET", "/schema/openapi.json")


async def test_a_polite_end_finishes_short_requests_and_cuts_long_ones(edge, host, tmp_path):
    """New requests are told to come again; a cut command runs on."""
    async with serving(edge, tmp_path / "e.sock") as (app, client):
        box = await client.create()
        id_ = box.rsplit("/", 1)[1]
        short = asyncio.ensure_future(client.run(box, "hold s; echo x", id="short"))
        long = asyncio.ensure_future(client.run(box, "hold l", id="long"))
        while len(edge.life(id_).execs.execs) < 2:
            await asyncio.sleep(0.001)
        draining = asyncio.ensure_future(app.drain(0.3))
        await asyncio.sleep(0)
        refused = await client.error("POST", f"{box}/execs", 503, json={"shell": "true"})
        assert (refused.code, refused.retryable) == ("unavailable", True)
        host.backend.guests[id_].release("s")
        assert (await short).stdout == b"x\n"
        await draining
        with pytest.raises((aiohttp.ClientError, AssertionError)):
            await long
        assert host.backend.guests[id_].execs["long"].exit is None
