"""Schema of the IAM database, as alembic migrations."""
