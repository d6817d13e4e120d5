"""The life of one sandbox as a pure state machine.

::

    requested ──► preparing ──► running ⇄ (pausing ─► paused ─► resuming)
        │             │            │                     │
        └─────────────┴────────────┴─────────┬───────────┘
                                             ▼
                                         stopping ──► stopped | failed | expired

``stopping`` carries the terminal state it leads to and its cause: whoever begins it first decides both.
Deleting wins from any live state. A terminal state is never left.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from opendsec.api.models import TERMINAL, State


class Refusal(Enum):
    """Why a transition is refused."""

    ENDED = "the sandbox has ended"
    STOPPING = "the sandbox is being stopped"
    NOT_RUNNING = "the sandbox is not running yet"
    NOT_PAUSED = "the sandbox is not paused"
    IMPOSSIBLE = "the state does not allow this"


_NEXT: Mapping[State, frozenset[State]] = {
    "requested": frozenset({"preparing", "stopping"}),
    "preparing": frozenset({"running", "stopping"}),
    "running": frozenset({"pausing", "stopping"}),
    "pausing": frozenset({"paused", "running", "stopping"}),
    "paused": frozenset({"resuming", "stopping"}),
    "resuming": frozenset({"running", "paused", "stopping"}),
    "stopping": frozenset({"stopped", "failed", "expired"}),
    "stopped": frozenset(),
    "failed": frozenset(),
    "expired": frozenset(),
}


def refusal(state: State, target: State) -> Refusal | None:
    """Return why ``state`` may not become ``target``, or None if it may."""
    if target in _NEXT[state]:
        return None
    if state in TERMINAL:
        return Refusal.ENDED
    if state == "stopping":
        return Refusal.STOPPING
    if target == "pausing":
        return Refusal.NOT_RUNNING
    if target == "resuming":
        return Refusal.NOT_PAUSED
    return Refusal.IMPOSSIBLE


def is_live(state: State) -> bool:
    """Tell whether a sandbox in this state may still own things on the host."""
    return state not in TERMINAL
