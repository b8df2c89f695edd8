"""Answers to steps: an answer is stored as an event that only one step waits for.

A child's answer is written in the transaction that ends the child. The parent existed before the child, so its row
has the lower key and is locked first. All row locks are taken in ascending key order.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import sqlalchemy as sa

from celery_durable.errors import InstanceNotFound
from celery_durable.model import DueRun, InstanceRow, Parent, StepStatus, StepType, WakeReason
from celery_durable.store import instances, lifecycle, run_events
from celery_durable.store.engine import Store, Tx
from celery_durable.store.statements import param, statement


@statement
def _waiting_parent(s: Store) -> Any:
    i, st = s.tables.instance.c, s.tables.step.c
    return (
        sa.select(i.workflow, i.instance_id, st.wait_event_type)
        .join_from(s.tables.instance, s.tables.step, sa.and_(st.instance_pk == i.id, st.run_number == i.run_number))
        .where(
            i.id == param("pk"),
            i.run_number == param("run"),
            st.step_key == param("key"),
            st.type == sa.literal_column(f"'{StepType.CHILD.value}'"),
            st.status == sa.literal_column(f"'{StepStatus.WAITING.value}'"),
        )
    )


def find_waiting_parent(tx: Tx, parent: Parent | None) -> list[tuple[int, str, str]]:
    """Return key, workflow and id of the instance whose step waits for this child's end; an empty list if none does.

    A step starts to wait in the commit that creates the child. Once it has ended, it never waits again.
    """
    row = None if parent is None else _find_waiting_step(tx, parent)
    return [] if parent is None or row is None else [(parent.pk, row.workflow, row.instance_id)]


def _find_waiting_step(tx: Tx, parent: Parent) -> Any:
    return tx.run(_waiting_parent, pk=parent.pk, run=parent.run_number, key=parent.step_key).first()


@dataclass(frozen=True, slots=True)
class WaitingStep:
    """A step that waits for an answer: its locked instance, and the event type of the answer."""

    row: InstanceRow
    event_type: str


def lock_parent(tx: Tx, parent: Parent | None) -> WaitingStep | None:
    """Lock the instance whose step waits for this child's end. Call this before the child is locked.

    Returns None if no step waits.
    """
    for _, workflow, instance_id in find_waiting_parent(tx, parent):
        assert parent is not None
        try:
            row = instances.lock(tx, workflow, instance_id)
        except InstanceNotFound:  # it ended and was deleted after the read
            return None
        # Read again under the lock: the step may have ended after the first read.
        step = _find_waiting_step(tx, parent)
        return None if step is None else WaitingStep(row, step.wait_event_type)
    return None


@statement
def _select_unanswered_step(s: Store) -> Any:
    st, e = s.tables.step.c, s.tables.event.c
    has_answer = sa.exists().where(
        e.instance_pk == st.instance_pk, e.run_number == st.run_number, e.type == st.wait_event_type
    )
    return sa.select(st.step_key).where(
        st.instance_pk == param("pk"),
        st.run_number == param("run"),
        st.status == sa.literal_column(f"'{StepStatus.WAITING.value}'"),
        st.wait_event_type == param("type"),
        ~has_answer,
    )


def store_answer(
    tx: Tx, waiting_step: WaitingStep, *, payload: str, event_id: str, grace: timedelta
) -> list[DueRun] | None:
    """Store an answer for a waiting step. Returns the runs that became due.

    Returns None if the step does not wait for this answer any more, or has one already. If the caller fails to publish
    the runs, a sweep publishes them after ``grace``.
    """
    row = waiting_step.row
    is_unanswered = (
        tx.run(_select_unanswered_step, pk=row.pk, run=row.run_number, type=waiting_step.event_type).first() is not None
    )
    if row.status.is_terminal or not is_unanswered:
        return None
    run_events.insert_event(tx, row, type_=waiting_step.event_type, payload=payload, event_id=event_id)
    # If a worker holds the claim, it finds the event itself. Only a suspended run must be made due.
    is_suspended = run_events.is_awaited(tx, row, waiting_step.event_type)
    return [lifecycle.make_due(tx, row, wake_reason=WakeReason.EVENT, grace=grace)] if is_suspended else []


def answer_parent(tx: Tx, parent: Parent | None, *, payload: str, event_id: str, grace: timedelta) -> list[DueRun]:
    """Answer the step of a child's parent, in the transaction that ends the child. Returns the runs that became due.

    The caller has called `lock_parent` before it locked the child. So locking the parent again does not block.
    """
    waiting_step = lock_parent(tx, parent)
    return (
        []
        if waiting_step is None
        else store_answer(tx, waiting_step, payload=payload, event_id=event_id, grace=grace) or []
    )
