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


def find_database_id(tx: Tx) -> str | None:
    """Return the id of this store's database, for a ``tx`` that inserts none; it is read once per Store.

    Returns None if the tables were emptied, until a transaction has inserted a new id.
    """
    store = tx.store
    if store.database_id is None:
        store.database_id = tx.run(_read).scalar()
    return store.database_id


def ensure_database_id(tx: Tx) -> str:
    """Return the id of this store's database; if the tables were emptied, insert a new one in this transaction.

    The Store does not keep the id that it has inserted itself: the transaction may be rolled back.
    """
    store = tx.store
    if store.database_id is not None:
        return store.database_id
    found = tx.run(_read).scalar()
    if found is None:
        store.inserted_database_id = store.runtime.new_secret()
        # Several processes may insert at once. One row wins, and all of them read it.
        values = {"singleton": _SINGLETON, "database_id": store.inserted_database_id}
        tx.execute(dialects.insert_or_nothing(store.database, tx.t.database, values, ("singleton",)))
        found = tx.run(_read).scalar_one()
    if found != store.inserted_database_id:
        store.database_id = str(found)
    return str(found)
