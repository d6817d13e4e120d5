"""Placement: the filter, power of d choices, the overlay, water-filling."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opendsec.api.errors import CapacityUnavailable, Unavailable, UnsupportedCapability
from opendsec.api.models import CreateSandbox
from opendsec_server.placement import (
    Demand,
    InFlight,
    NodeView,
    Overlay,
    PlacementEngine,
    PlacementPolicy,
    Refusal,
    demand_of,
    refusal,
)

GIB = 1024**3
POLICY = PlacementPolicy()


def view(name="a", *, seen_at=0.0, state="ready", available=20 * GIB, **fields) -> NodeView:
    values = {
        "backends": frozenset({"container"}),
        "runtimes": frozenset({"runc"}),
        "memory_total_bytes": 24 * GIB,
        "memory_available_bytes": available,
        "cpu_count": 2,
        "disk_free_bytes": 100 * GIB,
    }
    return NodeView(id=name, state=state, seen_at=seen_at, **{**values, **fields})


def engine(*views: NodeView, **policy) -> PlacementEngine:
    made = PlacementEngine(PlacementPolicy(**policy), random.Random(1))
    for one in views:
        made.observe(one)
    return made


DEMAND = Demand(memory_bytes=GIB)


@pytest.mark.parametrize(
    ("changed", "demand", "reason"),
    [
        ({}, DEMAND, None),
        ({"state": "suspect"}, DEMAND, None),
        ({"state": "dead"}, DEMAND, Refusal.DEAD),
        ({"state": "draining"}, DEMAND, Refusal.DRAINING),
        ({}, Demand(backend="microvm"), Refusal.BACKEND),
        ({}, Demand(runtime="runsc"), Refusal.RUNTIME),
        ({"available": GIB}, DEMAND, Refusal.MEMORY),
        ({"disk_free_bytes": 1}, DEMAND, Refusal.DISK),
        ({"pressure": {"memory": 99.0}}, DEMAND, Refusal.PRESSURE),
    ],
)
def test_the_filter_names_why_a_node_is_refused(changed, demand, reason):
    """Each requirement has its own refusal."""
    assert refusal(view(**changed), demand, InFlight(), POLICY) is reason


def test_with_two_nodes_the_less_loaded_is_taken():
    """Two choices of two nodes is a plain minimum."""
    placed = engine(view("a", available=4 * GIB), view("b", available=20 * GIB)).choose(DEMAND, 0.0)
    assert placed.node == "b"


def test_a_single_node_takes_everything():
    """One node is no special case."""
    assert engine(view("only")).choose(DEMAND, 0.0).node == "only"


def test_an_excluded_node_is_not_chosen_again():
    """A node that refused a sandbox is not asked twice."""
    both = engine(view("a"), view("b"))
    assert {both.choose(DEMAND, 0.0, exclude={"a"}).node for _ in range(8)} == {"b"}


def test_suspect_nodes_are_the_last_resort():
    """A node that missed a poll is used only if no ready node will do."""
    both = engine(view("a", state="suspect"), view("b", available=8 * GIB))
    assert {both.choose(DEMAND, 0.0).node for _ in range(5)} == {"b"}
    assert both.choose(DEMAND, 0.0, exclude={"b"}).node == "a"


def test_no_node_has_room():
    """Full nodes give a retryable error with the reasons."""
    with pytest.raises(CapacityUnavailable) as caught:
        engine(view("a", available=0)).choose(DEMAND, 0.0)
    assert caught.value.detail == {"nodes": {"a": "memory"}, "retry_after": 1.0}


def test_what_no_node_offers_is_unsupported():
    """A backend that no node has is not a matter of waiting."""
    with pytest.raises(UnsupportedCapability):
        engine(view("a")).choose(Demand(backend="fullvm"), 0.0)


@pytest.mark.parametrize("views", [(), (view("a", state="dead"),)])
def test_no_node_alive(views):
    """Nothing alive is a matter of waiting."""
    with pytest.raises(Unavailable):
        engine(*views).choose(DEMAND, 0.0)


def test_the_overlay_counts_until_a_later_poll_shows_it():
    """A settled placement leaves with the first poll sent after it ended."""
    one = engine(view("a", seen_at=0.0))
    placed = one.choose(DEMAND, 1.0)
    one.settle(placed, 2.0)
    one.observe(view("a", seen_at=1.5))
    assert one.inflight("a").count == 1
    one.observe(view("a", seen_at=2.0))
    assert one.inflight("a").count == 0


def test_a_released_placement_leaves_at_once():
    """A refusal frees what was reserved."""
    one = engine(view("a"))
    one.release(one.choose(DEMAND, 0.0))
    assert one.statistics() == {}


def test_a_placement_that_never_reports_expires():
    """A task that died does not hold a node for ever."""
    one = engine(view("a"), overlay_seconds=5.0)
    one.choose(DEMAND, 0.0)
    one.choose(DEMAND, 3.0)
    one.choose(DEMAND, 5.0)
    assert one.inflight("a").count == 2


def test_in_flight_memory_fills_a_node():
    """Placements not yet visible are laid over the view."""
    one = engine(view("a", available=4 * GIB))
    assert len([one.choose(DEMAND, 0.0) for _ in range(3)]) == 3
    with pytest.raises(CapacityUnavailable):
        one.choose(DEMAND, 0.0)


def test_many_placements_on_a_stale_view_do_not_herd():
    """Between two polls, equal nodes get nearly equal shares."""
    many = engine(*(view(f"n{i}") for i in range(16)))
    shares = Counter(many.choose(Demand(memory_bytes=64 * 2**20), 0.0).node for _ in range(1600))
    assert len(shares) == 16
    assert max(shares.values()) <= 110
    assert min(shares.values()) >= 90


def test_water_filling_levels_the_loads():
    """An emptier node gets more of a batch."""
    two = engine(view("a", available=10 * GIB), view("b", available=20 * GIB))
    shares = Counter(placed.node for placed in two.spread(DEMAND, 12, 0.0))
    assert shares["b"] - shares["a"] >= 4


def test_a_spread_stops_when_all_are_full():
    """A batch larger than the room gets as many placements as fit."""
    placed = engine(view("a", available=4 * GIB)).spread(DEMAND, 50, 0.0)
    assert len(placed) == 3


def test_a_forgotten_node_takes_nothing():
    """A node that left has neither view nor overlay."""
    one = engine(view("a"))
    one.choose(DEMAND, 0.0)
    one.forget("a")
    assert one.statistics() == {}
    with pytest.raises(Unavailable):
        one.choose(DEMAND, 0.0)


def test_demand_follows_the_memory_limit():
    """A limit counts in part; without one a default counts."""
    assert demand_of(CreateSandbox(container_image="x", memory_limit_mb=4096), POLICY).memory_bytes == GIB
    assert demand_of(CreateSandbox(container_image="x"), POLICY).memory_bytes == POLICY.memory_default_bytes


@given(
    st.lists(
        st.tuples(st.sampled_from(["add", "release", "settle", "observe", "expire", "forget"]), st.integers(0, 5)),
        max_size=60,
    )
)
def test_the_overlay_never_miscounts(steps):
    """Sums equal the entries after any sequence of calls."""
    overlay, now = Overlay(10.0), 0.0
    model: dict[int, tuple[str, float, float | None]] = {}
    for action, number in steps:
        now += 1.0
        node = f"n{number % 2}"
        tokens = list(model) or [0]
        token = tokens[number % len(tokens)]
        if action == "add":
            model[overlay.add(node, 7, now)] = (node, now, None)
        elif action == "release":
            overlay.release(token)
            model.pop(token, None)
        elif action == "settle":
            overlay.settle(token, now)
            if token in model:
                model[token] = (*model[token][:2], now)
        elif action == "observe":
            overlay.observe(node, now - 2)
            model = {t: e for t, e in model.items() if e[0] != node or e[2] is None or e[2] > now - 2}
        elif action == "expire":
            overlay.expire(now)
            model = {t: e for t, e in model.items() if now - e[1] < 10.0}
        else:
            overlay.forget(node)
            model = {t: e for t, e in model.items() if e[0] != node}
        for name in ("n0", "n1"):
            mine = [e for e in model.values() if e[0] == name]
            assert overlay.of(name) == InFlight(count=len(mine), memory_bytes=7 * len(mine))
