"""Connections to PostgreSQL that stay open from one world to the next, with the statements that they have prepared.

For each new connection the server starts a process, which reads the catalog and plans every statement anew: that is
two thirds of what a test of the engine costs the server. Only what a living process returns at the end of its world is
used again. A process that died, or a test, closes its connections as before.
"""

from __future__ import annotations

import functools
import weakref
from collections import defaultdict
from typing import Any

from sqlalchemy import event

from celery_durable.store.engine import Store

_RESET = b"RESET ALL; SELECT pg_advisory_unlock_all()"
_IDLE = 0  # PQTRANS_IDLE
_open: defaultdict[str, list[Any]] = defaultdict(list)
"""By the URL of their database."""
_used_by: weakref.WeakKeyDictionary[Store, list[Any]] = weakref.WeakKeyDictionary()
"""The list of open connections that a store takes from and adds to. `close_all` begins a new list."""
_servers: dict[str, dict[str, Any]] = {}
"""What SQLAlchemy has found out about the server of a URL."""
_infos: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()
"""What SQLAlchemy's pool and the store know of a connection, such as its prepared statements."""


def use_again(store: Store) -> None:
    """Let a store connect by taking an open connection, if there is one."""
    dialect: Any = store.engine.dialect
    if not store.database.has_one_writer:
        dialect.initialize = functools.partial(_initialize, dialect, _url(store))
    if dialect.driver == "psycopg":
        connections = _used_by[store] = _open[_url(store)]
        event.listen(store.engine, "do_connect", lambda *_: connections.pop() if connections else None)
        event.listen(store.engine, "connect", _restore)


def _initialize(dialect: Any, url: str, connection: Any) -> None:
    """Let an engine know what an earlier one has found out about the server.

    With its first connection, SQLAlchemy sends five statements, and then a rollback, for which psycopg deallocates all
    prepared statements.
    """
    if url not in _servers:
        before = dict(vars(dialect))
        type(dialect).initialize(dialect, connection)
        _servers[url] = {name: value for name, value in vars(dialect).items() if before.get(name, before) is not value}
    vars(dialect).update(_servers[url])


def _restore(connection: Any, record: Any) -> None:
    record.info.update(_infos.pop(connection, {}))


def close(store: Store) -> None:
    """Close a store whose idle connections stay open, for `use_again`."""
    connections = _used_by.get(store)
    if connections is None or connections is not _open.get(_url(store)):
        store.close()
        return
    dialect: Any = store.engine.dialect

    def keep_or_close(connection: Any) -> None:
        if _is_usable(connection):
            connections.append(connection)
        else:
            connection.close()

    event.listen(store.engine.pool, "close", _remember)
    dialect.do_close = keep_or_close
    store.close()
    del dialect.do_close  # a body that outlives its world returns its connection later


def _remember(connection: Any, record: Any) -> None:
    _infos[connection] = dict(record.info)


def _is_usable(connection: Any) -> bool:
    pgconn = connection.pgconn
    return not connection.closed and pgconn.transaction_status == _IDLE and pgconn.exec_(_RESET).status in (1, 2)


def close_all(url: str) -> None:
    """Close the open connections to a database. Those that a store has now are not used again later."""
    for connection in _open.pop(url, ()):
        connection.close()


def _url(store: Store) -> str:
    return store.engine.url.render_as_string(hide_password=False)
