"""The link to an edge: parsing, pooling, streams both ways, and what its breaks mean."""

from __future__ import annotations

import asyncio
import contextlib
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opendsec.api.errors import Internal, NotFound, OutcomeUnknown, Unavailable
from opendsec.api.models import Node, Sandbox
from opendsec_server.apiserver.edge_client import EdgeClient, LinkBroke, head_of
from opendsec_server.apiserver.wire import SMALL_BYTES, Broken, Connection, NotConnected
from opendsec_server.testing.edge import SimulatedEdge


class Wire:
    """A transport in memory."""

    def __init__(self):
        self.sent, self.paused, self.aborted = b"", 0, False

    def write(self, data):
        self.sent += data

    def is_closing(self):
        return self.aborted

    def pause_reading(self):
        self.paused += 1

    def resume_reading(self):
        self.paused -= 1

    def abort(self):
        self.aborted = True


def connected():
    released: list[Connection] = []
    connection = Connection(released.append, lambda _: None)
    wire = Wire()
    connection.connection_made(wire)  # type: ignore[arg-type]
    return connection, wire, released


async def exchange(connection, *pieces: bytes, close: bool = False):
    task = asyncio.ensure_future(connection.exchange(b"GET / HTTP/1.1\r\n\r\n", b""))
    await asyncio.sleep(0)
    for piece in pieces:
        connection.data_received(piece)
    if close:
        connection.connection_lost(None)
    return await task


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted({cut % (len(data) + 1) for cut in cuts}), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges) if a < b]


ANSWERS = [
    (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nX-A: b\r\n\r\nhello", 200, b"hello"),
    (b"HTTP/1.1 204 No Content\r\n\r\n", 204, b""),
    (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 201 Created\r\ncontent-length: 0\r\n\r\n", 201, b""),
    (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\nA;x=y\r\n0123456789\r\n0\r\nT: v\r\n\r\n", 200,
     b"abc0123456789"),
    (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 200, b""),
]  # fmt: skip


@settings(deadline=None)
@given(st.sampled_from(ANSWERS), st.lists(st.integers(0, 200), max_size=12))
def test_an_answer_is_understood_wherever_it_is_cut(answer, cuts):
    """Segments of the stream may end anywhere."""

    async def check():
        data, status, body = answer
        connection, _, released = connected()
        task = asyncio.ensure_future(connection.exchange(b"GET / HTTP/1.1\r\n\r\n", b""))
        await asyncio.sleep(0)
        for piece in split(data, cuts):
            connection.data_received(piece)
        got = await task
        assert (got.status, await got.read(1000)) == (status, body)
        assert released == [connection]
        assert connection.usable

    asyncio.run(check())


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0\r\n\r\n",
        b"HTTP/1.1 2x0 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nab",
        b"HTTP/1.1 200 OK\r\nx: " + b"a" * 70_000,
    ],
)
async def test_what_is_not_http_breaks_the_link(data):
    """Nonsense closes the connection and is no answer."""
    connection, wire, released = connected()
    with pytest.raises(Broken):
        await exchange(connection, data)
    assert wire.aborted
    assert not released


async def test_a_bad_chunk_breaks_the_stream():
    """A stream that turns to nonsense does not end well."""
    connection, _, released = connected()
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\nzz\r\n"
    answer = await exchange(connection, head)
    connection.connection_lost(None)
    with pytest.raises(Broken):
        await answer.read(1000)
    assert not released


async def test_a_cut_body_is_not_an_answer():
    """The end of the connection does not stand in for the end of the body."""
    connection, _, _ = connected()
    with pytest.raises(Broken):
        await exchange(connection, b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhel", close=True)


async def test_a_slow_reader_stops_the_link():
    """What is not read is not buffered without end."""
    connection, wire, _ = connected()
    length = 8 * SMALL_BYTES
    answer = await exchange(connection, b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % length)
    connection.data_received(b"x" * (3 * SMALL_BYTES))
    assert wire.paused == 1
    chunks = answer.chunks()
    await anext(chunks)
    assert wire.paused == 0
    await chunks.aclose()
    assert wire.aborted


async def test_an_answer_during_an_upload_ends_the_upload():
    """An early refusal is passed on; the connection is not used again."""
    connection, wire, released = connected()
    gate = asyncio.Event()

    async def body():
        yield b"a"
        await gate.wait()

    task = asyncio.ensure_future(connection.exchange(b"PUT", body()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    connection.data_received(b"HTTP/1.1 413 Too Large\r\ncontent-length: 0\r\n\r\n")
    assert (await task).status == 413
    assert wire.aborted
    assert not released


async def test_a_failed_source_cuts_the_upload():
    """A body whose source fails must not look complete."""
    connection, wire, _ = connected()

    async def body():
        yield b"a"
        raise RuntimeError("source")

    with pytest.raises(RuntimeError, match="source"):
        await connection.exchange(b"PUT", body(), chunked=True)
    assert wire.aborted
    assert not wire.sent.endswith(b"0\r\n\r\n")


@pytest.fixture
async def edge(tmp_path):
    async with SimulatedEdge().open_server(tmp_path / "edge.sock") as made:
        yield made


@pytest.fixture
async def client(tmp_path):
    made = EdgeClient(f"unix:{tmp_path}/edge.sock", "local", connect_deadline_seconds=3.0)
    yield made
    await made.close()


async def test_calls_reuse_connections(edge, client):
    """Calls in a row use one connection; calls at once use several."""
    for _ in range(5):
        await client.call(list[Node], "GET", "/v1/nodes")
    assert len(client._open) == 1
    await asyncio.gather(*(client.call(list[Node], "GET", "/v1/nodes") for _ in range(5)))
    assert 1 < len(client._open) <= 5


async def test_errors_of_the_edge_come_typed(edge, client):
    """The edge's own error arrives as its class."""
    with pytest.raises(NotFound):
        await client.call(Sandbox, "GET", "/v1/sandboxes/local-aaaaaaaaaaaa")
    with pytest.raises(Internal):
        await client.call(Sandbox, "GET", "/v1/nodes")


async def test_a_call_waits_for_an_edge_that_is_starting(client, tmp_path):
    """A refused connection means that nothing happened: the call is sent once the edge is there."""
    calls = [asyncio.ensure_future(client.call(list[Node], "GET", "/v1/nodes")) for _ in range(10)]
    await asyncio.sleep(0)
    async with SimulatedEdge().open_server(tmp_path / "edge.sock") as edge:
        await asyncio.gather(*calls)
        assert edge.seen["GET nodes"] == 10


async def test_an_edge_that_stays_away_is_unavailable(tmp_path):
    """The wait is bounded, and the error says that the same request may be sent again."""
    client = EdgeClient(f"unix:{tmp_path}/none.sock", "local", connect_deadline_seconds=0.05)
    with pytest.raises(Unavailable) as caught:
        await client.call(list[Node], "GET", "/v1/nodes")
    assert caught.value.retryable
    with pytest.raises(NotConnected):
        await client.send(head_of("GET", b"/", [], 0), b"", wait=False)
    await client.close()


async def test_a_restarted_edge_is_reached_over_new_connections(client, tmp_path):
    """Connections to the process before are not used again."""
    for _ in range(2):
        async with SimulatedEdge().open_server(tmp_path / "edge.sock"):
            await client.call(list[Node], "GET", "/v1/nodes")


async def test_a_break_after_the_request_says_what_is_known(edge, client):
    """Repeatable calls may be repeated; of others the outcome is unknown and they must not be."""
    edge.break_after.add("sandboxes")
    with pytest.raises(LinkBroke) as safe:
        await client.request("POST", "/v1/sandboxes", b'{"container_image":"a"}', idempotent=True)
    assert safe.value.body().retryable
    with pytest.raises(OutcomeUnknown) as unsafe:
        await client.request("POST", "/v1/sandboxes", b'{"container_image":"a"}', idempotent=False)
    body = unsafe.value.body()
    assert (body.code, body.retryable, body.detail["outcome"]) == ("outcome_unknown", False, "unknown")


async def test_a_cancelled_call_closes_its_connection(edge, client):
    """The edge learns that nobody waits any more."""
    edge.gate.clear()
    call = asyncio.ensure_future(client.request("POST", "/v1/sandboxes", b'{"container_image":"a"}'))
    while not edge.creating:
        await asyncio.sleep(0)
    call.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await call
    while client._open:
        await asyncio.sleep(0)
    edge.gate.set()


async def test_an_exchange_that_ends_late_does_not_disturb_the_next(edge, client):
    """Many callers over few connections: each gets its own answer."""
    names = [(await client.call(Sandbox, "POST", "/v1/sandboxes", b'{"container_image":"a"}')).id for _ in range(20)]

    async def many(name):
        for _ in range(20):
            assert (await client.call(Sandbox, "GET", f"/v1/sandboxes/{name}")).id == name

    await asyncio.gather(*(many(name) for name in names))


async def test_a_cancel_with_the_answer_in_hand_spares_the_next_exchange():
    """Cancelling a caller whose answer has come does not touch a connection that somebody else uses already."""
    connection, wire, _ = connected()
    first = asyncio.ensure_future(connection.exchange(b"1", b""))
    await asyncio.sleep(0)
    connection.data_received(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
    second = asyncio.ensure_future(connection.exchange(b"2", b""))
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    connection.data_received(b"HTTP/1.1 201 Created\r\ncontent-length: 0\r\n\r\n")
    assert (await second).status == 201
    assert not wire.aborted
