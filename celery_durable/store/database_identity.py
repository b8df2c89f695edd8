"""The random id of a database. A task's message carries the id of the database that waits for its answer.

The migration creates the id, so two applications or environments on one broker have different ids. A copy of a database
has the id of its original. If both are in use at the same time, the copy needs a new id.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from celery_durable.store import dialects
from celery_durable.store.engine import Store, Tx
from celery_durable.store.statements import statement

_SINGLETON = 1


@statement
def _read(s: Store) -> Any:
    return sa.select(s.tables.database.c.database_id)


def read_database_id(tx: Tx) -> str:
    """Return the id of this store's database, which is read once per Store.

    If the tables were emptied, there is no id, and this function inserts a new one.
    """
    store = tx.store
    if store.database_id is None:
        found = tx.run(_read).scalar()
        if found is None:
            # Several processes may insert at once. One row wins, and all of them read it.
            values = {"singleton": _SINGLETON, "database_id": store.runtime.new_secret()}
            tx.execute(dialects.insert_or_nothing(store.database, tx.t.database, values, ("singleton",)))
            found = tx.run(_read).scalar_one()
        store.database_id = str(found)
    return store.database_id
