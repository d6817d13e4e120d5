"""The apiserver over one and over several edges: authentication, creates, lists, jobs, nodes."""

from __future__ import annotations

import asyncio

import pytest

from opendsec_server.testing.edge import SimulatedEdge

MISSING = "/v1/sandboxes/local-aaaaaaaaaaaa"


@pytest.mark.parametrize("path", ["/v1/sandboxes", MISSING, "/v1/images", "/v1/nodes", "/metrics", "/nothing"])
async def test_without_a_key_everything_is_refused(api, path):
    """No route answers a caller without a key, and the error says so."""
    async with api.session.get(api.base + path, headers={"authorization": ""}) as response:
        assert response.status == 401
        assert (await response.json())["code"] == "unauthenticated"
        assert response.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("path", ["/healthz", "/schema", "/schema/openapi.json"])
async def test_health_and_schema_are_open(api, path):
    """A load balancer and a reader of the API need no key."""
    async with api.session.get(api.base + path, headers={"authorization": ""}) as response:
        assert response.status == 200


async def test_a_wrong_key_is_refused(api):
    """A well-formed key that nobody made is refused."""
    async with api.session.get(api.base + "/v1/nodes", headers={"authorization": "Bearer ods_" + "a" * 40}) as response:
        assert response.status == 401


async def test_a_sandbox_from_create_to_delete(api, edge):
    """Create, get, run, list, delete: each passes through to the edge that owns the sandbox."""
    made = await api.create(labels={"k": "v=w"}, job="j1")
    path = f"/v1/sandboxes/{made['id']}"
    assert await api.json("GET", path) == made
    ran = await api.json("POST", path + "/execs", 201, json={"shell": "echo hi", "wait_seconds": 5})
    assert ran["exit_code"] == 0
    assert [box["id"] for box in await api.json("GET", "/v1/sandboxes?label=k=v%3Dw&job=j1")] == [made["id"]]
    assert await api.json("GET", "/v1/sandboxes?label=k=x") == []
    assert (await api.json("DELETE", path))["state"] == "stopped"
    assert await api.json("GET", "/v1/sandboxes?state=running&state=paused") == []


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", MISSING, 404, "not_found"),
        ("GET", "/v1/sandboxes/other-aaaaaaaaaaaa", 404, "not_found"),
        ("GET", "/v1/sandboxes/nonsense", 400, "invalid_argument"),
        ("GET", "/v1/nothing", 404, "not_found"),
        ("GET", "/v1/jobs/none", 404, "not_found"),
        ("GET", "/v1/sandboxes?state=nonsense", 400, "invalid_argument"),
        ("POST", "/v1/nodes/other/drain", 404, "not_found"),
        ("PATCH", "/v1/nodes", 405, "not_found"),
    ],
)
async def test_errors_are_typed(api, method, path, status, code):
    """Every refusal has a status and a body with its code."""
    assert (await api.json(method, path, status))["code"] == code


@pytest.mark.parametrize(
    ("fields", "status", "code"),
    [
        ({"memory_limit_mb": 1}, 400, "invalid_argument"),
        ({"no_such_field": 1}, 400, "invalid_argument"),
        ({"count": 32769}, 400, "invalid_argument"),
        ({"network_rules": {"pypi": True}}, 422, "unsupported_capability"),
        ({"backend": "fullvm"}, 422, "unsupported_capability"),
        ({"runtime": "runsc"}, 422, "unsupported_capability"),
        ({"count": 2, "network_rules": {"pypi": True}}, 422, "unsupported_capability"),
    ],
)
async def test_bad_creates_are_refused_before_an_edge_is_asked(api, edge, fields, status, code):
    """What cannot succeed anywhere is not sent anywhere."""
    assert (await api.create(status, **fields))["code"] == code
    assert not edge.seen["POST sandboxes"]


async def test_a_body_that_is_not_json_is_refused(api):
    """Malformed JSON is the caller's fault."""
    answer = await api.json("POST", "/v1/sandboxes", 400, data=b"{", headers={"content-type": "application/json"})
    assert answer["code"] == "invalid_argument"


async def test_a_repeated_request_id_is_the_same_sandbox(api):
    """Idempotent create."""
    first = await api.create(request_id="r1")
    assert (await api.create(request_id="r1"))["id"] == first["id"]


async def test_a_full_edge_is_no_capacity(api, edge):
    """The edge's admission is final; the caller learns when to come again."""
    edge.capacity = 0
    async with api.session.post(api.base + "/v1/sandboxes", json={"container_image": "a"}) as response:
        assert response.status == 503
        assert response.headers["retry-after"] == "1"
        body = await response.json()
    assert (body["code"], body["retryable"]) == ("capacity_unavailable", True)
    assert api.engine.statistics() == {}


async def test_claims_reach_the_edge(api, edge):
    """Claimed ids are sent to their node."""
    made = await api.create()
    await api.json("POST", "/v1/sandboxes/claim", 204, json={"ids": [made["id"]]})
    assert edge.claimed == {made["id"]}


async def test_a_job_is_counted_and_stopped(api, edge):
    """Stopping a job deletes its live sandboxes and no others."""
    for _ in range(5):
        await api.create(job="j1")
    other = await api.create(job="j2")
    assert await api.json("GET", "/v1/jobs/j1") == {"id": "j1", "by_state": {"running": 5}}
    assert await api.json("POST", "/v1/jobs/j1/stop") == {"stopped": 5}
    assert await api.json("GET", "/v1/jobs/j1") == {"id": "j1", "by_state": {"stopped": 5}}
    assert await api.json("POST", "/v1/jobs/j1/stop") == {"stopped": 0}
    assert edge.sandboxes[other["id"]].state == "running"


async def test_a_drained_node_takes_nothing_new(api):
    """Drain shows at once in the list of nodes and in placement."""
    assert (await api.json("POST", "/v1/nodes/local/drain"))["state"] == "draining"
    assert [node["state"] for node in await api.json("GET", "/v1/nodes")] == ["draining"]
    assert (await api.create(503))["code"] == "capacity_unavailable"
    await api.json("POST", "/v1/nodes/local/undrain")
    await api.create()


async def test_metrics_count_requests_by_route(api):
    """Ids never become time series."""
    made = await api.create()
    await api.json("GET", f"/v1/sandboxes/{made['id']}")
    async with api.session.get(api.base + "/metrics") as response:
        text = await response.text()
    assert 'request_seconds_count{method="GET",route="/v1/sandboxes/*",status="200"} 1.0' in text
    assert made["id"] not in text


async def test_a_draining_apiserver_finishes_what_it_has(api, edge):
    """New requests are sent away, requests under way end."""
    edge.gate.clear()
    create = asyncio.ensure_future(api.create())
    while not edge.creating:
        await asyncio.sleep(0)
    drained = asyncio.ensure_future(api.front.drain(5.0))
    await asyncio.sleep(0)
    assert (await api.json("GET", "/v1/nodes", 503))["code"] == "unavailable"
    edge.gate.set()
    await create
    await drained


async def test_creates_spread_and_lists_merge(two_edges):
    """Several edges look like one."""
    api, one, two = two_edges
    made = [await api.create() for _ in range(20)]
    assert one.sandboxes
    assert two.sandboxes
    listed = await api.json("GET", "/v1/sandboxes")
    assert {box["id"] for box in listed} == {box["id"] for box in made}
    assert {node["id"] for node in await api.json("GET", "/v1/nodes")} == {"one", "two"}


async def test_a_refused_create_goes_to_another_node(two_edges):
    """One full edge does not refuse what another can take."""
    api, one, two = two_edges
    one.capacity = 0
    made = [await api.create() for _ in range(8)]
    assert {box["node"] for box in made} == {"two"}
    two.capacity = 8
    assert (await api.create(503))["code"] == "capacity_unavailable"


async def test_a_request_id_is_unique_across_nodes(two_edges):
    """A repeated create finds its sandbox wherever it is, also when both come at once."""
    api, one, two = two_edges
    answers = await asyncio.gather(*(api.create(request_id=f"r{n % 4}") for n in range(16)))
    assert len({box["id"] for box in answers}) == 4
    assert len(one.sandboxes) + len(two.sandboxes) == 4


async def test_a_dead_node_is_named_and_passed_over(tmp_path, api_over):
    """With one node dead the other takes creates, and lists say what is missing."""
    async with (
        SimulatedEdge("one").open_server(tmp_path / "one.sock"),
        api_over(["one", "two"], dead_after=0.5) as api,
    ):
        await api.create()
        while not api.watcher.missing():
            await asyncio.sleep(0.01)
        async with api.session.get(api.base + "/v1/sandboxes") as response:
            assert response.headers["x-opendsec-missing-nodes"] == "two"
            assert len(await response.json()) == 1
        assert (await api.create())["node"] == "one"
