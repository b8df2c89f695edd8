"""The children of a run: they end with a run that is ended before its end, and a retry may keep them.

The transaction that ends the run writes into the outbox which children it has, as an outbound event to the engine. So
they end also if this process dies, if the broker is down, or if the parent is deleted meanwhile. The event may come
late or twice: a child that was started again after the end of its parent is left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import sqlalchemy as sa

from celery_durable import values
from celery_durable.errors import InstanceNotFound
from celery_durable.model import (
    TERMINAL,
    Child,
    InstanceRow,
    ItemStatus,
    OutboxMessage,
    RunRef,
    Scope,
    Status,
    StepRow,
    StepType,
    is_cut,
    is_independent_child,
    parse_child_event_type,
    parse_children_event_type,
)
from celery_durable.store.engine import Store, Tx, bounds
from celery_durable.store.engine.statements import constant, param, statement
from celery_durable.store.instances import instances
from celery_durable.store.runs import items, outbox
from celery_durable.store.runs.runs import StepChild

END_CHILDREN = "celery_durable.end_children"
"""The name of the outbound event. Its payload is that of `ChildrenToEnd`."""
_BATCH = 100
_PAST = {"terminate": "terminated", "cancel": "cancelled"}


@dataclass(frozen=True, slots=True)
class ChildrenToEnd:
    """Some children of a run. ``action``: the operation that ended their parent, at ``ended_at_us``."""

    action: str
    reason: str
    parent_pk: int
    ended_at_us: int
    children: Sequence[tuple[str, str]]
    """Workflow and instance id of each."""


@statement
def _select_steps(s: Store) -> Any:
    st = s.tables.step.c
    return (
        sa.select(st.step_key, st.wait_event_type, s.clock().label("now_us"))
        .where(
            st.instance_pk == param("pk"),
            st.run_number == param("run"),
            st.type.in_([constant(type_) for type_ in (StepType.CHILD, StepType.MAP)]),
        )
        .order_by(st.seq)
    )


def end_children(
    tx: Tx, pk: int, run: RunRef, action: str, *, reason: str | None, new_id: Callable[[], str], grace: timedelta
) -> list[OutboxMessage]:
    """Write messages that end the children of a run, in the transaction that ends or cancels this run.

    They name the child of each step and item, whatever became of it: a child continues after a timeout and after a lost
    race. No further child can come: the run has lost its worker, and its maps their open items. The caller sends them.
    """
    children, now_us = [], 0
    for step in tx.run(_select_steps, pk=pk, run=run.run_number):
        child, now_us = _find_child(tx, pk, step), step.now_us
        if child is not None and not is_independent_child(step.wait_event_type):
            children.append(child)
        if (workflow := parse_children_event_type(step.wait_event_type)) is not None:
            children += [(workflow, id_) for id_ in items.find_open_ids(tx, pk, run.run_number, step.step_key)]
    why = f"its parent {run.workflow}/{run.instance_id} was {_PAST[action]}" + ("" if reason is None else f": {reason}")
    messages = []
    for start in range(0, len(children), _BATCH):
        part = ChildrenToEnd(action, why, pk, now_us, children[start : start + _BATCH])
        limits = values.ALREADY_CHECKED_LIMITS
        messages.append(values.build_event_message(END_CHILDREN, asdict(part), id_=new_id(), limits=limits))
    if messages:
        outbox.insert(tx, messages, pk=pk, run_number=run.run_number, step_key=None, grace=grace)
    return messages


def _find_child(tx: Tx, pk: int, step: Any) -> tuple[str, str] | None:
    """Return the workflow and the instance id of the child that a step waits for, or None for any other step."""
    child = parse_child_event_type(step.wait_event_type)
    if child is None or not is_cut(step.wait_event_type):
        return child
    i = tx.t.instance.c
    of_step = (i.parent_pk == pk, i.parent_step_key == step.step_key)
    query = sa.select(i.workflow, i.instance_id).where(i.workflow == child[0], i.instance_id >= child[1], *of_step)
    found = tx.execute(query.order_by(i.id.desc()).limit(1)).first()
    return None if found is None else (found.workflow, found.instance_id)


def find_open(tx: Tx, ended: ChildrenToEnd) -> list[tuple[str, str]]:
    """Return the workflow and the instance id of those children that have not ended yet."""
    i, r = tx.t.instance.c, tx.t.run.c
    named = sa.tuple_(i.workflow, i.instance_id).in_([tuple(each) for each in ended.children])
    query = (
        sa.select(i.workflow, i.instance_id)
        .join_from(tx.t.instance, tx.t.run, sa.and_(r.instance_pk == i.id, r.run_number == i.run_number))
        .where(named, i.parent_pk == ended.parent_pk, i.status.not_in([status.value for status in TERMINAL]))
        .where(r.created_at <= ended.ended_at_us)
        .order_by(i.id)
    )
    return [(row.workflow, row.instance_id) for row in tx.execute(query)]


def read_children(tx: Tx, parent: InstanceRow, steps: Sequence[StepRow]) -> Iterator[StepChild]:
    """Yield the children of these steps that still exist, of a map those that failed it, in the order of their keys."""
    i = tx.t.instance.c
    named = [*_name_children(tx, parent, steps)]
    for start in range(0, len(named), _BATCH):
        by_name = {name: (step, position) for name, step, position in named[start : start + _BATCH]}
        query = (
            sa.select(i.workflow, i.instance_id)
            .where(sa.tuple_(i.workflow, i.instance_id).in_(list(by_name)), i.parent_pk == parent.pk)
            .order_by(i.id)
        )
        for row in tx.execute(query).all():
            step, position = by_name[row.workflow, row.instance_id]
            yield StepChild(step, instances.read(tx, row.workflow, row.instance_id), position)


def find_failed_children(
    tx: Tx, parent: InstanceRow, steps: Sequence[StepRow], *, scope: Scope | None
) -> list[tuple[Child, Status]]:
    """Return the first two of these children that a retry of the family keeps, with their statuses."""
    i, names = tx.t.instance.c, [name for name, *_ in _name_children(tx, parent, steps, limit=_BATCH)]
    is_kept = (i.parent_pk == parent.pk, i.status != Status.TERMINATED.value, *bounds.scope_conditions(tx.t, scope))
    query = sa.select(i.workflow, i.instance_id, i.status).where(sa.tuple_(i.workflow, i.instance_id).in_(names))
    rows = tx.execute(query.where(*is_kept).order_by(i.id).limit(2)) if names else ()
    return [(Child(row.workflow, row.instance_id), Status(row.status)) for row in rows]


def _name_children(
    tx: Tx, parent: InstanceRow, steps: Sequence[StepRow], *, limit: int | None = None
) -> Iterator[tuple[tuple[str, str], StepRow, int | None]]:
    """Yield the names of the children of failed steps with their steps, and their positions in a map."""
    for step in steps:
        if (child := _find_child(tx, parent.pk, step)) is not None:
            yield child, step, None
        elif (workflow := parse_children_event_type(step.wait_event_type)) is not None:
            found = items.find_ids(tx, parent.pk, parent.run_number, step.step_key, ItemStatus.DEAD, limit=limit)
            for id_, position in found.items():
                yield (workflow, id_), step, position


def lock_children(tx: Tx, parent: InstanceRow, steps: Sequence[StepRow]) -> Iterator[StepChild]:
    """Yield the same children, locked. ``parent`` is locked."""
    for each in read_children(tx, parent, steps):
        with suppress(InstanceNotFound):  # deleted after it was found
            yield each._replace(instance=instances.lock(tx, each.instance.workflow, each.instance.instance_id))
