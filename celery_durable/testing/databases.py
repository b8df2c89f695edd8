"""The database of a harness: a SQLite file in memory, or a database that the test names.

An in-memory database of SQLite belongs to one connection, or locks whole tables between connections. So it is a file,
in /dev/shm if that exists, and never synced.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from celery_durable.app import Durable
from celery_durable.config import Settings
from celery_durable.errors import ConfigInvalid
from celery_durable.runtime import Runtime
from celery_durable.store.engine import Store
from celery_durable.store.migrations import migrate

_MEMORY = Path("/dev/shm")  # noqa: S108  # where Linux has files in memory

MakeStore = Callable[[Settings, Runtime], Store]
"""Makes the store of a process on the database of a web framework, which migrates it."""


class Database:
    """A database's URL or what makes stores on it, and its file if the harness made it."""

    def __init__(self, url: str | MakeStore | None, *, schema: str | None, prefix: str) -> None:
        self.is_own = url is None
        self.url = url or self._make(prefix)
        self._schema, self._prefix = schema, prefix

    def _make(self, prefix: str) -> str:
        place = _MEMORY if os.access(_MEMORY, os.W_OK) else None
        folder = tempfile.mkdtemp(prefix="durable-harness-", dir=place)
        self._finalizer = weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        file = Path(folder) / "durable.sqlite3"
        file.write_bytes(_migrated(prefix))
        return f"sqlite:///{file}"

    def migrate(self) -> None:
        """Create or update the tables of a database that the test named."""
        if not (self.is_own or callable(self.url)):
            store = Store(self.url, schema=self._schema, prefix=self._prefix)
            try:
                migrate.upgrade(store)
            finally:
                store.close()

    def remove(self) -> None:
        """Delete the file that the harness made. A database that the test named stays."""
        if self.is_own:
            self._finalizer()


def wipe(store: Store) -> None:
    """Delete all instances and everything that belongs to them."""
    tables = [table for table in store.tables.metadata.sorted_tables if table is not store.tables.database]
    store.transact(lambda tx: [tx.execute(table.delete()) for table in reversed(tables)])


@functools.cache
def _migrated(prefix: str) -> bytes:
    with tempfile.TemporaryDirectory(prefix="durable-template-") as folder:
        store = Store(f"sqlite:///{folder}/template.sqlite3", prefix=prefix)
        migrate.upgrade(store)
        store.close()  # closing the last connection removes the WAL file, so one file is left
        return (Path(folder) / "template.sqlite3").read_bytes()


# Embedded replacements of servers: a SQLite file as database, and a broker in the memory of this process.


DEV_FILE = Path("durable-dev.sqlite")

_BROKER_VARIABLES = ("CELERY_BROKER_URL", "CELERY_BROKER_READ_URL", "CELERY_BROKER_WRITE_URL")
_POLLING = {"polling_interval": 0.02}
"""How often the memory transport polls, in seconds. Its default of 1 s would delay every step."""
_DEV_GRACE_SECONDS = 0.05
_MAX_LEASE_SECONDS = 5.0


def is_without_store(durable: Durable) -> bool:
    """Whether neither durable_database_url nor an engine was given."""
    try:
        _ = durable.internals.store
    except ConfigInvalid as exc:
        if exc.value is None and exc.setting.lower().endswith("durable_database_url"):
            return True
        raise
    return False


def use_dev_store(durable: Durable) -> None:
    """Store workflows in a SQLite file of the current directory."""
    _set(durable, database_url=f"sqlite:///{DEV_FILE.resolve()}")


def join_dev_store(durable: Durable) -> None:
    """Use the file of a `durable dev` in another process, which soon finds this process's work by a short grace."""
    use_dev_store(durable)
    use_memory_broker(durable.app)
    _set(durable, grace_seconds=_DEV_GRACE_SECONDS)


def use_no_store(durable: Durable) -> None:
    """Make the Durable work without a database, for commands that read files."""
    _set(durable, database_url=f"sqlite:///{os.devnull}")


def use_memory_broker(app: Any) -> str | None:
    """Use a broker in memory, before the app connects. Returns the URL of the broker that it replaces, or None."""
    configured = app.conf.broker_write_url or ""
    if not isinstance(configured, str):
        configured = ";".join(configured)
    for variable in _BROKER_VARIABLES:  # Celery prefers them to its settings
        os.environ.pop(variable, None)
    app.conf.update(
        broker_url="memory://localhost",
        broker_read_url=None,
        broker_write_url=None,
        broker_transport_options=_POLLING,
        broker_connection_retry_on_startup=True,
    )
    return None if not configured or configured.startswith("memory:") else configured


def run_dispatcher_in_worker(durable: Durable) -> None:
    """Run the dispatcher in this worker. Its broker is in the memory of this process.

    The lease is short, to recover the runs of a killed process soon. Runs of other processes are published at once,
    because their messages went to another broker.
    """
    lease = min(durable.internals.settings.lease_seconds, _MAX_LEASE_SECONDS)
    _set(durable, dispatcher="worker", lease_seconds=lease)
    durable.internals.sweeper.assume_local_queues()


def _set(durable: Durable, **changes: Any) -> None:
    durable.internals.settings = dataclasses.replace(durable.internals.settings, **changes)
