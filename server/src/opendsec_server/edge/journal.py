"""The edge's journal: what it intends for each sandbox, and what came of it. SQLite, one connection, one writer.

A row is written before anything is done for a sandbox and after it was done, so that whoever starts after a crash
knows what may exist on the host. A write reaches the kernel before the call returns; processes die here, machines
rarely do, so SQLite syncs at checkpoints only (``synchronous=NORMAL``).
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

import msgspec

from opendsec.api.errors import Unavailable
from opendsec.api.models import CreateSandbox, Sandbox
from opendsec_server.core.spec import SandboxSpec

SCHEMA_VERSION = 1
_SCHEMA = """
CREATE TABLE IF NOT EXISTS sandboxes (
    id TEXT PRIMARY KEY,
    state TEXT NOT NULL,
    final TEXT,
    request_id TEXT,
    claimed INTEGER NOT NULL,
    lease_until REAL,
    request BLOB NOT NULL,
    spec BLOB,
    record BLOB NOT NULL
) WITHOUT ROWID;
CREATE UNIQUE INDEX IF NOT EXISTS by_request ON sandboxes (request_id) WHERE request_id IS NOT NULL;
CREATE TABLE IF NOT EXISTS node (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
"""


class Row(msgspec.Struct, kw_only=True):
    """One sandbox in the journal."""

    record: Sandbox
    request: CreateSandbox
    spec: SandboxSpec | None
    #: Terminal state that ``stopping`` leads to.
    final: str | None
    claimed: bool
    lease_until: float | None


_record = msgspec.json.Decoder(Sandbox)
_request = msgspec.json.Decoder(CreateSandbox)
_spec = msgspec.json.Decoder(SandboxSpec)
_encode = msgspec.json.Encoder().encode


class Journal:
    """Rows by sandbox id, and a few values of the node."""

    def __init__(self, path: Path) -> None:
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=NORMAL")
        self._db.executescript(_SCHEMA)
        version = self.get("schema")
        if version is None:
            self.set("schema", str(SCHEMA_VERSION))
        elif int(version) != SCHEMA_VERSION:
            raise Unavailable(f"the journal {path} has format {version}, this edge knows {SCHEMA_VERSION}")

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def put(self, row: Row) -> None:
        """Write a sandbox's row whole."""
        record = row.record
        self._db.execute(
            "INSERT INTO sandboxes VALUES (?,?,?,?,?,?,?,?,?) ON CONFLICT (id) DO UPDATE SET state=excluded.state,"
            " final=excluded.final, request_id=excluded.request_id, claimed=excluded.claimed,"
            " lease_until=excluded.lease_until, spec=excluded.spec, record=excluded.record",
            (
                record.id,
                record.state,
                row.final,
                record.request_id,
                int(row.claimed),
                row.lease_until,
                _encode(row.request),
                _encode(row.spec) if row.spec is not None else None,
                _encode(record),
            ),
        )

    def drop(self, sandbox_id: str) -> None:
        """Forget a sandbox whose record's retention is over."""
        self._db.execute("DELETE FROM sandboxes WHERE id=?", (sandbox_id,))

    def rows(self) -> list[Row]:
        """Return all rows."""
        found = self._db.execute("SELECT record, request, spec, final, claimed, lease_until FROM sandboxes")
        return [
            Row(
                record=_record.decode(record),
                request=_request.decode(request),
                spec=_spec.decode(spec) if spec is not None else None,
                final=final,
                claimed=bool(claimed),
                lease_until=lease,
            )
            for record, request, spec, final, claimed, lease in found
        ]

    def get(self, key: str) -> str | None:
        """Return a value of the node."""
        row = self._db.execute("SELECT value FROM node WHERE key=?", (key,)).fetchone()
        return None if row is None else str(row[0])

    def set(self, key: str, value: str) -> None:
        """Keep a value of the node."""
        self._db.execute("INSERT OR REPLACE INTO node VALUES (?,?)", (key, value))
