"""The IAM database: SQLAlchemy async on SQLite (embedded default) or PostgreSQL (cluster), migrated by alembic.

``open_database`` migrates before it returns. On a database that is up to date this costs one SELECT; alembic itself
is imported only when there is something to do, which keeps restarts quick.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.exc import DBAPIError, OperationalError, ProgrammingError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from opendsec.api.errors import Unavailable

#: The newest revision in ``migrations``; a test holds the two together.
HEAD = "0001"
_MIGRATIONS = Path(__file__).parent / "migrations"
#: Any constant: serialises migrations of replicas that start at once (PostgreSQL advisory lock).
_MIGRATION_LOCK = 0x0D5EC


class Base(DeclarativeBase):
    """Base of all tables."""


class KeyRow(Base):
    """An API key; only its hash is stored."""

    __tablename__ = "keys"

    hash: Mapped[bytes] = mapped_column(sa.LargeBinary(32), primary_key=True)
    principal: Mapped[str] = mapped_column(sa.String(128), index=True)
    name: Mapped[str] = mapped_column(sa.String(128), default="")
    created_at: Mapped[float]
    revoked_at: Mapped[float | None]


def sqlite_url(path: Path) -> str:
    """Return the SQLAlchemy URL of an SQLite file."""
    return f"sqlite+aiosqlite:///{path}"


async def open_database(url: str) -> AsyncEngine:
    """Connect, migrate to the newest revision and return the engine; dispose of it when done.

    Raises:
        Unavailable: the database cannot be reached or migrated.
    """
    file = sa.make_url(url).database if url.startswith("sqlite") else None
    if file and not os.path.isdir(os.path.dirname(file) or "."):  # noqa: ASYNC240, PTH112, PTH120
        raise Unavailable(f"cannot open the database {file}: its folder does not exist")
    engine = create_async_engine(url, pool_pre_ping=not url.startswith("sqlite"))
    if url.startswith("sqlite"):
        event.listen(engine.sync_engine, "connect", _prepare_sqlite)
    try:
        async with engine.begin() as connection:
            if await _revision(connection) != HEAD:
                await connection.run_sync(_migrate)
    except (DBAPIError, OSError) as error:
        await engine.dispose()
        raise Unavailable(f"cannot open the database: {_reason(error)}") from error
    except asyncio.CancelledError:
        await engine.dispose()
        raise
    return engine


def _reason(error: Exception) -> str:
    return str(error.orig) if isinstance(error, DBAPIError) else str(error)


def _prepare_sqlite(connection: Any, _record: object) -> None:
    cursor = connection.cursor()
    for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "busy_timeout=5000", "foreign_keys=ON"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


async def _revision(connection: AsyncConnection) -> str | None:
    try:
        async with connection.begin_nested():
            found = await connection.scalar(sa.text("SELECT version_num FROM alembic_version"))
    except (OperationalError, ProgrammingError):  # no such table: a fresh database
        return None
    return None if found is None else str(found)


def _migrate(connection: sa.Connection) -> None:
    from alembic import command  # noqa: PLC0415 - see the module's docstring
    from alembic.config import Config  # noqa: PLC0415

    if connection.dialect.name == "postgresql":
        connection.execute(sa.text("SELECT pg_advisory_xact_lock(:key)"), {"key": _MIGRATION_LOCK})
    config = Config()
    config.set_main_option("script_location", str(_MIGRATIONS).replace("%", "%%"))
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
