"""What a client and all its sandboxes share: transport, clean-up tasks and the claiming of leases."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any
from urllib.parse import quote

import msgspec

from opendsec._transport import Transport
from opendsec.api.errors import PlatformError
from opendsec.api.models import Claim

#: Seconds between learning of a sandbox and claiming it, so that many are claimed with one request.
_CLAIM_DELAY = 0.2
_CLAIM_BATCH = 1000
_CLOSE_SECONDS = 5.0


class Core:
    """Shared state of one open client.

    Args:
        transport: sends requests.
        lease_seconds: lease of new sandboxes; what this process does not claim in time the platform stops.
    """

    def __init__(self, transport: Transport, *, lease_seconds: float) -> None:
        self.transport = transport
        self.lease_seconds = lease_seconds
        self._background: set[asyncio.Task[Any]] = set()
        self._unclaimed: list[str] = []
        self._claimer: asyncio.Task[None] | None = None

    # -- clean-up --------------------------------------------------------------------------------------------------

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run work that must be done whoever waits for it; its platform errors are dropped."""

        async def run() -> None:
            with contextlib.suppress(PlatformError):
                await work

        task = asyncio.get_running_loop().create_task(run())
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    async def cleanup(self, work: Coroutine[Any, Any, Any], *, seconds: float = _CLOSE_SECONDS) -> None:
        """Do clean-up that a cancellation of the caller does not stop, and wait for it a while."""
        await asyncio.wait({self.spawn(work)}, timeout=seconds)

    async def aclose(self) -> None:
        """Claim what is not claimed yet and end clean-up that is under way."""
        if self._claimer is not None:
            self._claimer.cancel()
            await asyncio.gather(self._claimer, return_exceptions=True)
        with contextlib.suppress(PlatformError):
            await self._claim_now(asyncio.get_running_loop().time() + _CLOSE_SECONDS)
        if self._background:
            _done, pending = await asyncio.wait(self._background, timeout=_CLOSE_SECONDS)
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)

    # -- leases ----------------------------------------------------------------------------------------------------

    def claim(self, sandbox_id: str) -> None:
        """Tell the platform soon that this process knows of a sandbox it created."""
        self._unclaimed.append(sandbox_id)
        if self._claimer is None or self._claimer.done():
            self._claimer = asyncio.get_running_loop().create_task(self._claim_soon())

    def unclaim(self, sandbox_id: str) -> None:
        """Do not claim a sandbox that has been stopped."""
        with contextlib.suppress(ValueError):
            self._unclaimed.remove(sandbox_id)

    async def _claim_soon(self) -> None:
        while self._unclaimed:
            await asyncio.sleep(_CLAIM_DELAY)
            with contextlib.suppress(PlatformError):
                await self._claim_now(asyncio.get_running_loop().time() + self.lease_seconds)

    async def _claim_now(self, deadline: float) -> None:
        while self._unclaimed:
            batch = self._unclaimed[:_CLAIM_BATCH]
            del self._unclaimed[: len(batch)]
            body = msgspec.json.encode(Claim(ids=batch))
            try:
                await self.transport.call("POST", "/v1/sandboxes/claim", body, deadline=deadline)
            except asyncio.CancelledError:
                self._unclaimed[:0] = batch
                raise


def query(**values: str | float | bool | bytes | None) -> str:
    """Return an encoded query string with its question mark; ``None`` and ``False`` are left out."""
    parts = []
    for name, value in values.items():
        if value is None or value is False:
            continue
        text = "true" if value is True else value
        parts.append(f"{name}={quote(text if isinstance(text, (str, bytes)) else str(text), safe='/')}")
    return "?" + "&".join(parts) if parts else ""
