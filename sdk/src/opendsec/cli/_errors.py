"""Exit codes and messages. Scripts rely on the codes: they are listed in ``docs/reference/cli.md``."""

from __future__ import annotations

import msgspec

from opendsec.api.errors import PlatformError, Unauthenticated, Unavailable

#: Anything that has no code of its own, defects included.
FAILED = 1
#: Wrong usage or a malformed argument.
USAGE = 2
#: ``run`` and ``exec``: a command was ended at its ``--timeout``, as timeout(1) has it.
TIMED_OUT = 124
#: ``run`` and ``exec``: the platform failed or refused, so that no code of the command exists.
PLATFORM = 125
INTERRUPTED = 130

_CODES = {
    "invalid_argument": USAGE,
    "not_found": 3,
    "image_unavailable": 3,
    "unauthenticated": 4,
    "permission_denied": 4,
    "policy_denied": 4,
    "capacity_unavailable": 5,
    "unavailable": 5,
    "quota_exceeded": 5,
    "node_lost": 5,
    "preempted": 5,
    "outcome_unknown": 5,
    "exec_timeout": 6,
    "wait_timeout": 6,
    "oom": 7,
    "disk_full": 7,
    "output_limit": 7,
    "conflict": 8,
    "sandbox_gone": 8,
    "unsupported_capability": 8,
}


def exit_code(error: PlatformError) -> int:
    """Return the exit code of an error outside ``run`` and ``exec``."""
    return _CODES.get(error.code, FAILED)


def describe(error: PlatformError, *, as_json: bool) -> str:
    """Return what is printed on stderr, with what to do where that is known."""
    if as_json:
        return msgspec.json.encode(error.body()).decode()
    text = f"opendsec: {error.message}"
    if isinstance(error, Unavailable) and "address" in error.detail:
        if str(error.detail["address"]).startswith("unix:"):
            text += (
                "\n  start one on this machine with `opendsec serve` (as root),"
                "\n  or set OPENDSEC_URL and OPENDSEC_API_KEY to use another"
            )
        else:
            text += "\n  check OPENDSEC_URL"
    elif isinstance(error, Unauthenticated) and "OPENDSEC_API_KEY" not in error.message:
        text += "\n  set OPENDSEC_API_KEY"
    return text
