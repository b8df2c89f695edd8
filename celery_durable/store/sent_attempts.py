"""Attempts that are out: rows of tasks that were sent and have not ended, with the steps that wait for them.

The transaction that answers an attempt has locked the instance. The one that reports a loss has not, so it joins the
instance's row as well.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from celery_durable.model import ItemRef, ItemStatus, StepStatus, StepType, TaskReference
from celery_durable.store.engine import Store, Tx
from celery_durable.store.statements import param
from celery_durable.store.step_format import is_of_step


def join_step(s: Store) -> sa.Join:
    """Join each row of a task with its step."""
    return s.tables.item.join(s.tables.step, is_of_step(s.tables.item, s.tables.step))


def _unanswered_conditions(s: Store) -> tuple[sa.ColumnElement[bool], ...]:
    st, item = s.tables.step.c, s.tables.item.c
    return (
        st.status == sa.literal_column(f"'{StepStatus.WAITING.value}'"),
        item.status == sa.literal_column(f"'{ItemStatus.SENT.value}'"),
    )


def task_step_conditions(s: Store) -> tuple[sa.ColumnElement[bool], ...]:
    """Conditions for the attempt of a task step. Parameter: ``type``."""
    st = s.tables.step.c
    is_task = st.type == sa.literal_column(f"'{StepType.TASK.value}'")
    return (*_unanswered_conditions(s), is_task, st.wait_event_type == param("type", sa.String))


def map_item_conditions(s: Store) -> tuple[sa.ColumnElement[bool], ...]:
    """Conditions for the attempt of a map's item. Parameters: ``pk``, ``key``, ``position``, ``attempt``."""
    st, item = s.tables.step.c, s.tables.item.c
    return (
        *_unanswered_conditions(s),
        st.type == sa.literal_column(f"'{StepType.MAP.value}'"),
        st.step_key == param("key", sa.String),
        item.instance_pk == param("pk", sa.BigInteger),
        item.position == param("position", sa.Integer),
        item.attempts == param("attempt", sa.Integer),
    )


def find(tx: Tx, reference: TaskReference, *, step_statement: Any, item_statement: Any, **where: Any) -> Any:
    """Return the row of the attempt that a reference names, or None.

    Runs ``step_statement`` for a task step and ``item_statement`` for a map item; ``where`` are further parameters.
    """
    item_ref = ItemRef.read(reference.event_type)
    if item_ref is None:
        return tx.run(step_statement, **where, type=reference.event_type).first()
    given = {"pk": item_ref.pk, "key": item_ref.step_key, "position": item_ref.position, "attempt": item_ref.attempt}
    return tx.run(item_statement, **given | where).first()
