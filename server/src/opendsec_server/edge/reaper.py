"""Ends what nobody uses any more: idle and hard TTL, leases, and records whose retention is over.

One heap and one timer for all sandboxes. An entry says when to look, not what to do: at that time the rules are
applied to what is true then, and the entry is put back at the next time that matters.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time

from opendsec_server.edge.lifecycle import Life, Lives


class Reaper:
    """Looks at each sandbox when one of its deadlines comes."""

    def __init__(self, lives: Lives, retention_seconds: float) -> None:
        self._lives = lives
        self._retention = retention_seconds
        self._heap: list[tuple[float, int, str]] = []
        self._order = itertools.count()
        self._wake = asyncio.Event()

    def watch(self, life: Life) -> None:
        """Look at a sandbox when its next deadline comes."""
        when = self._next(life)
        if when is not None:
            heapq.heappush(self._heap, (when, next(self._order), life.id))
            if self._heap[0][2] == life.id:
                self._wake.set()

    def _next(self, life: Life) -> float | None:
        record = life.record
        if life.is_over:
            return (record.ended_at or time.time()) + self._retention
        if life.ending is not None:
            return None
        times = []
        if record.ttl_running_stop is not None and record.state == "running":
            times.append((time.time() if not life.is_idle else life.used_at) + record.ttl_running_stop)
        if record.ttl_hard is not None:
            times.append(record.created_at + record.ttl_hard)
        if life.row.lease_until is not None and not life.row.claimed:
            times.append(life.row.lease_until)
        return min(times, default=None)

    async def run(self) -> None:
        """Do this until cancelled."""
        while True:
            self._wake.clear()
            delay = self._heap[0][0] - time.time() if self._heap else None
            if delay is None or delay > 0:
                # Bounded, so that a step of the wall clock does not put a deadline off for long.
                try:
                    async with asyncio.timeout(min(delay, 60.0) if delay is not None else None):
                        await self._wake.wait()
                except TimeoutError:
                    pass
                continue
            _, _, sandbox_id = heapq.heappop(self._heap)
            life = self._lives.by_id.get(sandbox_id)
            if life is not None:
                self._look(life)

    def _look(self, life: Life) -> None:
        record, now = life.record, time.time()
        if life.is_over:
            if record.ended_at is not None and now >= record.ended_at + self._retention:
                self._lives.forget(life)
                return
        elif life.ending is None:
            if record.ttl_hard is not None and now >= record.created_at + record.ttl_hard:
                life.begin_end("expired", "hard_ttl", detail=f"its life time of {record.ttl_hard:g} s is over")
            elif not life.row.claimed and life.row.lease_until is not None and now >= life.row.lease_until:
                life.begin_end("expired", "unclaimed", detail="nobody claimed it within its lease")
            elif (
                record.ttl_running_stop is not None
                and record.state == "running"
                and life.is_idle
                and now >= life.used_at + record.ttl_running_stop
            ):
                life.begin_end("expired", "idle_ttl", detail=f"it was idle for {record.ttl_running_stop:g} s")
        self.watch(life)
