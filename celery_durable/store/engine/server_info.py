"""Facts about a database and its server, for `durable doctor` and Django's checks, and the database's random id.

A task's message carries the id of the database that waits for its answer, so that two applications on one broker do not
answer each other. A copy of a database has the id of its original, and needs a new one if both are in use.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import sqlalchemy as sa

from celery_durable.model import RowLocker, from_us
from celery_durable.store.engine import Store, Tx
from celery_durable.store.engine.statements import statement
from celery_durable.store.schema import dialects

_READ_ONLY = {
    "postgresql": "SELECT current_setting('transaction_read_only') = 'on'",
    "mariadb": "SELECT @@global.read_only",
}


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """A database server: its version, its settings in the store's transactions, and its time."""

    name: str
    version: str
    isolation: str
    is_read_only: bool
    """Whether the server accepts no writes: it is a standby, or an operator made it read-only."""
    now: datetime
    sync_wait: int | None = None
    """``wsrep_sync_wait`` of a node of a Galera cluster: what waits for the changes of other nodes. Else None."""


def read_server_info(store: Store) -> ServerInfo:
    """Read the facts in a transaction of the store; raises UnsupportedDatabase, and SQLAlchemy's DBAPIError."""

    def work(tx: Tx) -> ServerInfo:
        dialects.check_server(tx.conn)
        version = ".".join(str(part) for part in (tx.conn.dialect.server_version_info or ())[:3])
        return ServerInfo(
            name=store.database.name,
            version=version,
            isolation=tx.conn.get_isolation_level(),
            is_read_only=is_read_only(tx),
            now=from_us(tx.execute(sa.select(store.clock())).scalar_one()),
            sync_wait=_read_sync_wait(tx) if store.database is dialects.MARIADB else None,
        )

    return store.transact_once(work)


def is_read_only(tx: Tx) -> bool:
    """Whether the server accepts no writes: it is a standby, or an operator made it read-only."""
    query = _READ_ONLY.get(tx.store.database.name)
    return query is not None and bool(tx.conn.exec_driver_sql(query).scalar())


def find_locker(tx: Tx, pk: int) -> RowLocker | None:
    """Find the session that holds the lock of an instance's row, without waiting. A shared lock is not found."""
    if tx.store.database is dialects.MARIADB:
        return _find_idle_locker(tx, pk)
    if tx.store.database is not dialects.POSTGRESQL:
        return None
    query = """
        SELECT a.pid, a.state, CAST(1000 * extract(epoch FROM clock_timestamp() - a.xact_start) AS bigint) AS age_ms
        FROM pg_locks l JOIN pg_stat_activity a ON a.pid = l.pid
        WHERE l.locktype = 'transactionid' AND l.granted
            AND CAST(l.transactionid AS text) = (SELECT CAST(xmax AS text) FROM {table} WHERE id = :pk)
    """
    table = tx.conn.dialect.identifier_preparer.format_table(tx.t.instance)
    row = tx.execute(sa.text(query.format(table=table)).bindparams(pk=pk)).first()
    if row is None or row.age_ms is None:  # another role's session, whose activity this role may not see
        return None
    end = f"psql -c 'SELECT pg_terminate_backend({row.pid})'"
    return RowLocker(row.pid, row.state, timedelta(milliseconds=row.age_ms), end)


def _find_idle_locker(tx: Tx, pk: int) -> RowLocker | None:
    """Find it on MariaDB, which names locks only while another waits for them: the only idle one that has any."""
    query = """
        SELECT trx_mysql_thread_id AS pid, TIMESTAMPDIFF(MICROSECOND, trx_started, NOW(6)) DIV 1000 AS age_ms
        FROM information_schema.innodb_trx
        WHERE trx_query IS NULL AND trx_rows_locked > 0 AND trx_mysql_thread_id <> CONNECTION_ID()
    """
    i = tx.t.instance.c
    try:
        idle = tx.execute(sa.text(query)).all()
        if len(idle) != 1 or tx.execute(sa.select(i.id).where(i.id == pk).with_for_update(skip_locked=True)).first():
            return None
    except sa.exc.DBAPIError:  # it needs the privilege PROCESS, and one to lock rows: `explain` goes on without it
        return None
    pid, age = idle[0].pid, timedelta(milliseconds=int(idle[0].age_ms))
    return RowLocker(pid, "idle in transaction", age, f"mariadb -e 'KILL {pid}'")


def _read_sync_wait(tx: Tx) -> int | None:
    # Not as @@wsrep_on, which fails on a server that was built without Galera.
    query = "SHOW VARIABLES WHERE Variable_name IN ('wsrep_on', 'wsrep_sync_wait')"
    return find_sync_wait(dict(tuple(row) for row in tx.conn.exec_driver_sql(query)))


def find_sync_wait(variables: Mapping[str, str]) -> int | None:
    """Return ``wsrep_sync_wait`` if the variables are those of a Galera node, else None."""
    return int(variables["wsrep_sync_wait"]) if variables.get("wsrep_on") == "ON" else None


def has_lock_timeout(store: Store) -> bool:
    """Read whether a lock wait outside a transaction is limited: a pooler may ignore the parameter ``options``."""
    if store.database is not dialects.POSTGRESQL:
        return True
    query = "SELECT current_setting('lock_timeout') <> '0'"
    # In autocommit: the store may set the limit anew in each transaction.
    return store.run_statement(lambda tx: bool(tx.conn.exec_driver_sql(query).scalar()))


_SINGLETON = 1


@statement
def _read_database_id(s: Store) -> Any:
    return sa.select(s.tables.database.c.database_id)


def find_database_id(tx: Tx) -> str | None:
    """Return the id of this store's database; None if the tables were emptied. It is read once per Store."""
    store = tx.store
    if store.database_id is None:
        store.database_id = tx.run(_read_database_id).scalar()
    return store.database_id


def ensure_database_id(tx: Tx) -> str:
    """Return the id of this store's database; if the tables were emptied, insert a new one in this transaction.

    The Store does not keep an id that it has inserted itself: the transaction may be rolled back.
    """
    store = tx.store
    if store.database_id is not None:
        return store.database_id
    found = tx.run(_read_database_id).scalar()
    if found is None:
        store.inserted_database_id = store.runtime.new_secret()
        # Several processes may insert at once. One row wins, and all of them read it.
        values = {"singleton": _SINGLETON, "database_id": store.inserted_database_id}
        tx.execute(dialects.insert_or_nothing(store.database, tx.t.database, values, ("singleton",)))
        found = tx.run(_read_database_id).scalar_one()
    if found != store.inserted_database_id:
        store.database_id = str(found)
    return str(found)
