"""The in-flight overlay: placements of this replica that the watcher's last view cannot show yet.

An entry is added when a node is chosen. It leaves when the create was refused (``release``), when a poll that was
sent after the create had ended has answered (``settle``, then ``observe``), or when it is older than the policy
allows (its request died with its task).
"""

from __future__ import annotations

import itertools
from collections import OrderedDict

import msgspec


class InFlight(msgspec.Struct):
    """What is in flight to one node."""

    count: int = 0
    memory_bytes: int = 0


class _Entry(msgspec.Struct):
    node: str
    memory_bytes: int
    added_at: float
    settled_at: float | None = None


class Overlay:
    """Placements not yet visible in a view; all calls are O(1) amortised."""

    def __init__(self, ttl_seconds: float) -> None:
        self._ttl = ttl_seconds
        self._entries: OrderedDict[int, _Entry] = OrderedDict()
        self._settled: dict[str, set[int]] = {}
        self._sums: dict[str, InFlight] = {}
        self._tokens = itertools.count(1)

    def add(self, node: str, memory_bytes: int, now: float) -> int:
        """Note a placement and return its token."""
        token = next(self._tokens)
        self._entries[token] = _Entry(node=node, memory_bytes=memory_bytes, added_at=now)
        sums = self._sums.setdefault(node, InFlight())
        sums.count += 1
        sums.memory_bytes += memory_bytes
        return token

    def release(self, token: int) -> None:
        """Forget a placement at once: nothing was created."""
        entry = self._entries.pop(token, None)
        if entry is None:
            return
        sums = self._sums[entry.node]
        sums.count -= 1
        sums.memory_bytes -= entry.memory_bytes
        if not sums.count:
            del self._sums[entry.node]
        if entry.settled_at is not None:
            self._settled[entry.node].discard(token)

    def settle(self, token: int, now: float) -> None:
        """Note that the create has ended: the next poll sent after ``now`` shows it."""
        entry = self._entries.get(token)
        if entry is not None:
            entry.settled_at = now
            self._settled.setdefault(entry.node, set()).add(token)

    def observe(self, node: str, seen_at: float) -> None:
        """Drop what a poll sent at ``seen_at`` has in its answer."""
        visible = [token for token in self._settled.get(node, ()) if self._ended_before(token, seen_at)]
        for token in visible:
            self.release(token)

    def _ended_before(self, token: int, seen_at: float) -> bool:
        settled_at = self._entries[token].settled_at
        return settled_at is not None and settled_at <= seen_at

    def expire(self, now: float) -> None:
        """Drop what is older than the overlay believes in."""
        while self._entries:
            token, entry = next(iter(self._entries.items()))
            if now - entry.added_at < self._ttl:
                return
            self.release(token)

    def of(self, node: str) -> InFlight:
        """Return what is in flight to ``node``."""
        return self._sums.get(node) or InFlight()

    def forget(self, node: str) -> None:
        """Drop everything of a node that left."""
        for token in [token for token, entry in self._entries.items() if entry.node == node]:
            self.release(token)
        self._settled.pop(node, None)

    def statistics(self) -> dict[str, int]:
        """Return how many placements are in flight, by node."""
        return {node: sums.count for node, sums in self._sums.items()}
