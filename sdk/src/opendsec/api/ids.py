"""Names of things: how they are made, and what they may look like.

A sandbox id is ``<node>-<12 random base32 characters>``; the part before the last dash names the edge that owns
it, so that any apiserver routes any request without per-sandbox state.
"""

from __future__ import annotations

import re
import secrets

from opendsec.api.errors import InvalidArgument

_ALPHABET = "abcdefghijklmnopqrstuvwxyz234567"
_NODE = re.compile(r"[a-z][a-z0-9]{0,30}")
_SANDBOX = re.compile(r"([a-z][a-z0-9]{0,30})-([a-z2-7]{12})")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_REFERENCE = re.compile(
    r"(?P<name>[a-z0-9]+(?:[._/-]+[a-z0-9]+)*)(?::(?P<tag>[A-Za-z0-9_][A-Za-z0-9._-]{0,127}))?"
    r"(?:@(?P<digest>blake3:[0-9a-f]{64}))?"
)


def _random(length: int) -> str:
    return "".join(_ALPHABET[byte & 31] for byte in secrets.token_bytes(length))


def new_sandbox_id(node: str) -> str:
    """Return a new sandbox id owned by ``node``."""
    return f"{node}-{_random(12)}"


def new_exec_id() -> str:
    """Return a new exec id (``ex-`` and 16 random characters)."""
    return f"ex-{_random(16)}"


def new_request_id() -> str:
    """Return a new idempotency key for a create."""
    return f"rq-{_random(20)}"


def node_of(sandbox_id: str) -> str:
    """Return the name of the edge that owns a sandbox.

    Raises:
        InvalidArgument: this is no sandbox id.
    """
    match = _SANDBOX.fullmatch(sandbox_id)
    if match is None:
        raise InvalidArgument(f"{sandbox_id[:80]!r} is not a sandbox id")
    return match.group(1)


def check_node(name: str) -> str:
    """Return ``name`` if it may name a node: lower-case letter, then letters and digits, at most 31."""
    if _NODE.fullmatch(name) is None:
        raise InvalidArgument(f"{name[:80]!r} is not a node name: use a-z and 0-9, at most 31 characters")
    return name


def check_name(kind: str, name: str) -> str:
    """Return ``name`` if it is a plain name (``[A-Za-z0-9._-]``, at most 128 characters)."""
    if _NAME.fullmatch(name) is None:
        raise InvalidArgument(f"{name[:80]!r} is not a valid {kind}: use letters, digits, '.', '_', '-'")
    return name


def parse_reference(reference: str) -> tuple[str, str | None, str | None]:
    """Split an image reference into name, tag and digest.

    ``name`` alone means tag ``latest``; ``name@blake3:<64 hex>`` and a bare ``blake3:<64 hex>`` name content.

    Raises:
        InvalidArgument: this is no reference.
    """
    if re.fullmatch(r"blake3:[0-9a-f]{64}", reference):
        return "", None, reference
    match = _REFERENCE.fullmatch(reference) if len(reference) <= 512 else None
    if match is None:
        raise InvalidArgument(f"{reference[:80]!r} is not an image reference: use name:tag or name@blake3:<hex>")
    name, tag, digest = match["name"], match["tag"], match["digest"]
    if tag is None and digest is None:
        tag = "latest"
    return name, tag, digest
