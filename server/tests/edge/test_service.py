"""Creating, finding, ending and adopting sandboxes."""

from __future__ import annotations

import asyncio
import time

import pytest

from opendsec.api.errors import (
    CapacityUnavailable,
    Conflict,
    DiskFull,
    ImageUnavailable,
    InvalidArgument,
    NotFound,
    SandboxGone,
    Unavailable,
    UnsupportedCapability,
)
from opendsec.api.models import TERMINAL

from .conftest import create, shell


async def until(edge, sandbox_id: str, *states: str):
    """Return the record when it is in one of the states."""
    life = edge.life(sandbox_id)
    while life.record.state not in states:
        await asyncio.sleep(0.001)
    return life.record


async def test_a_create_answers_a_running_sandbox(edge, host):
    """Everything the request said is in the record."""
    box = await edge.create(create(labels={"a": "b"}, job="j", memory_limit_mb=64, request_id="r", ttl_hard=50))
    assert box.state == "running"
    assert box.id.startswith("local-")
    assert (box.labels, box.job, box.limits.memory_mb, box.request_id) == ({"a": "b"}, "j", 64, "r")
    assert box.layers == [host.images.resolve("base:1").layer.digest]
    assert box.created_at <= box.running_at
    assert host.backend.specs[box.id].hostname == box.id


async def test_a_request_id_makes_one_sandbox(edge, host):
    """However often and however concurrently it is repeated."""
    host.backend.start_gate.clear()
    creating = [asyncio.ensure_future(edge.create(create(request_id="r"))) for _ in range(5)]
    await asyncio.sleep(0)
    host.backend.start_gate.set()
    boxes = await asyncio.gather(*creating)
    assert len({box.id for box in boxes}) == 1
    assert (await edge.create(create(request_id="r"))).id == boxes[0].id
    assert host.backend.calls["start"] == 1
    assert [box.id for box in edge.list({}, None, (), "r")] == [boxes[0].id]


async def test_a_request_id_does_not_answer_for_another_request(edge, host):
    """A repeated request with other arguments is refused, not answered with the first one's sandbox."""
    await edge.create(create(request_id="r"))
    with pytest.raises(Conflict, match="request_id r"):
        await edge.create(create(request_id="r", memory_limit_mb=99))
    assert host.backend.calls["start"] == 1


async def test_a_failed_create_leaves_a_record_and_frees_its_request_id(edge, host):
    """The error is the backend's, nothing is left, and a repeated request starts afresh."""
    host.backend.start_error = DiskFull("no room")
    with pytest.raises(DiskFull):
        await edge.create(create(request_id="r"))
    assert host.backend.guests == {}
    (record,) = edge.list({}, None, (), None)
    assert (record.state, record.cause, record.cause_detail) == ("failed", "create_failed", "no room")
    assert (await edge.create(create(request_id="r"))).state == "running"


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"container_image": "nothing:1"}, ImageUnavailable),
        ({"container_image": "Bad Image"}, InvalidArgument),
        ({"backend": "microvm"}, UnsupportedCapability),
        ({"runtime": "runsc"}, UnsupportedCapability),
        ({"network_rules": {"pypi": True}}, UnsupportedCapability),
        ({"init_user": "a\nb"}, InvalidArgument),
        ({"workdir": "x"}, InvalidArgument),
        ({"toolkits": ["nothing:1"]}, ImageUnavailable),
    ],
)
async def test_a_create_that_cannot_be_met_is_refused_without_a_trace(edge, fields, error):
    """No record stands for what never began."""
    with pytest.raises(error):
        await edge.create(create(**fields))
    assert edge.list({}, None, (), None) == []


async def test_a_disk_limit_needs_a_quota(edge, host):
    """A limit that cannot be enforced makes the create fail."""
    host.backend.disk_limits = False
    with pytest.raises(UnsupportedCapability) as refused:
        await edge.create(create(disk_limit_mb=10))
    assert refused.value.detail["field"] == "disk_limit_mb"


async def test_rules_that_only_forbid_are_honoured(edge):
    """Without a network every ``False`` holds."""
    assert (await edge.create(create(network_rules={"npm": False, "pypi": False}))).state == "running"


async def test_deleting_wins_over_a_create_under_way(edge, host):
    """The creator learns that it is gone; nothing is left."""
    host.backend.start_gate.clear()
    creating = asyncio.ensure_future(edge.create(create()))
    while not host.backend.guests:
        await asyncio.sleep(0)
    (record,) = edge.list({}, None, (), None)
    ended = await edge.stop(record.id)
    assert (ended.state, ended.cause) == ("stopped", "deleted")
    with pytest.raises(SandboxGone):
        await creating
    assert host.backend.guests == {}


async def test_deleting_is_idempotent_and_concurrent(edge, host):
    """All who delete get the same end; later ones too."""
    box = await edge.create(create())
    ends = await asyncio.gather(*(edge.stop(box.id) for _ in range(4)))
    assert {end.state for end in [*ends, await edge.stop(box.id)]} == {"stopped"}
    assert host.backend.calls["remove"] == 1
    with pytest.raises(NotFound):
        await edge.stop("local-aaaaaaaaaaaa")


async def test_a_removal_that_fails_is_tried_again(edge, host):
    """The state stays ``stopping`` until all of it is gone."""
    box = await edge.create(create())
    host.backend.remove_errors = [OSError("busy"), Unavailable("busy")]
    assert (await edge.stop(box.id)).state == "stopped"
    assert host.backend.guests == {}


async def test_an_ended_sandbox_tells_which_limits_it_hit(edge, host):
    """Memory, processes and disk, from the accounts of the backend."""
    box = await edge.create(create(disk_limit_mb=10))
    guest = host.backend.guests[box.id]
    guest.oom_kills, guest.pids_refused, guest.disk_bytes = 1, 1, 10 * 2**20
    assert (await edge.stop(box.id)).limits_hit == ["memory", "pids", "disk"]


async def test_lists_match_all_conditions(edge):
    """Labels, job, state and request id."""
    one = await edge.create(create(labels={"a": "1", "b": "2"}, job="x"))
    two = await edge.create(create(labels={"a": "1"}, request_id="r"))
    await edge.stop(two.id)

    def found(labels=None, job=None, states=(), request_id=None):
        return [box.id for box in edge.list(labels or {}, job, states, request_id)]

    assert found() == [one.id, two.id]
    assert found({"a": "1"}) == [one.id, two.id]
    assert found({"a": "1", "b": "2"}) == [one.id]
    assert found(job="x") == [one.id]
    assert found(states=("stopped",)) == [two.id]
    assert found(request_id="r") == [two.id]


# -- admission and drain -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "reason"),
    [
        ({"max_sandboxes": 1}, "count"),
        ({"min_memory_available_bytes": 2**60}, "memory"),
        ({"min_disk_free_bytes": 2**60}, "disk"),
        ({"max_memory_pressure_percent": -1.0}, "pressure"),
    ],
)
async def test_a_full_node_says_so(make_host, limit, reason):
    """The refusal names its reason and when to ask again."""
    host = make_host(**limit)
    edge = await host.boot()
    if reason == "count":
        box = await edge.create(create())
    with pytest.raises(CapacityUnavailable) as refused:
        await edge.create(create())
    assert refused.value.detail["reason"] == reason
    assert refused.value.detail["retry_after"] > 0
    if reason == "count":
        await edge.stop(box.id)
        assert (await edge.create(create())).state == "running"
    await host.close()


async def test_only_so_many_creates_are_under_way_at_once(make_host):
    """The rest waits its turn; none is refused."""
    host = make_host(max_creating=2)
    edge = await host.boot()
    host.backend.start_gate.clear()
    creating = [asyncio.ensure_future(edge.create(create())) for _ in range(6)]
    while len(host.backend.guests) < 2:
        await asyncio.sleep(0)
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(host.backend.guests) == 2
    assert edge.node().creating == 6
    host.backend.start_gate.set()
    assert {box.state for box in await asyncio.gather(*creating)} == {"running"}
    await host.close()


async def test_a_drained_node_takes_nothing_new_also_after_a_restart(edge, host):
    """What runs goes on; the wish is kept."""
    box = await edge.create(create())
    assert edge.drain("local", on=True).state == "draining"
    edge = await host.reboot()
    with pytest.raises(CapacityUnavailable):
        await edge.create(create())
    assert edge.get(box.id).state == "running"
    assert edge.drain("local", on=False).state == "ready"
    assert (await edge.create(create())).state == "running"
    with pytest.raises(NotFound):
        edge.drain("other", on=True)


# -- deadlines ---------------------------------------------------------------------------------------------------------


async def test_an_idle_sandbox_is_stopped(edge):
    """Nobody used it for its idle time."""
    box = await edge.create(create(ttl_running_stop=0.05))
    record = await until(edge, box.id, *TERMINAL)
    assert (record.state, record.cause, record.is_infra) == ("expired", "idle_ttl", False)


async def test_a_running_command_keeps_it_from_being_idle(edge, host):
    """The idle time begins when the last command has ended."""
    box = await edge.create(create(ttl_running_stop=0.05))
    await edge.run(box.id, shell("hold g", id="e", wait_seconds=0))
    for _ in range(3):
        await asyncio.sleep(0.03)
        edge.get(box.id)
    assert edge.get(box.id).state == "running"
    host.backend.guests[box.id].release("g")
    ended = time.time()
    record = await until(edge, box.id, *TERMINAL)
    assert record.cause == "idle_ttl"
    assert record.ended_at >= ended + 0.045


async def test_the_hard_time_limit_holds_whatever_runs(edge):
    """A command does not prolong it."""
    box = await edge.create(create(ttl_hard=0.05))
    await edge.run(box.id, shell("hold g", id="e", wait_seconds=0))
    assert (await until(edge, box.id, *TERMINAL)).cause == "hard_ttl"


async def test_the_hard_time_limit_ends_a_create_under_way(edge, host):
    """Also a sandbox that never came up is ended by it."""
    host.backend.start_gate.clear()
    with pytest.raises(SandboxGone):
        await edge.create(create(ttl_hard=0.03))
    assert host.backend.guests == {}


async def test_a_lease_ends_what_nobody_claims(edge):
    """Claimed or used sandboxes stay, the other is ended."""
    boxes = [await edge.create(create(lease_seconds=0.05)) for _ in range(3)]
    edge.claim([boxes[0].id, "local-aaaaaaaaaaaa"])
    await edge.run(boxes[1].id, shell("true"))
    record = await until(edge, boxes[2].id, *TERMINAL)
    assert (record.state, record.cause) == ("expired", "unclaimed")
    assert [edge.get(box.id).state for box in boxes[:2]] == ["running", "running"]


async def test_a_record_is_forgotten_after_its_retention(make_host):
    """Then the id is unknown and its folder is gone."""
    host = make_host(retention_seconds=0.03)
    edge = await host.boot()
    box = await edge.create(create(request_id="r"))
    await edge.run(box.id, shell("echo x"))
    await edge.stop(box.id)
    assert (host.config.data / "sandboxes" / box.id).exists()
    while box.id in edge.lives.by_id:
        await asyncio.sleep(0.001)
    assert edge.journal.rows() == []
    assert not (host.config.data / "sandboxes" / box.id).exists()
    assert (await edge.create(create(request_id="r"))).id != box.id
    await host.close()


# -- restarts ----------------------------------------------------------------------------------------------------------


async def test_a_restart_adopts_what_is_alive(edge, host):
    """Commands go on at their offsets, results of ended ones are still known."""
    box = await edge.create(create(labels={"a": "b"}, ttl_running_stop=100))
    await edge.run(box.id, shell("echo done", id="old"))
    await edge.run(box.id, shell("echo a; hold g; flood 200000; exit 4", id="e", wait_seconds=0))
    edge = await host.reboot()
    assert edge.get(box.id).labels == {"a": "b"}
    assert (await edge.run(box.id, shell("", id="old"))).stdout == b"done\n"
    edge = await host.reboot()
    host.backend.guests[box.id].release("g")
    result = await edge.run(box.id, shell("", id="e"))
    assert (result.exit_code, result.stdout) == (4, b"a\n" + b"x" * 200000)
    assert host.backend.guests[box.id].starts == {"old": 1, "e": 1}


async def test_a_command_that_ended_while_the_edge_was_away_is_not_lost(edge, host):
    """Chronus kept its output and its end."""
    box = await edge.create(create())
    await edge.run(box.id, shell("echo a; hold g; echo b; exit 5", id="e", wait_seconds=0))
    await host.kill()
    guest = host.backend.guests[box.id]
    guest.release("g")
    await guest.execs["e"].over.wait()
    edge = await host.boot()
    result = await edge.run(box.id, shell("", id="e"))
    assert (result.exit_code, result.stdout) == (5, b"a\nb\n")


async def test_a_sandbox_that_died_while_the_edge_was_away_is_failed(edge, host):
    """Its record says why, its commands are lost, nothing is left."""
    box = await edge.create(create())
    await edge.run(box.id, shell("hold g", id="e", wait_seconds=0))
    await host.kill()
    host.backend.kill(box.id)
    edge = await host.boot()
    record = await until(edge, box.id, *TERMINAL)
    assert (record.state, record.cause, record.is_infra) == ("failed", "chronus_lost", True)
    assert (await edge.run(box.id, shell("", id="e"))).state == "lost"
    assert host.backend.guests == {}


async def test_strays_are_removed_at_a_start(edge, host):
    """What no record stands for is nobody's."""
    from opendsec_server.testing.guest import FakeGuest

    await host.kill()
    host.backend.guests["local-strayaaaaaaa"] = FakeGuest()
    await host.boot()
    assert host.backend.guests == {}


async def test_the_idle_time_begins_again_with_the_edge(edge, host):
    """An edge that was away for long does not stop what was in use until then."""
    box = await edge.create(create(ttl_running_stop=0.2))
    await host.kill()
    await asyncio.sleep(0.25)
    edge = await host.boot()
    assert (await edge.run(box.id, shell("true"))).exit_code == 0
    assert (await until(edge, box.id, *TERMINAL)).cause == "idle_ttl"


async def test_one_that_does_not_answer_does_not_keep_the_edge_from_starting(edge, host, monkeypatch):
    """It is taken over when it answers again."""
    from opendsec_server.edge import service

    monkeypatch.setattr(service, "RECOVERY_SECONDS", 0.01)
    box = await edge.create(create())
    await host.kill()
    host.backend.reconnect_errors = [Unavailable("no answer")] * 3
    edge = await host.boot()
    assert edge.get(box.id).state == "running"
    assert (await edge.run(box.id, shell("echo x"))).stdout == b"x\n"


async def test_a_polite_end_leaves_sandboxes_running(edge, host):
    """The next edge takes them over."""
    box = await edge.create(create())
    await edge.run(box.id, shell("hold g; echo x", id="e", wait_seconds=0))
    await edge.close()
    assert host.backend.guests[box.id].alive
    edge = await host.boot()
    host.backend.guests[box.id].release("g")
    assert (await edge.run(box.id, shell("", id="e"))).stdout == b"x\n"


async def test_the_node_tells_its_load(edge):
    """Counts by job, and what the host has."""
    await edge.create(create(job="j"))
    await edge.create(create(job="j"))
    gone = await edge.create(create(job="k"))
    await edge.stop(gone.id)
    node = edge.node()
    assert (node.sandboxes, node.by_job, node.state) == (2, {"j": 2}, "ready")
    assert node.memory_available_bytes > 0
    assert node.disk_free_bytes > 0
    assert b'opendsec_edge_sandboxes{state="running"} 2.0' in edge.metrics.render()
