"""How a connection changes between reads and transactions on each database, in as few round trips as it allows.

Connections of the store's own engine are kept between their uses (see `Connections`), so both use the same ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Protocol

import sqlalchemy as sa

from celery_durable.store.dialects import MARIADB, POSTGRESQL, SQLITE, Database

IS_READING = "celery_durable_is_reading"
"""The execution option of a connection to SQLite that begins no transaction."""
_AUTOCOMMIT: Mapping[str, Any] = MappingProxyType({"isolation_level": "AUTOCOMMIT"})


class ConnectionMode(Protocol):
    """Changes connections of one kind of database.

    ``reading_options``: the execution options of a connection that is taken from a pool to read. ``kept_options``:
    those of a kept connection.
    """

    reading_options: Mapping[str, Any]
    kept_options: Mapping[str, Any]

    def begin_reading(self, conn: sa.Connection) -> None:
        """Prepare a kept connection for statements that only read."""

    def end_reading(self, conn: sa.Connection) -> None:
        """Leave a kept connection without locks and without a snapshot."""

    def begin_transactions(self, conn: sa.Connection) -> None:
        """Prepare a kept connection for a transaction."""

    def end_transactions(self, conn: sa.Connection) -> None:
        """Change a kept connection back after its transaction."""


class _PostgresqlMode:
    """A kept connection is in autocommit, for single statements. A change costs no round trip."""

    reading_options = kept_options = _AUTOCOMMIT

    def begin_reading(self, conn: sa.Connection) -> None:
        pass

    def end_reading(self, conn: sa.Connection) -> None:
        pass

    def begin_transactions(self, conn: sa.Connection) -> None:
        conn.rollback()  # ends SQLAlchemy's own transaction state of autocommit; no round trip
        self._switch_isolation_level(conn, "READ COMMITTED")

    def end_transactions(self, conn: sa.Connection) -> None:
        self._switch_isolation_level(conn, "AUTOCOMMIT")

    @staticmethod
    def _switch_isolation_level(conn: sa.Connection, isolation_level: str) -> None:
        """Switch the driver's connection only: SQLAlchemy would store each switch until the connection is returned."""
        dialect: Any = conn.dialect
        dialect.set_isolation_level(conn.connection.dbapi_connection, isolation_level)


class _SqliteMode:
    """A connection is in autocommit until BEGIN IMMEDIATE, which `begin_immediate` sends for each transaction.

    SQLAlchemy's AUTOCOMMIT would set a pragma when the connection is returned, and then SQLite compiles each cached
    statement of the connection again at its next use.
    """

    reading_options: Mapping[str, Any] = MappingProxyType({IS_READING: True})
    kept_options = reading_options

    def begin_reading(self, conn: sa.Connection) -> None:
        pass

    def end_reading(self, conn: sa.Connection) -> None:
        pass

    def begin_transactions(self, conn: sa.Connection) -> None:
        conn.rollback()  # ends SQLAlchemy's own transaction state of the reads
        conn.execution_options(**{IS_READING: False})

    def end_transactions(self, conn: sa.Connection) -> None:
        conn.execution_options(**self.kept_options)


class _MariadbMode:
    """A kept connection stays out of autocommit, because a change costs a round trip: a read ends with a rollback.

    In READ COMMITTED each statement sees what was committed before it, as in autocommit.
    """

    reading_options = _AUTOCOMMIT
    kept_options: Mapping[str, Any] = MappingProxyType({})

    def begin_reading(self, conn: sa.Connection) -> None:
        conn.begin()  # no round trip

    def end_reading(self, conn: sa.Connection) -> None:
        conn.rollback()

    def begin_transactions(self, conn: sa.Connection) -> None:
        pass

    def end_transactions(self, conn: sa.Connection) -> None:
        pass


MODES: Mapping[Database, ConnectionMode] = {
    POSTGRESQL: _PostgresqlMode(),
    MARIADB: _MariadbMode(),
    SQLITE: _SqliteMode(),
}
