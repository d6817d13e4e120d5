"""The client: the way in."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from types import TracebackType
from typing import Self
from urllib.parse import quote

import msgspec

from opendsec._args import (
    DSecContainerRunArgs,
    DSecFnCallArgs,
    DSecFullVMRunArgs,
    DSecMicroVMRunArgs,
    RunArgs,
)
from opendsec._core import Core, query
from opendsec._creates import Batch, create
from opendsec._endpoint import find_endpoint
from opendsec._images import Images
from opendsec._nodes import Nodes
from opendsec._sandbox import Sandbox
from opendsec._transport import Transport
from opendsec.api.errors import InvalidArgument, PlatformError
from opendsec.api.models import MAX_BATCH, JobStopped, State
from opendsec.api.models import Sandbox as SandboxInfo

_info = msgspec.json.Decoder(SandboxInfo)
_Sandboxes = list[Sandbox]
_infos = msgspec.json.Decoder(list[SandboxInfo])
_stopped = msgspec.json.Decoder(JobStopped)


class DSecClient:
    """Client of an OpenDSec platform (paper, listing 1).

    Use it as ``async with DSecClient() as client`` or call ``open`` and ``close``. One client serves any number of
    concurrent calls of one event loop.

    Args:
        url: ``unix:///path``, ``http://host:port`` or ``https://host``; default ``OPENDSEC_URL``, else this machine's
            socket.
        api_key: default ``OPENDSEC_API_KEY``, else this machine's key file for a Unix socket.
        retry_seconds: how long a request is repeated for which it is safe, while the platform does not answer.
        lease_seconds: what this process creates but never learns of is stopped by the platform after this time.

    Attributes:
        images: image calls.
        nodes: node calls.
    """

    def __init__(
        self,
        url: str | None = None,
        api_key: str | None = None,
        *,
        retry_seconds: float = 60.0,
        lease_seconds: float = 60.0,
    ) -> None:
        self._transport = Transport(find_endpoint(url, api_key), retry_seconds=retry_seconds)
        self._core = Core(self._transport, lease_seconds=lease_seconds)
        self.images = Images(self._core)
        self.nodes = Nodes(self._core)

    def __repr__(self) -> str:
        return f"<DSecClient {self.url}>"

    @property
    def url(self) -> str:
        """The address of the platform."""
        return self._transport.endpoint.shown

    async def open(self, *, timeout: float = 2.0) -> DSecClient:
        """Connect; a second call does nothing.

        Args:
            timeout: seconds to wait for a server that is not there (yet); 0 tries once.

        Raises:
            Unavailable: no server answers.
            Unauthenticated: the key file of this machine may not be read.
        """
        if self._transport.is_open:
            return self
        await self._transport.open()
        try:
            await self._probe(timeout)
        except BaseException:
            await self._transport.aclose()
            raise
        return self

    async def _probe(self, timeout: float) -> None:
        clock = asyncio.get_running_loop().time
        deadline, attempt = clock() + timeout, 0
        while True:
            attempt += 1
            try:
                await self._transport.send("GET", "/healthz")
            except PlatformError as error:
                if "address" not in error.detail:
                    return  # a server answers, only not all of it is up: calls wait as long as they may
                await self._transport.pause_within(attempt, error, deadline)
            else:
                return

    async def close(self) -> None:
        """End clean-up that is under way and close all connections; sandboxes go on."""
        if self._transport.is_open:
            try:
                await self._core.aclose()
            finally:
                await self._transport.aclose()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # -- create ----------------------------------------------------------------------------------------------------

    async def run_container(self, args: DSecContainerRunArgs, *, timeout: float = 120.0) -> Sandbox:
        """Create a sandbox and return it when it runs (paper, listing 1).

        While no node has room the create is repeated. A lost connection is taken up again with the same ``request_id``.
        Cancelling the call stops what it started (with a ``request_id`` of your own: what nobody claims in
        ``lease_seconds``).

        Args:
            args: what to run.
            timeout: seconds for all of it.

        Raises:
            ImageUnavailable: no such image.
            CapacityUnavailable: no node had room within the timeout.
            UnsupportedCapability: a constraint cannot be enforced.
            WaitTimeout: no answer within the timeout (also a ``TimeoutError``).
            PlatformError: refused, or the platform failed.
        """
        return await create(self._core, args, DSecContainerRunArgs, timeout)

    async def run_microvm(self, args: DSecMicroVMRunArgs, *, timeout: float = 120.0) -> Sandbox:
        """Create a microVM; else like ``run_container``."""
        return await create(self._core, args, DSecMicroVMRunArgs, timeout)

    async def run_fullvm(self, args: DSecFullVMRunArgs, *, timeout: float = 300.0) -> Sandbox:
        """Create a full virtual machine; else like ``run_container``."""
        return await create(self._core, args, DSecFullVMRunArgs, timeout)

    async def fncall(self, args: DSecFnCallArgs, *, timeout: float = 120.0) -> Sandbox:
        """Get an FnCall worker; else like ``run_container``."""
        return await create(self._core, args, DSecFnCallArgs, timeout)

    async def run_many(
        self, args: RunArgs, count: int, *, concurrency: int | None = None, timeout: float = 600.0
    ) -> AsyncGenerator[Sandbox, None]:
        """Create ``count`` equal sandboxes and iterate over them as they come, in no particular order.

        Items that find no room are repeated until the timeout. Leaving the loop early stops those that were created but
        not handed out. With a ``request_id``, item ``n`` is the same as a single create with ``<request_id>/<n>``.

        Args:
            args: what to run.
            count: how many, at most 32,768.
            concurrency: most creates under way at once; default: the platform decides.
            timeout: seconds for all of it.

        Raises:
            BatchFailed: after the last sandbox, if some could not be created; has the error of each and the sandboxes.
            PlatformError: the batch as a whole was refused.
        """
        if not 1 <= count <= MAX_BATCH:
            raise InvalidArgument(f"count must be from 1 to {MAX_BATCH}")
        if concurrency is not None and concurrency < 1:
            raise InvalidArgument("concurrency must be at least 1")
        batch = Batch(self._core, args, count, concurrency=concurrency, timeout=timeout)
        sandboxes = batch.sandboxes()
        try:
            async for sandbox in sandboxes:
                yield sandbox
        finally:
            await sandboxes.aclose()

    # -- find ------------------------------------------------------------------------------------------------------

    async def get(self, sandbox_id: str) -> Sandbox:
        """Return a sandbox by its id, also from another process; an ended one for its retention time.

        Raises:
            NotFound: there is none.
        """
        answer = await self._transport.call("GET", f"/v1/sandboxes/{quote(sandbox_id, safe='')}")
        return Sandbox(self._core, _info.decode(answer))

    async def list(
        self,
        *,
        labels: Mapping[str, str] | None = None,
        job: str | None = None,
        states: Sequence[State] = (),
        request_id: str | None = None,
    ) -> _Sandboxes:
        """Return sandboxes that match all that is given.

        Args:
            labels: they carry these labels.
            job: they belong to this job.
            states: they are in one of these states.
            request_id: they were created with this key.
        """
        parts = [query(job=job, request_id=request_id)[1:]]
        parts += [query(label=f"{key}={value}")[1:] for key, value in (labels or {}).items()]
        parts += [query(state=state)[1:] for state in states]
        encoded = "&".join(part for part in parts if part)
        answer = await self._transport.call("GET", "/v1/sandboxes" + (f"?{encoded}" if encoded else ""))
        return [Sandbox(self._core, info) for info in _infos.decode(answer)]

    async def stop_job(self, job: str) -> int:
        """Stop all sandboxes of a job and return how many were stopped."""
        target = f"/v1/jobs/{quote(job, safe='')}/stop"
        return _stopped.decode(await self._transport.call("POST", target, idle=600.0)).stopped
