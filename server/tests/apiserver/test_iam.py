"""API keys: making, verifying, revoking, and the admin key of the first start."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.config import Config
from alembic.script import ScriptDirectory

from opendsec.api.errors import NotFound, Unauthenticated, Unavailable
from opendsec_server.apiserver.iam import Iam, hash_of, new_key
from opendsec_server.platform import database
from opendsec_server.platform.database import KeyRow, open_database, sqlite_url


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
async def engine(tmp_path):
    made = await open_database(sqlite_url(tmp_path / "iam.db"))
    yield made
    await made.dispose()


@pytest.fixture
def iam(engine, clock):
    return Iam(engine, monotonic=clock, wall=clock)


def bearer(key: str) -> bytes:
    return b"Bearer " + key.encode()


async def test_a_key_is_known_after_it_was_made(iam):
    """A new key names its principal; the second time from memory."""
    key = await iam.create_key("alice")
    assert iam.authenticate_nowait(bearer(key)) is None
    assert (await iam.authenticate(bearer(key))).name == "alice"
    assert iam.authenticate_nowait(bearer(key)).name == "alice"


async def test_the_database_holds_only_hashes(iam, engine, tmp_path):
    """Whoever reads the database cannot use the keys."""
    key = await iam.create_key("alice")
    async with engine.connect() as connection:
        assert (await connection.scalars(sa.select(KeyRow.hash))).all() == [hash_of(key.encode())]
    await engine.dispose()
    assert not any(key.encode() in path.read_bytes() for path in tmp_path.iterdir())


@pytest.mark.parametrize("header", [None, b"", b"Bearer", b"Bearer x", b"Basic abc", b"Bearer ods_" + b"A" * 40])
async def test_malformed_credentials_are_refused_without_asking_the_database(iam, header):
    """Only a well-formed key is worth a lookup."""
    with pytest.raises(Unauthenticated):
        iam.authenticate_nowait(header)


async def test_an_unknown_key_is_refused(iam):
    """A well-formed key that nobody made is no key."""
    with pytest.raises(Unauthenticated):
        await iam.authenticate(bearer(new_key()))


async def test_a_revoked_key_is_refused_at_once_here_and_soon_elsewhere(iam, engine, clock):
    """The revoking replica forgets at once, another one after its recheck time."""
    key = await iam.create_key("alice")
    other = Iam(engine, monotonic=clock, wall=clock, recheck_seconds=10.0)
    await other.authenticate(bearer(key))
    await iam.revoke_key(key)
    with pytest.raises(Unauthenticated):
        await iam.authenticate(bearer(key))
    assert other.authenticate_nowait(bearer(key)) is not None
    clock.now += 11
    assert other.authenticate_nowait(bearer(key)) is None
    with pytest.raises(Unauthenticated):
        await other.authenticate(bearer(key))
    with pytest.raises(NotFound):
        await iam.revoke_key(key)


async def test_a_database_that_fails_does_not_lock_out_known_keys(iam, engine, clock):
    """A key that was good stays good while the database is away; an unknown one must wait."""
    key = await iam.create_key("alice")
    await iam.authenticate(bearer(key))
    clock.now += 100
    async with engine.begin() as connection:
        await connection.execute(sa.text("ALTER TABLE keys RENAME TO gone"))
    assert (await iam.authenticate(bearer(key))).name == "alice"
    with pytest.raises(Unavailable):
        await iam.authenticate(bearer(new_key()))


async def test_the_first_start_makes_a_private_admin_key(iam, tmp_path):
    """The file has mode 600 even under a permissive umask, and its key works."""
    path = tmp_path / "admin.key"
    old = os.umask(0)
    try:
        await iam.ensure_admin_key(path)
    finally:
        os.umask(old)
    assert path.stat().st_mode & 0o777 == 0o600
    assert (await iam.authenticate(bearer(path.read_text().strip()))).name == "admin"
    assert sorted(file.name for file in tmp_path.glob("*.key*")) == ["admin.key"]


async def test_later_starts_change_nothing(iam, tmp_path):
    """The admin key is made once."""
    path = tmp_path / "admin.key"
    await iam.ensure_admin_key(path)
    before = path.read_text()
    await iam.ensure_admin_key(path)
    assert path.read_text() == before


async def test_a_fresh_database_adopts_the_file(iam, tmp_path):
    """Killed between file and row, or with a lost database, the key that people hold stays good."""
    path = tmp_path / "admin.key"
    path.write_text(key := new_key())
    path.chmod(0o644)
    await iam.ensure_admin_key(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert (await iam.authenticate(bearer(key))).name == "admin"


async def test_a_missing_file_is_not_reinvented(iam, tmp_path):
    """Removing the file is a way to take the key off the disk."""
    path = tmp_path / "admin.key"
    await iam.ensure_admin_key(path)
    key = path.read_text().strip()
    path.unlink()
    await iam.ensure_admin_key(path)
    assert not path.exists()
    assert (await iam.authenticate(bearer(key))).name == "admin"


async def test_a_file_with_something_else_stops_the_start(iam, tmp_path):
    """Garbage in the file is neither used nor overwritten."""
    path = tmp_path / "admin.key"
    path.write_text("hello")
    with pytest.raises(Unavailable):
        await iam.ensure_admin_key(path)
    assert path.read_text() == "hello"


async def test_a_reopened_database_keeps_its_keys(tmp_path, clock):
    """Opening twice migrates once and loses nothing."""
    url = sqlite_url(tmp_path / "again.db")
    first = await open_database(url)
    key = await Iam(first, monotonic=clock, wall=clock).create_key("alice")
    await first.dispose()
    second = await open_database(url)
    assert (await Iam(second, monotonic=clock, wall=clock).authenticate(bearer(key))).name == "alice"
    await second.dispose()


async def test_the_migrations_make_the_declared_tables(engine):
    """Alembic's result and the mapped classes are the same schema."""
    async with engine.connect() as connection:
        columns = await connection.run_sync(
            lambda sync: {column["name"]: column["nullable"] for column in sa.inspect(sync).get_columns("keys")}
        )
    assert columns == {column.name: column.nullable for column in KeyRow.__table__.columns}


def test_head_names_the_newest_migration():
    """The constant that saves an alembic import at start is right."""
    config = Config()
    config.set_main_option("script_location", str(Path(database.__file__).parent / "migrations"))
    assert ScriptDirectory.from_config(config).get_current_head() == database.HEAD


async def test_an_unreachable_database_is_unavailable(tmp_path):
    """A folder that does not exist is named as the reason."""
    with pytest.raises(Unavailable):
        await open_database(sqlite_url(tmp_path / "no" / "such" / "iam.db"))
