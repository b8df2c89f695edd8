"""The items of a map whose step or run ends before all of them have answered: they are cancelled.

The row of an item is the fence against a late result, which does not lock the instance (see `task_answers`).
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from celery_durable.model import OPEN_ITEMS, ItemStatus, StepStatus, StepType
from celery_durable.store import items
from celery_durable.store.engine import Store, Tx
from celery_durable.store.statements import param, statement


@statement
def _cancel_open(s: Store) -> Any:
    return (
        sa.update(s.tables.item)
        .where(*items.step_conditions(s), items.has_status(s, *OPEN_ITEMS))
        .values(status=ItemStatus.CANCELLED.value, due_at=sa.null())
    )


def cancel_open(tx: Tx, pk: int, run_number: int, step_key: str) -> None:
    """Cancel the open items of a map whose step ends in this transaction. The caller has locked the instance.

    An answer that is being recorded holds its item's row. This waits for it, and then leaves the item as it is.
    """
    tx.run(_cancel_open, pk=pk, run=run_number, key=step_key)


@statement
def _select_open_maps(s: Store) -> Any:
    st = s.tables.step.c
    return sa.select(st.step_key).where(
        st.instance_pk == param("pk", sa.BigInteger),
        st.run_number == param("run", sa.Integer),
        st.type == sa.literal_column(f"'{StepType.MAP.value}'"),
        st.status == sa.literal_column(f"'{StepStatus.WAITING.value}'"),
    )


def cancel_open_of_run(tx: Tx, pk: int, run_number: int) -> None:
    """Cancel the open items of all maps of a run that ends in this transaction."""
    for row in tx.run(_select_open_maps, pk=pk, run=run_number):
        cancel_open(tx, pk, run_number, row.step_key)
