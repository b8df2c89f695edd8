"""The checks of the database: whether it can be used, its settings, its tables and its clock."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

from celery_durable.app import Durable
from celery_durable.doctor.findings import APP, Finding, Level, Servers
from celery_durable.errors import UnsupportedDatabase
from celery_durable.insight.explain.due import find_remedy
from celery_durable.model import format_duration
from celery_durable.store.engine import server_info
from celery_durable.store.engine.faults import find_driver_error
from celery_durable.store.migrations import migrate
from celery_durable.store.schema.tables import REVISION
from celery_durable.testing import databases

_WAITS_BEFORE_READS = 1
"""The bit of ``wsrep_sync_wait`` for SELECT and BEGIN."""


def check_database(durable: Durable, servers: Servers) -> Iterator[Finding]:
    """Check the database, and whether the tables can be read."""
    about = "database"
    try:
        if databases.is_without_store(durable):
            remedy = "Set it, for example app.conf.durable_database_url = 'postgresql+psycopg://user@host/db'"
            yield Finding(Level.FAIL, about, "durable_database_url is not set.", remedy)
            return
        started_at = durable.internals.runtime.wall_clock()
        found = server_info.read_server_info(durable.internals.store)
        offset = started_at + (durable.internals.runtime.wall_clock() - started_at) / 2 - found.now
    except UnsupportedDatabase as exc:
        yield Finding(Level.FAIL, about, str(exc), "Use a supported database.")
        return
    except Exception as exc:  # noqa: BLE001  # many drivers, many errors, one meaning
        answer = str(find_driver_error(exc))
        yield Finding(Level.FAIL, about, f"The database cannot be used: {answer}", find_remedy(answer, of="database"))
        return
    url = durable.internals.store.engine.url.render_as_string()
    if found.is_read_only:
        sentence = f"{found.name} {found.version} at {url} is read-only: a standby?"
        yield Finding(Level.FAIL, about, sentence, "Name the server that takes writes in durable_database_url.")
    else:
        yield Finding(Level.OK, about, f"{found.name} {found.version} at {url}, {found.isolation}.")
    if found.isolation not in ("READ COMMITTED", "SERIALIZABLE" if found.name == "sqlite" else ""):
        remedy = "Remove what sets it from engine=, such as a listener. Durable asks for READ COMMITTED."
        yield Finding(Level.FAIL, "isolation", f"Transactions run as {found.isolation}: wake-ups can be lost.", remedy)
    yield from _check_lock_timeout(durable)
    yield from check_galera(found.sync_wait)
    yield _check_tables(durable, servers)
    direction = "ahead of" if offset > timedelta(0) else "behind"
    ahead = f"{format_duration(abs(offset))} {direction} the database's"
    sentence = f"This machine's clock is {ahead}. Workflows use only the database's clock."
    yield Finding(Level.OK, "clock", sentence)


def _check_lock_timeout(durable: Durable) -> Iterator[Finding]:
    if not server_info.has_lock_timeout(durable.internals.store):
        sentence = "Statements outside a transaction, such as a claim, wait for locks forever: lock_timeout is 0."
        remedy = "Run: ALTER ROLE CURRENT_USER SET lock_timeout = '5s'"
        if durable.internals.settings.prepared_statements:
            remedy += ". Behind PgBouncer in transaction mode, also set durable_prepared_statements = False."
        yield Finding(Level.WARN, "lock_timeout", sentence, remedy)


def check_galera(sync_wait: int | None) -> Iterator[Finding]:
    """Check a node of a Galera cluster. ``sync_wait``: its ``wsrep_sync_wait``; None for any other server."""
    if sync_wait is None:
        return
    node = f"MariaDB is a Galera node with wsrep_sync_wait = {sync_wait}"
    if sync_wait & _WAITS_BEFORE_READS:
        yield Finding(Level.OK, "galera", f"{node}. All processes must use one node at a time.")
        return
    sentence = f"{node}: after a switch to another node, a process may not see what was committed a moment before."
    remedy = "Set wsrep_sync_wait = 7 on all nodes, and let a proxy connect all processes to one node at a time."
    yield Finding(Level.WARN, "galera", sentence, remedy)


def _check_tables(durable: Durable, servers: Servers) -> Finding:
    revision = migrate.read_revision(durable.internals.store)
    servers.can_read = revision is not None and revision >= REVISION
    if servers.can_read:
        return Finding(Level.OK, "tables", f"The tables are at revision {revision}; this version needs {REVISION}.")
    at = "The tables do not exist" if revision is None else f"The tables are at revision {revision}"
    return Finding(Level.FAIL, "tables", f"{at}; this version needs {REVISION}.", f"celery -A {APP} durable migrate")
