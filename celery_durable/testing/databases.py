"""The database of a harness: a SQLite file in memory, or a database that the test names.

It is a file because a harness has several processes and threads: an in-memory database of SQLite belongs to one
connection, or locks whole tables between connections. The file is in /dev/shm if that exists, and is never synced.
"""

from __future__ import annotations

import functools
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path

from celery_durable.config import Settings
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
    """Return the content of a migrated SQLite file, to copy."""
    with tempfile.TemporaryDirectory(prefix="durable-template-") as folder:
        store = Store(f"sqlite:///{folder}/template.sqlite3", prefix=prefix)
        migrate.upgrade(store)
        store.close()  # closing the last connection removes the WAL file, so one file is left
        return (Path(folder) / "template.sqlite3").read_bytes()
