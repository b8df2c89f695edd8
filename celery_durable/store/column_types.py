"""Types of columns that differ between the databases."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.dialects import mysql


def big_id() -> sa.types.TypeEngine[int]:
    """A 64-bit key. SQLite generates values only for columns of type INTEGER."""
    return sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def long_text() -> sa.types.TypeEngine[str]:
    """Text without a small limit: MariaDB's TEXT holds only 64 KiB."""
    return sa.Text().with_variant(mysql.LONGTEXT(), "mysql", "mariadb")
