"""The watcher: polls every edge, keeps the last view of each node, and knows which edge has which name.

Node states as the watcher derives them::

    (never answered) ──▶ ready ⇄ draining          what the edge says of itself
                           │ a poll failed
                           ▼
                        suspect ──▶ dead            no answer for dead_after_seconds
                           └────────── any answer ──▶ ready

One task for each edge: a slow node delays nobody. After a failed poll the task waits for the edge to accept
connections again instead of for its next turn, so that a restart is noticed at once.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec
import structlog

from opendsec.api.errors import Internal, NotFound, PlatformError, Unavailable
from opendsec.api.models import Node
from opendsec_server.apiserver.edge_client import EdgeClient
from opendsec_server.apiserver.wire import NotConnected
from opendsec_server.placement import NodeView, PlacementEngine

_log = structlog.get_logger(__name__)


class _Watched:
    """What is known of one edge."""

    def __init__(self, edge: EdgeClient, name: str | None) -> None:
        self.edge = edge
        self.name = name
        self.node: Node | None = None
        self.state: Literal["ready", "draining", "suspect", "dead"] = "suspect"
        self.seen_at = float("-inf")
        self.polled = False


class Watcher:
    """Polls the edges; placement and routing read its views.

    Args:
        edges: each edge, with its node's name if it is known beforehand.
        engine: placement engine that is fed with views.
        period_seconds: time between two polls of an edge.
        deadline_seconds: how long one poll may take.
        monotonic: clock of the views, in seconds.
        dead_after_seconds: an edge that has not answered for this long is dead.
    """

    def __init__(
        self,
        edges: Sequence[tuple[EdgeClient, str | None]],
        engine: PlacementEngine,
        *,
        period_seconds: float,
        deadline_seconds: float,
        monotonic: Callable[[], float],
        dead_after_seconds: float = 15.0,
    ) -> None:
        self._watched = [_Watched(edge, name) for edge, name in edges]
        self._by_name = {watched.name: watched for watched in self._watched if watched.name is not None}
        self._engine = engine
        self._period = period_seconds
        self._deadline = deadline_seconds
        self._dead_after = dead_after_seconds
        self._monotonic = monotonic
        self._started_at = monotonic()
        self._first_round = asyncio.Event()

    async def run(self) -> None:
        """Poll until cancelled."""
        async with asyncio.TaskGroup() as group:
            for watched in self._watched:
                group.create_task(self._watch(watched))

    # -- what others read ------------------------------------------------------------------------------------------

    def edge_of_nowait(self, node: str) -> EdgeClient | None:
        """Return the edge of a node if it is known."""
        watched = self._by_name.get(node)
        return None if watched is None else watched.edge

    async def edge_of(self, node: str) -> EdgeClient:
        """Return the edge of a node; while the apiserver starts, wait for the first round of polls.

        Raises:
            NotFound: no edge has this name.
            Unavailable: an edge that may have this name has not answered yet.
        """
        if node not in self._by_name:
            await self.wait_first_round()
        watched = self._by_name.get(node)
        if watched is not None:
            return watched.edge
        if any(other.name is None for other in self._watched):
            raise Unavailable(f"node {node} is not known, and not all nodes have answered yet", node=node)
        raise NotFound(f"there is no node {node}", node=node)

    async def wait_first_round(self, deadline_seconds: float = 5.0) -> None:
        """Return when every edge has been polled once, or after the deadline."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline_seconds):
                await self._first_round.wait()

    def edges(self, *, alive: bool = True) -> list[EdgeClient]:
        """Return the edges, ready ones first; with ``alive`` without dead ones."""
        order = {"ready": 0, "draining": 1, "suspect": 2, "dead": 3}
        chosen = [watched for watched in self._watched if not (alive and watched.state == "dead")]
        return [watched.edge for watched in sorted(chosen, key=lambda watched: order[watched.state])]

    def missing(self) -> list[str]:
        """Return the names (or addresses) of dead edges."""
        return [watched.name or watched.edge.address for watched in self._watched if watched.state == "dead"]

    def nodes(self) -> list[Node]:
        """Return every node that has ever answered, with the state the watcher derives."""
        known = [watched for watched in self._watched if watched.node is not None]
        return [msgspec.structs.replace(watched.node, state=watched.state) for watched in known if watched.node]

    async def refresh(self, edge: EdgeClient) -> None:
        """Poll one edge now, after something about it was changed."""
        for watched in self._watched:
            if watched.edge is edge:
                await self._poll(watched)

    # -- polling ---------------------------------------------------------------------------------------------------

    async def _watch(self, watched: _Watched) -> None:
        while True:
            if await self._poll(watched):
                await asyncio.sleep(self._period)
                continue
            with contextlib.suppress(NotConnected, TimeoutError):
                async with asyncio.timeout(max(self._period, 0.05)):
                    await watched.edge.wait_reachable()
                    continue
            await asyncio.sleep(min(self._period, 0.1))

    async def _poll(self, watched: _Watched) -> bool:
        sent_at = self._monotonic()
        try:
            async with asyncio.timeout(self._deadline):
                nodes = await watched.edge.call(list[Node], "GET", "/v1/nodes", wait=False)
            if len(nodes) != 1:
                raise Internal("an edge must name exactly one node")
            self._answered(watched, nodes[0], sent_at)
        except (PlatformError, TimeoutError) as error:
            self._failed(watched, error)
            return False
        finally:
            watched.polled = True
            if all(other.polled for other in self._watched):
                self._first_round.set()
        return True

    def _answered(self, watched: _Watched, node: Node, sent_at: float) -> None:
        owner = self._by_name.get(node.id)
        if owner is not None and owner is not watched and owner.node is not None:
            raise Internal(f"two edges call themselves {node.id}: {owner.edge.address} and {watched.edge.address}")
        if watched.name != node.id:
            if watched.name is not None and self._by_name.get(watched.name) is watched:
                del self._by_name[watched.name]
                self._engine.forget(watched.name)
            watched.name = watched.edge.name = node.id
            self._by_name[node.id] = watched
        state: Literal["ready", "draining"] = "draining" if node.state == "draining" else "ready"
        if watched.state != state:
            _log.info("node_state", node=node.id, state=state, before=watched.state)
        watched.node, watched.state, watched.seen_at = node, state, sent_at
        self._engine.observe(NodeView.of(node, seen_at=sent_at, state=state))

    def _failed(self, watched: _Watched, error: Exception) -> None:
        now = self._monotonic()
        silent_for = now - max(watched.seen_at, self._started_at)
        state: Literal["suspect", "dead"] = "dead" if silent_for >= self._dead_after else "suspect"
        if watched.state != state:
            _log.warning(
                "node_state",
                node=watched.name,
                address=watched.edge.address,
                state=state,
                error=str(error) or "timeout",
            )
        watched.state = state
        if watched.node is not None:
            self._engine.observe(NodeView.of(watched.node, seen_at=watched.seen_at, state=state))
