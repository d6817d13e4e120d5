"""The placement engine: filter, power of d choices over views and overlay, water-filling of batches.

It keeps no durable state: views come from the watcher (``observe``), the overlay is this replica's own. Nodes that
missed a poll (``suspect``) are taken only when no ready node will do, so that the restart of the only edge delays a
create instead of refusing it.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Set as AbstractSet

import msgspec

from opendsec.api.errors import CapacityUnavailable, PlatformError, Unavailable, UnsupportedCapability
from opendsec_server.placement.filter import Refusal, load, refusal
from opendsec_server.placement.overlay import InFlight, Overlay
from opendsec_server.placement.views import Demand, NodeView, PlacementPolicy

_NOBODY: frozenset[str] = frozenset()


class Placement(msgspec.Struct, frozen=True):
    """A chosen node; end it with ``settle`` or ``release``."""

    node: str
    token: int


class PlacementEngine:
    """Chooses nodes; one for each apiserver replica, used from one thread."""

    def __init__(self, policy: PlacementPolicy, rng: random.Random) -> None:
        self.policy = policy
        self._rng = rng
        self._views: dict[str, NodeView] = {}
        self._overlay = Overlay(policy.overlay_seconds)

    def observe(self, view: NodeView) -> None:
        """Take the watcher's newest view of a node."""
        self._views[view.id] = view
        self._overlay.observe(view.id, view.seen_at)

    def forget(self, node: str) -> None:
        """Drop a node that left the cluster."""
        self._views.pop(node, None)
        self._overlay.forget(node)

    def choose(self, demand: Demand, now: float, exclude: AbstractSet[str] = _NOBODY) -> Placement:
        """Choose a node for one sandbox and note it as in flight.

        Args:
            demand: what the sandbox needs.
            now: seconds, on the clock of the views.
            exclude: nodes that have refused this sandbox.

        Raises:
            CapacityUnavailable: nodes could take it, but not now.
            UnsupportedCapability: no node has what is asked.
            Unavailable: no node is known to be alive.
        """
        self._overlay.expire(now)
        candidates = self._feasible(demand, exclude)
        d = self.policy.choices
        sample = candidates if len(candidates) <= d else self._rng.sample(candidates, d)
        best = min(sample, key=lambda view: (load(view, self._overlay.of(view.id)), self._rng.random()))
        return Placement(best.id, self._overlay.add(best.id, demand.memory_bytes, now))

    def spread(self, demand: Demand, count: int, now: float, exclude: AbstractSet[str] = _NOBODY) -> list[Placement]:
        """Choose nodes for up to ``count`` equal sandboxes, levelling their loads (water-filling).

        Returns at least one and at most ``count`` placements; fewer when the nodes fill up on the way.

        Raises:
            CapacityUnavailable: no node can take even one now.
            UnsupportedCapability: no node has what is asked.
            Unavailable: no node is known to be alive.
        """
        self._overlay.expire(now)
        heap = [
            (load(view, self._overlay.of(view.id)), self._rng.random(), view.id)
            for view in self._feasible(demand, exclude)
        ]
        heapq.heapify(heap)
        placed: list[Placement] = []
        while heap and len(placed) < count:
            _, tie, node = heapq.heappop(heap)
            view = self._views[node]
            if refusal(view, demand, self._overlay.of(node), self.policy) is not None:
                continue
            placed.append(Placement(node, self._overlay.add(node, demand.memory_bytes, now)))
            heapq.heappush(heap, (load(view, self._overlay.of(node)), tie, node))
        return placed

    def settle(self, placement: Placement, now: float) -> None:
        """Note that the create has ended well, or with an unknown outcome."""
        self._overlay.settle(placement.token, now)

    def release(self, placement: Placement) -> None:
        """Note that nothing was created."""
        self._overlay.release(placement.token)

    def inflight(self, node: str) -> InFlight:
        """Return what is in flight to ``node``."""
        return self._overlay.of(node)

    def statistics(self) -> dict[str, int]:
        """Return the placements in flight, by node."""
        return self._overlay.statistics()

    def _feasible(self, demand: Demand, exclude: AbstractSet[str]) -> list[NodeView]:
        ready: list[NodeView] = []
        suspect: list[NodeView] = []
        refusals: dict[str, Refusal] = {}
        for view in self._views.values():
            if view.id in exclude:
                refusals[view.id] = Refusal.EXCLUDED
                continue
            reason = refusal(view, demand, self._overlay.of(view.id), self.policy)
            if reason is not None:
                refusals[view.id] = reason
            elif view.state == "ready":
                ready.append(view)
            else:
                suspect.append(view)
        if ready or suspect:
            return ready or suspect
        raise _refused(demand, refusals)


def _refused(demand: Demand, refusals: dict[str, Refusal]) -> PlatformError:
    reasons = {node: reason.value for node, reason in sorted(refusals.items())[:20]}
    kinds = set(refusals.values())
    if not kinds or kinds == {Refusal.DEAD}:
        return Unavailable("no node answers", nodes=reasons)
    if all(kind.permanent for kind in kinds):
        wanted = f"backend {demand.backend!r}" + (f" with runtime {demand.runtime!r}" if demand.runtime else "")
        return UnsupportedCapability(f"no node offers {wanted}", nodes=reasons)
    return CapacityUnavailable("no node has room now", nodes=reasons, retry_after=1.0)
