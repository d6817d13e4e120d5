"""Creating sandboxes: once each, whatever is lost on the way, and none left behind.

Every create carries a ``request_id``, so repeating it gives the same sandbox, and a lease: what this process does not
claim within ``lease_seconds`` the platform stops. A cancelled create is looked up by its ``request_id`` and stopped; if
even that is lost (the process is killed), the lease ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

import msgspec

from opendsec._args import RunArgs, create_request
from opendsec._core import Core, query
from opendsec._retry import may_repeat
from opendsec._sandbox import Sandbox
from opendsec._transport import IDLE_SECONDS
from opendsec.api.errors import ErrorBody, NotFound, PlatformError, WaitTimeout, from_body
from opendsec.api.ids import new_request_id
from opendsec.api.models import CreateResult
from opendsec.api.models import Sandbox as SandboxInfo

_info = msgspec.json.Decoder(SandboxInfo)
_infos = msgspec.json.Decoder(list[SandboxInfo])
_line = msgspec.json.Decoder(CreateResult)
_FIND_DELAYS = (0.05, 0.25, 1.0, 3.0)


class BatchFailed(PlatformError):
    """Some sandboxes of ``run_many`` could not be created; raised after all others were handed out.

    Attributes:
        errors: error of each failed item, by its index.
        sandboxes: those that were created and handed out.
    """

    def __init__(self, errors: dict[int, PlatformError], sandboxes: list[Sandbox], count: int) -> None:
        first = next(iter(errors.values()))
        super().__init__(f"{len(errors)} of {count} sandboxes could not be created; the first: {first}")
        self.errors = errors
        self.sandboxes = sandboxes
        self.detail = {"failed": len(errors), "count": count, "first": first.code}

    @property
    def is_infra(self) -> bool:  # type: ignore[override]
        """All failures are the infrastructure's."""
        return all(error.is_infra for error in self.errors.values())


async def create(core: Core, args: RunArgs, kind: type[RunArgs], timeout: float) -> Sandbox:
    """Create one sandbox; see ``DSecClient.run_container``."""
    if not isinstance(args, kind):
        raise TypeError(f"expected {kind.__name__}, got {type(args).__name__}")
    request_id = args.request_id or new_request_id()
    body = create_request(args, request_id=request_id, lease_seconds=core.lease_seconds)
    return await _create(core, body, request_id, timeout, ours=args.request_id is None)


async def _create(core: Core, body: bytes, request_id: str, timeout: float, *, ours: bool) -> Sandbox:
    deadline = asyncio.get_running_loop().time() + timeout
    try:
        answer = await core.transport.call(
            "POST", "/v1/sandboxes", body, deadline=deadline, idle=max(timeout, IDLE_SECONDS)
        )
    except (asyncio.CancelledError, WaitTimeout) as error:
        if ours:
            await core.cleanup(_abandon(core, request_id))
        if isinstance(error, WaitTimeout):
            raise WaitTimeout(f"no sandbox within {timeout:g} s", request_id=request_id) from error
        raise
    info = _info.decode(answer)
    core.claim(info.id)
    return Sandbox(core, info)


async def _abandon(core: Core, request_id: str) -> None:
    """Stop what a create made that nobody waits for any more; its lease does it if it appears later still."""
    if not await _stop_found(core, request_id):
        core.spawn(_abandon_late(core, request_id))


async def _abandon_late(core: Core, request_id: str) -> None:
    for delay in _FIND_DELAYS:
        await asyncio.sleep(delay)
        if await _stop_found(core, request_id):
            return


async def _stop_found(core: Core, request_id: str) -> bool:
    found = _infos.decode(await core.transport.call("GET", "/v1/sandboxes" + query(request_id=request_id)))
    for info in found:
        await _stop(core, info.id)
    return bool(found)


async def _stop(core: Core, sandbox_id: str) -> None:
    core.unclaim(sandbox_id)
    with contextlib.suppress(NotFound):
        await core.transport.call("DELETE", f"/v1/sandboxes/{sandbox_id}", idle=180.0)


class Batch:
    """One ``run_many``: results are gathered by a task and handed out by an iterator."""

    def __init__(self, core: Core, args: RunArgs, count: int, *, concurrency: int | None, timeout: float) -> None:
        self._core = core
        self._args = args
        self._count = count
        self._concurrency = concurrency
        self._timeout = timeout
        self._deadline = asyncio.get_running_loop().time() + timeout
        self._request_id = args.request_id or new_request_id()
        self._ready: asyncio.Queue[Sandbox | None] = asyncio.Queue()
        self._seen: set[int] = set()
        self._errors: dict[int, PlatformError] = {}
        self._made: list[Sandbox] = []

    async def sandboxes(self) -> AsyncGenerator[Sandbox, None]:
        """Hand out sandboxes as they come; leaving early stops those not handed out."""
        gatherer = asyncio.get_running_loop().create_task(self._gather())
        gatherer.add_done_callback(lambda _task: self._ready.put_nowait(None))
        complete = False
        try:
            while (sandbox := await self._ready.get()) is not None:
                self._made.append(sandbox)
                yield sandbox
            await gatherer
            complete = True
        finally:
            if not complete:
                gatherer.cancel()
                await asyncio.gather(gatherer, return_exceptions=True)
                await self._core.cleanup(self._stop_rest())
        if self._errors:
            raise BatchFailed(self._errors, self._made, self._count)

    async def _stop_rest(self) -> None:
        rest = []
        while not self._ready.empty():
            sandbox = self._ready.get_nowait()
            if sandbox is not None:
                rest.append(sandbox)
        await asyncio.gather(*(_stop(self._core, sandbox.id) for sandbox in rest))

    async def _gather(self) -> None:
        if self._concurrency is None:
            await self._stream()
        again = [index for index in range(self._count) if index not in self._seen]
        await self._one_by_one(again, self._concurrency or 32)

    async def _stream(self) -> None:
        """Ask for all at once; items that failed for want of capacity are left for single creates."""
        body = create_request(
            self._args, request_id=self._request_id, lease_seconds=self._core.lease_seconds, count=self._count
        )
        transport, attempt = self._core.transport, 0
        while len(self._seen) < self._count:
            try:
                async with transport.stream("POST", "/v1/sandboxes", body, idle=self._timeout) as stream:
                    async for line in stream.lines():
                        attempt = 0
                        self._take(_line.decode(line))
            except PlatformError as error:
                if not may_repeat(error, idempotent=True):
                    raise
                attempt += 1
                await transport.pause_within(attempt, error, self._deadline)
            else:
                return

    def _take(self, result: CreateResult) -> None:
        if result.index in self._seen:
            return
        if result.sandbox is not None:
            self._accept(result.index, Sandbox(self._core, result.sandbox))
        else:
            error = _error_of(result)
            if not error.retryable:
                self._seen.add(result.index)
                self._errors[result.index] = error

    def _accept(self, index: int, sandbox: Sandbox) -> None:
        self._seen.add(index)
        self._core.claim(sandbox.id)
        self._ready.put_nowait(sandbox)

    async def _one_by_one(self, indices: list[int], at_once: int) -> None:
        waiting = iter(indices)

        async def work() -> None:
            for index in waiting:
                request_id = f"{self._request_id}/{index}"
                body = create_request(self._args, request_id=request_id, lease_seconds=self._core.lease_seconds)
                left = max(0.001, self._deadline - asyncio.get_running_loop().time())
                try:
                    sandbox = await _create(self._core, body, request_id, left, ours=self._args.request_id is None)
                except PlatformError as error:
                    self._seen.add(index)
                    self._errors[index] = error
                else:
                    self._seen.add(index)
                    self._ready.put_nowait(sandbox)

        async with asyncio.TaskGroup() as group:
            for _ in range(min(at_once, len(indices))):
                group.create_task(work())


def _error_of(result: CreateResult) -> PlatformError:
    try:
        return from_body(msgspec.convert(result.error, ErrorBody))
    except msgspec.ValidationError:
        return from_body(ErrorBody(code="internal", message="the create failed", retryable=False, is_infra=True))
