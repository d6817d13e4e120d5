"""Batch create: a stream of results, bounded at the edge and towards the client."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from opendsec.api.models import CreateResult
from opendsec_server.apiserver.service import CREATES_PER_EDGE


async def lines(api, **fields):
    async with api.session.post(f"{api.base}/v1/sandboxes", json={"container_image": "a", **fields}) as response:
        assert response.status == 200, await response.text()
        assert response.content_type == "application/x-ndjson"
        return [msgspec.json.decode(line, type=CreateResult) async for line in response.content]


async def until(condition):
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.002)


async def test_a_batch_answers_with_every_item_once(api, edge):
    """Each index comes once, with the request id of its item."""
    results = await lines(api, count=300, request_id="b", job="j")
    assert sorted(result.index for result in results) == list(range(300))
    assert all(result.sandbox and result.sandbox.request_id == f"b/{result.index}" for result in results)
    assert len(edge.sandboxes) == 300
    assert 1 < edge.creating_peak <= CREATES_PER_EDGE or edge.creating_peak == 1


async def test_a_batch_of_one_is_a_stream(api):
    """A count of one answers as a batch does."""
    assert [result.index for result in await lines(api, count=1)] == [0]


async def test_a_repeated_batch_finds_its_sandboxes(api, edge):
    """Repeating a batch creates nothing new."""
    first = {result.sandbox.id for result in await lines(api, count=20, request_id="b") if result.sandbox}
    again = {result.sandbox.id for result in await lines(api, count=20, request_id="b") if result.sandbox}
    assert first == again
    assert len(edge.sandboxes) == 20


async def test_items_that_find_no_room_fail_alone(api, edge):
    """A batch larger than the room gives what fits, and an error for each of the rest."""
    edge.capacity = 50
    results = await lines(api, count=80)
    errors = [result.error for result in results if result.error]
    assert len(results) == 80
    assert len(edge.sandboxes) == 50
    assert {error["code"] for error in errors} == {"capacity_unavailable"}


async def test_creates_under_way_are_bounded(api, edge):
    """At one edge no more than a fixed number of creates run at once."""
    edge.gate.clear()
    batch = asyncio.ensure_future(lines(api, count=200))
    await until(lambda: edge.creating == CREATES_PER_EDGE)
    edge.gate.set()
    assert len(await batch) == 200
    assert edge.creating_peak == CREATES_PER_EDGE


async def test_a_client_that_leaves_ends_the_batch(api, edge):
    """No further create is issued once nobody reads; nothing stays in flight."""
    edge.gate.clear()
    batch = asyncio.ensure_future(lines(api, count=5000))
    await until(lambda: edge.creating)
    batch.cancel()
    await until(lambda: api.front._inflight == 0)
    edge.gate.set()
    await until(lambda: not edge.creating)
    asked = edge.seen["POST sandboxes"]
    await asyncio.sleep(0.1)
    assert edge.seen["POST sandboxes"] == asked <= 2 * CREATES_PER_EDGE
    assert api.engine.statistics() == {}


async def test_a_client_that_does_not_read_pauses_the_batch(api, edge):
    """Creates stop when results are not taken."""
    label = {"l": "x" * 1000}
    async with api.session.post(
        f"{api.base}/v1/sandboxes", json={"container_image": "a", "count": 6000, "labels": label}
    ) as response:
        before = -1
        while len(edge.sandboxes) != before:
            before = len(edge.sandboxes)
            await asyncio.sleep(0.2)
        assert before < 5000
        assert len([line async for line in response.content]) == 6000


async def test_a_long_request_id_is_refused(api):
    """The ids of the items must fit."""
    error = await api.create(400, count=2, request_id="x" * 195)
    assert error["code"] == "invalid_argument"


@pytest.mark.slow
async def test_the_largest_batch(api, edge):
    """32,768 items come in one answer."""
    seen = 0
    async with api.session.post(f"{api.base}/v1/sandboxes", json={"container_image": "a", "count": 32768}) as response:
        async for _ in response.content:
            seen += 1
    assert seen == len(edge.sandboxes) == 32768


async def test_a_batch_spreads_over_nodes(two_edges):
    """Water-filling gives equal nodes equal parts."""
    api, one, two = two_edges
    assert len(await lines(api, count=100)) == 100
    assert abs(len(one.sandboxes) - len(two.sandboxes)) <= 20
