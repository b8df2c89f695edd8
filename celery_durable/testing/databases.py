"""The database under a harness: a SQLite file that lies in memory, made in a millisecond, or one that the test names.

A file, since SQLite's own in-memory databases either belong to one connection or lock whole tables against each
other; a harness has several processes and threads. It lies in /dev/shm where there is one, and is never synced.
"""

from __future__ import annotations

import functools
import os
import shutil
import tempfile
import weakref
from pathlib import Path

from celery_durable.store import migrate
from celery_durable.store.engine import CompiledStatements, Store

_MEMORY = Path("/dev/shm")  # noqa: S108  # where Linux has files in memory

compiled: dict[tuple[str | None, str], CompiledStatements] = {}
"""What harnesses before have compiled, by schema and prefix."""


class Database:
    """An URL, and the file behind it if the harness made it."""

    def __init__(self, url: str | None, *, schema: str | None, prefix: str) -> None:
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
        """Bring a database that the test named up to date."""
        if not self.is_own:
            store = Store(self.url, schema=self._schema, prefix=self._prefix)
            try:
                migrate.upgrade(store)
            finally:
                store.close()

    def remove(self) -> None:
        """Delete what was made; a database that the test named stays as it is."""
        if self.is_own:
            self._finalizer()


def wipe(store: Store) -> None:
    """Delete all instances, and all that belongs to them."""
    tables = [table for table in store.tables.metadata.sorted_tables if table is not store.tables.database]
    store.transact(lambda tx: [tx.execute(table.delete()) for table in reversed(tables)])


@functools.cache
def _migrated(prefix: str) -> bytes:
    """A SQLite file with our tables, to copy."""
    with tempfile.TemporaryDirectory(prefix="durable-template-") as folder:
        store = Store(f"sqlite:///{folder}/template.sqlite3", prefix=prefix)
        migrate.upgrade(store)
        store.close()  # the last connection to go takes the log of WAL with it: one file is left
        return (Path(folder) / "template.sqlite3").read_bytes()
