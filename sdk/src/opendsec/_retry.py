"""How long to wait before a request is repeated. Pure: time and randomness come in as arguments."""

from __future__ import annotations

from opendsec.api.errors import OutcomeUnknown, PlatformError

_FIRST_DELAY, _GROWTH, _MAX_DELAY = 0.05, 2.0, 5.0
#: A server may ask for at most this many seconds of patience at once.
_MAX_RETRY_AFTER = 30.0


def may_repeat(error: PlatformError, *, idempotent: bool) -> bool:
    """Tell whether a failed request may be sent again.

    Yes if it is certain that nothing happened, and for idempotent requests also if the outcome is unknown.
    """
    return error.retryable or (idempotent and isinstance(error, OutcomeUnknown))


def backoff(attempt: int, error: PlatformError, chance: float) -> float:
    """Return the seconds to wait before the next attempt.

    Args:
        attempt: attempts made so far, from 1.
        error: what the last one failed with; its ``retry_after`` is a lower bound.
        chance: random number in [0, 1) that spreads clients.
    """
    delay = min(_MAX_DELAY, _FIRST_DELAY * _GROWTH ** min(attempt - 1, 30)) * (0.5 + chance / 2)
    asked = error.detail.get("retry_after")
    if isinstance(asked, (int, float)) and asked > 0:
        delay = max(delay, min(float(asked), _MAX_RETRY_AFTER) * (1 + chance / 4))
    return delay
