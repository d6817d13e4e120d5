"""Who calls: API keys.

A key is ``ods_`` and 40 base32 characters (200 random bits). Only its BLAKE2b hash is stored. The front door verifies a
key from memory (one hash, one dict access); what it remembers is asked again of the database after
``recheck_seconds``, so that a revocation by another replica is seen. A database that does not answer does not lock out
keys that were good a moment ago.

The admin key is made on first start and written to ``<data_dir>/admin.key`` (mode 600). The file comes first, the row
second: killed in between, the next start finds a file and an empty table, and adopts the file's key.
"""

from __future__ import annotations

import hmac
import os
import re
import secrets
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path

import msgspec
import sqlalchemy as sa
import structlog
from sqlalchemy.exc import IntegrityError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine

from opendsec.api.errors import NotFound, Unauthenticated, Unavailable
from opendsec_server.platform.database import KeyRow

ADMIN = "admin"
_KEY = re.compile(rb"ods_[a-z2-7]{40}")
_ALPHABET = "abcdefghijklmnopqrstuvwxyz234567"
_log = structlog.get_logger(__name__)


class Principal(msgspec.Struct, frozen=True):
    """An authenticated caller."""

    name: str


class _Known(msgspec.Struct):
    digest: bytes
    principal: Principal
    fresh_until: float


def new_key() -> str:
    """Return a new random API key."""
    return "ods_" + "".join(_ALPHABET[byte & 31] for byte in secrets.token_bytes(40))


def hash_of(key: bytes) -> bytes:
    """Return what is stored of a key."""
    return blake2b(key, digest_size=32, person=b"opendsec-key").digest()


class Iam:
    """Verifies, makes and revokes keys.

    Args:
        engine: the IAM database.
        monotonic: clock in seconds, for the cache.
        wall: seconds since the epoch.
        recheck_seconds: how long a key is believed in without asking the database.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        *,
        monotonic: Callable[[], float],
        wall: Callable[[], float],
        recheck_seconds: float = 10.0,
    ) -> None:
        self._engine = engine
        self._monotonic = monotonic
        self._wall = wall
        self._recheck = recheck_seconds
        self._known: dict[bytes, _Known] = {}

    def authenticate_nowait(self, authorization: bytes | None) -> Principal | None:
        """Return the caller if memory suffices, else None: then ask ``authenticate``.

        Raises:
            Unauthenticated: there is no well-formed key at all.
        """
        digest = hash_of(_key_of(authorization))
        known = self._known.get(digest)
        # The table is found by a hash of 200 secret bits, so timing tells nothing of the key; compared all the same.
        if known is None or not hmac.compare_digest(known.digest, digest) or known.fresh_until < self._monotonic():
            return None
        return known.principal

    async def authenticate(self, authorization: bytes | None) -> Principal:
        """Return the caller.

        Raises:
            Unauthenticated: no key, a malformed one, an unknown or a revoked one.
            Unavailable: the database does not answer and the key is not known yet.
        """
        digest = hash_of(_key_of(authorization))
        query = sa.select(KeyRow.principal).where(KeyRow.hash == digest, KeyRow.revoked_at.is_(None))
        try:
            async with self._engine.connect() as connection:
                name = await connection.scalar(query)
        except (SQLAlchemyError, OSError) as error:
            known = self._known.get(digest)
            if known is None:
                raise Unavailable("keys cannot be verified now") from error
            _log.warning("iam_database_unreachable", error=str(error))
            name = known.principal.name
        if name is None:
            self._known.pop(digest, None)
            raise Unauthenticated("this API key is unknown or revoked")
        principal = Principal(name)
        self._known[digest] = _Known(digest, principal, self._monotonic() + self._recheck)
        return principal

    async def create_key(self, principal: str, name: str = "") -> str:
        """Make a key for a principal; this is the only time it can be read."""
        key = new_key()
        await self._insert(key, principal, name)
        return key

    async def revoke_key(self, key: str) -> None:
        """Revoke a key; other replicas notice within ``recheck_seconds``.

        Raises:
            NotFound: no such key.
        """
        digest = hash_of(key.encode())
        statement = sa.update(KeyRow).where(KeyRow.hash == digest, KeyRow.revoked_at.is_(None))
        async with self._engine.begin() as connection:
            result = await connection.execute(statement.values(revoked_at=self._wall()))
        self._known.pop(digest, None)
        if not result.rowcount:
            raise NotFound("no such key")

    async def ensure_admin_key(self, path: Path) -> None:
        """Make the admin key on the first start; adopt the file's key if only the database is fresh.

        Raises:
            Unavailable: the file cannot be read or written.
        """
        async with self._engine.connect() as connection:
            fresh = not await connection.scalar(sa.select(sa.func.count()).select_from(KeyRow))
        try:
            key = _read_key_file(path)
            if key is None:
                if not fresh:
                    _log.warning("admin_key_file_missing", path=str(path), hint="the key in the database stays valid")
                    return
                key = _write_key_file(path, new_key())
                _log.info("admin_key_created", path=str(path))
        except OSError as error:
            raise Unavailable(f"cannot use the admin key file {path}: {error.strerror}") from error
        if fresh:
            await self._insert(key, ADMIN, "admin.key")
        else:
            try:
                await self.authenticate(b"Bearer " + key.encode())
            except Unauthenticated:
                _log.warning("admin_key_file_stale", path=str(path), hint="its key is not in the database")

    async def _insert(self, key: str, principal: str, name: str) -> None:
        row = {"hash": hash_of(key.encode()), "principal": principal, "name": name, "created_at": self._wall()}
        try:
            async with self._engine.begin() as connection:
                await connection.execute(sa.insert(KeyRow).values(**row, revoked_at=None))
        except IntegrityError:  # another replica was first with the same admin key
            if principal != ADMIN:
                raise


def _key_of(authorization: bytes | None) -> bytes:
    if authorization is None:
        raise Unauthenticated("an API key is needed: Authorization: Bearer ods_…")
    scheme, _, key = authorization.partition(b" ")
    key = key.strip()
    if scheme.lower() != b"bearer" or _KEY.fullmatch(key) is None:
        raise Unauthenticated("the Authorization header holds no API key")
    return key


def _read_key_file(path: Path) -> str | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    with os.fdopen(fd, "rb") as file:
        if os.fstat(fd).st_mode & 0o077:
            _log.warning("admin_key_file_mode", path=str(path), hint="set to 600")
            os.fchmod(fd, 0o600)
        content = file.read(200).strip()
    if _KEY.fullmatch(content) is None:
        raise Unavailable(f"the admin key file {path} holds no API key: remove it or restore it")
    return content.decode()


def _write_key_file(path: Path, key: str) -> str:
    """Write the key so that the name never shows a partial file or a wider mode; the first of several writers wins."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(key.encode() + b"\n")
            file.flush()
            os.fsync(fd)
        try:
            os.link(draft, path)
        except FileExistsError:
            return _read_key_file(path) or key
        return key
    finally:
        draft.unlink(missing_ok=True)
