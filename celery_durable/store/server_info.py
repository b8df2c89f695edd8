"""Facts about a database server, for `durable doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

import sqlalchemy as sa

from celery_durable.model import from_us
from celery_durable.store import dialects
from celery_durable.store.engine import Store, Tx

_READ_ONLY = {
    "postgresql": "SELECT current_setting('transaction_read_only') = 'on'",
    "mariadb": "SELECT @@global.read_only",
}


@dataclass(frozen=True, slots=True)
class Health:
    """A server as the store's transactions find it."""

    name: str
    version: str
    isolation: str
    is_read_only: bool
    """Whether the server is a standby or was made read-only."""
    now: datetime


def look(store: Store) -> Health:
    """Read the server's facts in an ordinary transaction; raises UnsupportedDatabase and the driver's errors."""

    def work(tx: Tx) -> Health:
        dialects.check_server(tx.conn)
        version = ".".join(str(part) for part in (tx.conn.dialect.server_version_info or ())[:3])
        query = _READ_ONLY.get(store.database.name)
        return Health(
            name=store.database.name,
            version=version,
            isolation=tx.conn.get_isolation_level(),
            is_read_only=query is not None and bool(tx.conn.exec_driver_sql(query).scalar()),
            now=from_us(tx.execute(sa.select(store.clock())).scalar_one()),
        )

    return store.transact_once(work)
