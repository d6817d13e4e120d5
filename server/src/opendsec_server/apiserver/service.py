"""What the apiserver does itself: place creates, and gather or spread what concerns more than one edge.

A create is placed, sent, and on a refusal (``TryAgain``: nothing happened) sent to another node that has not refused
it, at most ``MAX_ATTEMPTS`` times. A link that broke in the middle is not repeated here: the sandbox may exist.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import Any, TypeVar
from urllib.parse import quote, urlencode

import msgspec

from opendsec.api import ids
from opendsec.api.errors import CapacityUnavailable, Internal, NotFound, OutcomeUnknown, PlatformError, TryAgain
from opendsec.api.models import Claim, CreateSandbox, Job, JobStopped, Node, Sandbox, State
from opendsec_server.apiserver.edge_client import EdgeClient, LinkBroke
from opendsec_server.apiserver.watcher import Watcher
from opendsec_server.core.validate import check_create
from opendsec_server.placement import Demand, Placement, PlacementEngine, demand_of

T = TypeVar("T")
R = TypeVar("R")

#: Nodes a create is offered to before it fails.
MAX_ATTEMPTS = 4
#: Creates of batches under way at one edge at once; the edge itself starts fewer and queues the rest.
CREATES_PER_EDGE = 32
#: Deletes under way at once when a job is stopped.
DELETES_AT_ONCE = 32
LIVE_STATES: tuple[State, ...] = ("requested", "preparing", "running", "pausing", "paused", "resuming", "stopping")


class _Brief(msgspec.Struct):
    """The part of a sandbox that counting needs."""

    id: str
    state: State


class _Turn:
    """Creates with the same request id, one after the other."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.users = 0


class ApiService:
    """Operations on sandboxes, jobs and nodes across edges.

    Args:
        watcher: knows the edges.
        engine: chooses nodes.
        monotonic: clock of the engine, in seconds.
    """

    def __init__(self, watcher: Watcher, engine: PlacementEngine, monotonic: Callable[[], float]) -> None:
        self.watcher = watcher
        self.engine = engine
        self._monotonic = monotonic
        self._slots: defaultdict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(CREATES_PER_EDGE))
        self._turns: dict[str, _Turn] = {}

    # -- create ----------------------------------------------------------------------------------------------------

    async def create(self, request: CreateSandbox) -> bytes:
        """Create one sandbox and return it as JSON, as its edge answered.

        Raises:
            PlatformError: refused, no capacity, or the outcome is unknown.
        """
        check_create(request)
        await self.watcher.wait_first_round()
        return await self.place(msgspec.json.encode(request), request, request.request_id)

    async def place(
        self, body: bytes, request: CreateSandbox, request_id: str | None, first: Placement | None = None
    ) -> bytes:
        """Create one sandbox from an encoded request, at ``first`` or where placement says."""
        demand = demand_of(request, self.engine.policy)
        if request_id is None or len(self.watcher.edges()) < 2:
            return await self._place(body, demand, first, idempotent=request_id is not None)
        async with self._one_at_a_time(request_id):
            existing = await self._find(request_id)
            if existing is not None:
                if first is not None:
                    self.engine.release(first)
                return existing
            return await self._place(body, demand, first, idempotent=True)

    async def _place(self, body: bytes, demand: Demand, first: Placement | None, *, idempotent: bool) -> bytes:
        refused: set[str] = set()
        last: PlatformError = CapacityUnavailable("no node has room now", retry_after=1.0)
        for _ in range(MAX_ATTEMPTS):
            try:
                placement = first or self.engine.choose(demand, self._monotonic(), refused)
            except TryAgain as error:
                raise (last if refused else error) from error
            first = None
            edge = self.watcher.edge_of_nowait(placement.node)
            if edge is None:
                self.engine.release(placement)
                raise Internal(f"placement chose the unknown node {placement.node}")
            others = any(other is not edge and other.name not in refused for other in self.watcher.edges())
            settled = False
            try:
                answer = await edge.request("POST", "/v1/sandboxes", body, idempotent=idempotent, wait=not others)
            except (LinkBroke, OutcomeUnknown):
                settled = True
                raise
            except TryAgain as error:
                refused.add(placement.node)
                last = error
                continue
            else:
                settled = True
                return answer.body or b""
            finally:
                if settled:
                    self.engine.settle(placement, self._monotonic())
                else:
                    self.engine.release(placement)
        raise last

    @contextlib.asynccontextmanager
    async def _one_at_a_time(self, request_id: str) -> AsyncIterator[None]:
        turn = self._turns.setdefault(request_id, _Turn())
        turn.users += 1
        try:
            async with turn.lock:
                yield
        finally:
            turn.users -= 1
            if not turn.users:
                del self._turns[request_id]

    async def _find(self, request_id: str) -> bytes | None:
        """Return the sandbox of a request id as JSON.

        Nodes that do not answer are passed over: a sandbox that its creator never learned of ends with its lease.
        """
        target = "/v1/sandboxes?" + urlencode({"request_id": request_id})

        async def ask(edge: EdgeClient) -> list[msgspec.Raw]:
            try:
                return await edge.call(list[msgspec.Raw], "GET", target, wait=False)
            except TryAgain:
                return []

        for found in await asyncio.gather(*(ask(edge) for edge in self.watcher.edges())):
            if found:
                return bytes(found[0])
        return None

    def now(self) -> float:
        """Return the time on the clock of the engine."""
        return self._monotonic()

    def slots(self, node: str) -> asyncio.Semaphore:
        """Return what bounds the creates of batches at one node."""
        return self._slots[node]

    # -- sandboxes across edges ------------------------------------------------------------------------------------

    async def list_sandboxes(self, query: Sequence[tuple[str, str]]) -> tuple[bytes, list[str]]:
        """Return a JSON list of the sandboxes of all edges, and the names of dead nodes that are missing in it.

        Raises:
            PlatformError: an edge that is not (yet) dead does not answer: a list is never quietly incomplete.
        """
        await self.watcher.wait_first_round()
        target = "/v1/sandboxes" + (f"?{urlencode(query)}" if query else "")
        answers = await asyncio.gather(*(edge.request("GET", target) for edge in self.watcher.edges()))
        inner = [(answer.body or b"[]").strip()[1:-1].strip() for answer in answers]
        return b"[" + b",".join(part for part in inner if part) + b"]", self.watcher.missing()

    async def claim(self, claim: Claim) -> None:
        """End the leases of sandboxes.

        Raises:
            PlatformError: an id is malformed, or an edge does not answer; the others were told all the same.
        """
        by_node: dict[str, list[str]] = defaultdict(list)
        for sandbox in claim.ids:
            by_node[ids.node_of(sandbox)].append(sandbox)

        async def tell(item: tuple[str, list[str]]) -> None:
            edge = await self.watcher.edge_of(item[0])
            await edge.request("POST", "/v1/sandboxes/claim", msgspec.json.encode(Claim(ids=item[1])))

        await _all(by_node.items(), tell, at_once=16)

    # -- jobs ------------------------------------------------------------------------------------------------------

    async def job(self, name: str) -> Job:
        """Count a job's sandboxes by state.

        Raises:
            NotFound: no sandbox carries the job's name.
        """
        found = await self._of_job(name, ())
        if not found:
            raise NotFound(f"no sandbox belongs to job {name}", job=name)
        return Job(id=name, by_state=dict(Counter(sandbox.state for sandbox in found)))

    async def stop_job(self, name: str) -> JobStopped:
        """Delete all live sandboxes of a job, also those that appear meanwhile.

        Raises:
            PlatformError: a sandbox could not be deleted; the others were.
        """
        stopped = 0
        for _ in range(20):
            found = await self._of_job(name, LIVE_STATES)
            if not found:
                break
            stopped += sum(await _all(found, self._delete, at_once=DELETES_AT_ONCE))
        return JobStopped(stopped=stopped)

    async def _delete(self, sandbox: _Brief) -> int:
        edge = await self.watcher.edge_of(ids.node_of(sandbox.id))
        try:
            await edge.call(Sandbox, "DELETE", f"/v1/sandboxes/{sandbox.id}")
        except NotFound:
            return 0
        return 1

    async def _of_job(self, name: str, states: Sequence[State]) -> list[_Brief]:
        ids.check_name("job", name)
        query = [("job", name), *(("state", state) for state in states)]
        body, _missing = await self.list_sandboxes(query)
        return msgspec.json.decode(body, type=list[_Brief])

    # -- nodes -----------------------------------------------------------------------------------------------------

    async def nodes(self) -> list[Node]:
        """Return all nodes as the watcher sees them."""
        await self.watcher.wait_first_round()
        return self.watcher.nodes()

    async def drain(self, node: str, *, drain: bool) -> Node:
        """Let a node take no new sandboxes, or take them again.

        Raises:
            NotFound: no such node.
        """
        ids.check_node(node)
        edge = await self.watcher.edge_of(node)
        answer = await edge.call(Node, "POST", f"/v1/nodes/{quote(node)}/{'drain' if drain else 'undrain'}")
        await self.watcher.refresh(edge)
        return answer

    async def edge_document(self) -> dict[str, Any]:
        """Return the OpenAPI document of an edge, or an empty one if none answers."""
        for edge in self.watcher.edges():
            with contextlib.suppress(PlatformError):
                document: dict[str, Any] = await edge.call(dict, "GET", "/schema/openapi.json", wait=False)
                return document
        return {}


async def _all(items: Iterable[T], act: Callable[[T], Awaitable[R]], *, at_once: int) -> list[R]:
    """Act on all items, some at once; the first error is raised after all were tried."""
    limit = asyncio.Semaphore(at_once)

    async def one(item: T) -> R:
        async with limit:
            return await act(item)

    outcomes = await asyncio.gather(*(one(item) for item in items), return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]
