"""What a probe has found out about this host."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from opendsec_server.platform.config import Config

State = Literal["ok", "missing", "degraded"]


class Finding(msgspec.Struct, kw_only=True, frozen=True):
    """One thing the host can or cannot do."""

    #: Stable name for programs, such as ``runc`` or ``erofs``.
    name: str
    #: ``ok``; ``degraded``: works, but less well or not by itself; ``missing``.
    state: State
    #: What it is for.
    purpose: str
    #: What was seen.
    detail: str = ""
    #: How to get it; empty when all is well.
    remedy: str = ""
    #: The default setup cannot run without it.
    required: bool = False

    @property
    def blocks(self) -> bool:
        """Whether the default setup cannot run because of it."""
        return self.required and self.state == "missing"


#: Looks at one side of the host. Must be bounded in time and leave nothing behind.
Probe = Callable[[Config], list[Finding]]


class ProbeFailed(Exception):
    """A step of a probe did not work; the text says how."""


def run(argv: Sequence[str], *, seconds: float = 10.0) -> str:
    """Run a program and return what it printed.

    Raises:
        ProbeFailed: it is absent, failed or took too long.
    """
    try:
        done = subprocess.run(argv, capture_output=True, text=True, errors="replace", timeout=seconds, check=False)
    except FileNotFoundError as error:
        raise ProbeFailed("not installed") from error
    except subprocess.TimeoutExpired as error:
        raise ProbeFailed(f"{argv[0]} did not end within {seconds:g} s") from error
    except OSError as error:
        raise ProbeFailed(f"{argv[0]}: {error.strerror}") from error
    if done.returncode != 0:
        lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise ProbeFailed(lines[-1][:200] if lines else f"{argv[0]} ended with status {done.returncode}")
    return done.stdout
