"""Batch create: up to 32,768 equal sandboxes, answered as a stream of results in the order they complete.

A fixed crew of workers takes index after index, so memory does not grow with the batch. Results pass through a short
queue: when the client does not read, the queue is full and the crew pauses. When the client leaves, the stream is
closed and with it the crew: no further create is issued; what was created is found by its request id
(``<request_id>/<index>``) or reaped by its lease. Placements come in rounds from water-filling over the newest views.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator

import msgspec

from opendsec.api import ids
from opendsec.api.errors import Internal, InvalidArgument, PlatformError
from opendsec.api.models import CreateResult, CreateSandbox
from opendsec_server.apiserver.service import CREATES_PER_EDGE, ApiService
from opendsec_server.core.validate import check_create
from opendsec_server.placement import Placement, demand_of

#: ``/`` and five digits must still fit into a request id of 200 characters.
_MAX_REQUEST_ID = 194
_MAX_WORKERS = 512


class Batch:
    """One batch create.

    Args:
        service: creates single sandboxes.
        request: a request with ``count``.

    Raises:
        PlatformError: the request cannot succeed for any item.
    """

    def __init__(self, service: ApiService, request: CreateSandbox) -> None:
        check_create(request)
        if request.count is None:
            raise InvalidArgument("a batch needs a count", field="count")
        if request.request_id is not None and len(request.request_id) > _MAX_REQUEST_ID:
            raise InvalidArgument(f"the request_id of a batch has at most {_MAX_REQUEST_ID} characters")
        self._service = service
        self._request = request
        self._count = request.count
        self._prefix = request.request_id or ids.new_request_id()
        self._next = 0
        self._placements: deque[Placement] = deque()

    async def lines(self) -> AsyncGenerator[bytes, None]:
        """Run the batch: one JSON line for each item, in the order of completion. Close it to stop."""
        await self._service.watcher.wait_first_round()
        edges = max(1, len(self._service.watcher.edges()))
        workers = min(self._count, CREATES_PER_EDGE * edges, _MAX_WORKERS)
        results: asyncio.Queue[bytes] = asyncio.Queue(maxsize=workers)
        crew = [asyncio.create_task(self._work(results)) for _ in range(workers)]
        try:
            for _ in range(self._count):
                yield await results.get()
        finally:
            for worker in crew:
                worker.cancel()
            await asyncio.gather(*crew, return_exceptions=True)
            for placement in self._placements:
                self._service.engine.release(placement)
            self._placements.clear()

    async def _work(self, results: asyncio.Queue[bytes]) -> None:
        while self._next < self._count:
            index = self._next
            self._next += 1
            await results.put(await self._create(index))

    async def _create(self, index: int) -> bytes:
        request_id = f"{self._prefix}/{index}"
        body = msgspec.json.encode(msgspec.structs.replace(self._request, count=None, request_id=request_id))
        try:
            placement = self._placement()
            try:
                async with self._service.slots(placement.node):
                    sandbox = await self._service.place(body, self._request, request_id, placement)
            except asyncio.CancelledError:
                self._service.engine.release(placement)
                raise
        except PlatformError as error:
            return _failed(index, error)
        except Exception as error:
            return _failed(index, Internal(f"the apiserver failed: {type(error).__name__}"))
        return b'{"index":%d,"sandbox":%b}\n' % (index, sandbox)

    def _placement(self) -> Placement:
        if not self._placements:
            remaining = self._count - self._next + 1
            engine = self._service.engine
            demand = demand_of(self._request, engine.policy)
            self._placements.extend(engine.spread(demand, min(remaining, CREATES_PER_EDGE), self._service.now()))
        return self._placements.popleft()


def _failed(index: int, error: PlatformError) -> bytes:
    result = CreateResult(index=index, error=msgspec.to_builtins(error.body()))
    return msgspec.json.encode(result) + b"\n"
