"""API keys."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Apply."""
    op.create_table(
        "keys",
        sa.Column("hash", sa.LargeBinary(32), primary_key=True),
        sa.Column("principal", sa.String(128), nullable=False),
        sa.Column("name", sa.String(128), nullable=False, server_default=""),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("revoked_at", sa.Float, nullable=True),
    )
    op.create_index("keys_by_principal", "keys", ["principal"])


def downgrade() -> None:
    """Undo."""
    op.drop_table("keys")
