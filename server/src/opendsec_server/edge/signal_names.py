"""Signals as callers name them."""

from __future__ import annotations

import signal as signals

from opendsec.api.errors import InvalidArgument


def signal_name(number: int) -> str | None:
    """Return ``SIGKILL`` for 9; None for 0."""
    if number <= 0:
        return None
    try:
        return signals.Signals(number).name
    except ValueError:
        return f"SIG{number}"


def signal_number(name: str) -> int:
    """Return the number of a signal given as ``TERM``, ``SIGTERM`` or ``15``.

    Raises:
        InvalidArgument: there is no such signal.
    """
    if name.isascii() and name.isdigit() and 0 < int(name) < signals.NSIG:
        return int(name)
    text = name.upper()
    number = getattr(signals, text if text.startswith("SIG") else f"SIG{text}", None)
    if not isinstance(number, signals.Signals):
        raise InvalidArgument(f"there is no signal {name[:40]!r}")
    return int(number)
