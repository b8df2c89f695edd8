"""The package's own tables, in the database of the application."""

from __future__ import annotations

import sqlalchemy as sa

metadata = sa.MetaData()
session = sa.Table(
    "support_session",
    metadata,
    sa.Column("id", sa.String(64), primary_key=True),
    sa.Column("agent", sa.String(64), nullable=False),
    sa.Column("status", sa.String(16), nullable=False),
)
message = sa.Table(
    "support_message",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("session_id", sa.String(64), nullable=False),
    sa.Column("text", sa.Text, nullable=False),
)
