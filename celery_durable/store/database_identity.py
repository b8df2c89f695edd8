"""The id of a database: messages say by it which database waits for their answers.

Random, and made by the migration: two applications on one broker, or two environments, have different ones. A copy of
a database has the id of its original, so that a copy that is put to use beside it needs a new one.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from celery_durable.store import dialects
from celery_durable.store.engine import Store, Tx, statement

_PLACE = 1


@statement
def _read(s: Store) -> Any:
    return sa.select(s.tables.store.c.id)


def store_id(tx: Tx) -> str:
    """The id of this store's database; read once in the life of the Store.

    Where somebody has emptied the tables there is none: then a new one is made.
    """
    store = tx.store
    if store.id is None:
        found = tx.run(_read).scalar()
        if found is None:
            values = {"place": _PLACE, "id": store.runtime.new_secret()}
            tx.execute(dialects.insert_or_nothing(store.database, tx.t.store, values, ("place",)))
            found = tx.run(_read).scalar_one()
        store.id = str(found)
    return store.id
