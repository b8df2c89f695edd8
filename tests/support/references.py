"""References of tasks that are out, read from their rows: what their messages said."""

from __future__ import annotations

import sqlalchemy as sa

from celery_durable.model import ItemRef, RunRef, TaskReference
from celery_durable.store.engine import Store
from celery_durable.store.engine.server_info import ensure_database_id


def reference_of(store: Store, ref: RunRef, event_type: str) -> TaskReference:
    """What the message of this attempt carried; an empty token where it is not out."""
    st, item = store.tables.step, store.tables.item
    found = ItemRef.read(event_type)
    joined = sa.and_(
        st.c.instance_pk == item.c.instance_pk, st.c.run_number == item.c.run_number, st.c.step_key == item.c.step_key
    )
    query = sa.select(item.c.attempt_token, item.c.loss_count).select_from(item.join(st, joined))
    if found is None:
        query = query.where(st.c.wait_event_type == event_type)
    else:
        query = query.where(
            item.c.instance_pk == found.pk, item.c.step_key == found.step_key, item.c.position == found.position
        )
    query = query.where(item.c.run_number == ref.run_number)
    row = store.read(lambda tx: tx.execute(query).first())
    id_ = store.transact(ensure_database_id)
    if row is None:
        return TaskReference(id_, ref, event_type, "")
    return TaskReference(id_, ref, event_type, row.attempt_token or "", delivery=row.loss_count)
