"""Waits on topics: one narrow row per open wait, so that other steps pay for no index.

The step's row decides whether a wait is open. The next emission to its topic deletes a row that an ended run left.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from celery_durable.model import TERMINAL, Claim, Scope, StepStatus, Waiter, from_us, to_us
from celery_durable.store.engine import Store, Tx, bounds
from celery_durable.store.engine.statements import param, statement
from celery_durable.store.runs.claims import GuardResult
from celery_durable.store.schema.step_format import is_of_step


@statement
def _insert_wait(s: Store) -> Any:
    return (
        sa.insert(s.tables.topic_wait)
        .values(
            instance_pk=param("pk"),
            run_number=param("run"),
            step_key=param("key"),
            topic=param("topic"),
            opened_at=param("now_us"),
        )
        .inline()
    )


@statement
def _delete_wait(s: Store) -> Any:
    w = s.tables.topic_wait
    mine = (w.c.instance_pk == param("pk"), w.c.run_number == param("run"), w.c.step_key == param("key"))
    return sa.delete(w).where(*mine)


def open_wait(tx: Tx, claim: Claim, guard_result: GuardResult, *, key: str, topic: str) -> None:
    """Record that a step starts to wait; if a deploy changed the topic of a wait, its old row is replaced."""
    close_wait(tx, claim, key=key)
    tx.run(_insert_wait, pk=claim.pk, run=claim.ref.run_number, key=key, topic=topic, now_us=to_us(guard_result.now))


def close_wait(tx: Tx, claim: Claim, *, key: str) -> None:
    """Delete the wait of a step that has ended or waits for something else."""
    tx.run(_delete_wait, pk=claim.pk, run=claim.ref.run_number, key=key)


def close_all(tx: Tx, pk: int) -> None:
    """Delete all waits of an instance whose run has ended."""
    tx.execute(sa.delete(tx.t.topic_wait).where(tx.t.topic_wait.c.instance_pk == pk))


def close_many(tx: Tx, keys: Sequence[tuple[int, int, str]]) -> None:
    """Delete these waits, given by instance, run and step key."""
    tx.run_many(_delete_wait, [{"pk": pk, "run": run, "key": key} for pk, run, key in keys])


def read_page(
    tx: Tx, topic: str, *, after: tuple[int, str] | None = None, limit: int, scope: Scope | None = None
) -> list[tuple[tuple[int, str], Waiter]]:
    """Return open waits on a topic that come after (instance key, step key), in that order; each with these keys."""
    w, st, i = tx.t.topic_wait, tx.t.step, tx.t.instance
    query = (
        sa.select(w, st.c.name, st.c.wake_at, i.c.workflow, i.c.instance_id)
        .join(st, is_of_step(w, st))
        .join(i, sa.and_(i.c.id == w.c.instance_pk, i.c.run_number == w.c.run_number))
        .where(
            w.c.topic == topic,
            st.c.status == StepStatus.WAITING.value,
            st.c.wait_event_type.like(f"topic:%:{_escape_wildcards(topic)}", escape="!"),
            st.c.wake_at >= tx.store.statement_clock(),
            i.c.status.not_in([status.value for status in TERMINAL]),
            *bounds.scope_conditions(tx.t, scope),
        )
        .order_by(w.c.instance_pk, w.c.step_key)
        .limit(limit)
    )
    if after is not None:
        pk, key = after
        query = query.where(
            sa.or_(w.c.instance_pk > pk, sa.and_(w.c.instance_pk == pk, w.c.step_key > key)), w.c.instance_pk >= pk
        )
    return [((row.instance_pk, row.step_key), _to_waiter(row)) for row in tx.execute(query)]


def _escape_wildcards(topic: str) -> str:
    return topic.replace("_", "!_")  # the only wildcard of LIKE that a topic may have


def _to_waiter(row: Any) -> Waiter:
    return Waiter(
        workflow=row.workflow,
        instance_id=row.instance_id,
        run_number=row.run_number,
        step=row.name,
        topic=row.topic,
        opened_at=from_us(row.opened_at),
        deadline=from_us(row.wake_at),
    )
