"""The run that an instance is asked for while it exists: its parameters and its start.

A run that no pass has begun takes them itself. One that has begun keeps them in the instance's row, whose lock orders
the request and the end of the run (LAW 2): the end starts the next run in its own transaction.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta

import sqlalchemy as sa

from celery_durable.model import Claim, DueRun, InstanceRow, RunPlan, Status, duration_us, from_us, to_us
from celery_durable.store.engine import Tx
from celery_durable.store.instances import instances, lifecycle
from celery_durable.store.runs.runs import RunStart

_KEPT_REQUESTS = 100
"""So many requests are remembered per run."""


@dataclass(frozen=True, slots=True)
class NextRun:
    """A run to start. ``asked_us``: when it was asked for first. ``run_us``: its start; None: as soon as possible."""

    params: str
    commit_id: str
    asked_us: int
    run_us: int | None

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    def start(self, tx: Tx, claim: Claim, plan: RunPlan, *, now: datetime, grace: timedelta) -> DueRun | None:
        """Start it after the run of the claim, which has ended. Returns it if it is due now."""
        due_us = None if self.run_us is None or self.run_us <= to_us(now) else self.run_us
        start = RunStart(self.params, self.commit_id, plan)
        due = lifecycle.start_run(tx, claim.pk, claim.ref, claim.queue, start, grace=grace, due_us=due_us)
        return due if due_us is None else None


def request(
    tx: Tx, row: InstanceRow, new: NextRun, *, postpones: bool, at_latest: timedelta | None, grace: timedelta
) -> DueRun | None:
    """Have a locked instance that has not ended run with new parameters: its current run if that has not begun.

    ``postpones``: that run also takes the later start. Returns it if it became due for the caller to publish it.
    """
    r = tx.t.run.c
    # Locking reads: in a caller's REPEATABLE READ another one may not see what this transaction has waited for.
    query = sa.select(r.created_at, r.forked_from_run_number).where(*_find_run(tx, row)).with_for_update(key_share=True)
    run = tx.execute(query).one()
    if lifecycle.has_started(row) or run.forked_from_run_number is not None:  # the copied steps fit its parameters
        _follow(tx, row, new, at_latest)
        return None
    tx.execute(sa.update(tx.t.run).where(*_find_run(tx, row)).values(params=new.params))
    assert row.run_at is not None
    start = row.run_at
    if postpones and new.run_us is not None:
        start = max(start, from_us(new.run_us))
        start = start if at_latest is None else min(start, from_us(run.created_at) + at_latest)
    return _move_start(tx, row, start, grace=grace)


def find_request(tx: Tx, row: InstanceRow, commit_id: str) -> int | None:
    """Return the number of the run that this request started, or that was the current one when it came; or None."""
    r = tx.t.run.c
    is_this = (r.commit_id == commit_id) | r.request_ids.contains(json.dumps(commit_id), autoescape=True)
    return tx.execute(sa.select(r.run_number).where(r.instance_pk == row.pk, is_this)).scalar()


def note_request(tx: Tx, row: InstanceRow, commit_id: str) -> None:
    """Remember a request that started no run, so that it has no effect when it comes again."""
    r = tx.t.run.c
    text = tx.execute(sa.select(r.request_ids).where(*_find_run(tx, row)).with_for_update(key_share=True)).scalar_one()
    request_ids = [*([] if text is None else json.loads(text)), commit_id][-_KEPT_REQUESTS:]
    tx.execute(sa.update(tx.t.run).where(*_find_run(tx, row)).values(request_ids=json.dumps(request_ids)))


def _find_run(tx: Tx, row: InstanceRow) -> list[sa.ColumnElement[bool]]:
    r = tx.t.run.c
    return [r.instance_pk == row.pk, r.run_number == row.run_number]


def _follow(tx: Tx, row: InstanceRow, new: NextRun, at_latest: timedelta | None) -> None:
    """Keep the run until the current one ends. It replaces one that was asked for before, and takes the later start."""
    asked = read(tx, row.pk)
    if asked is not None:
        new = replace(new, asked_us=asked.asked_us, run_us=max(asked.run_us or 0, new.run_us or 0) or None)
    if at_latest is not None and new.run_us is not None:
        new = replace(new, run_us=min(new.run_us, new.asked_us + duration_us(at_latest)))
    lifecycle.update(tx, row.pk, next_run=new.to_text())


def _move_start(tx: Tx, row: InstanceRow, start: datetime, *, grace: timedelta) -> DueRun | None:
    assert row.run_at is not None
    now = instances.read_clock(tx)
    if row.status is Status.PAUSED:
        lifecycle.update(tx, row.pk, run_at=to_us(start))
    elif start > now:
        lifecycle.update(tx, row.pk, **lifecycle.due_at(to_us(start)))
    elif row.run_at > now:
        lifecycle.update(tx, row.pk, **lifecycle.due_now(tx.store.clock(), grace))
        return DueRun(row.ref, row.queue)
    else:  # it was due before, and its message is under way
        lifecycle.update(tx, row.pk)
    return None


def read(tx: Tx, pk: int) -> NextRun | None:
    """Return the run that follows the current one of a locked instance."""
    i = tx.t.instance.c
    text = tx.execute(sa.select(i.next_run).where(i.id == pk).with_for_update(key_share=True)).scalar()
    return None if text is None else NextRun(**json.loads(text))


def take(tx: Tx, pk: int) -> NextRun | None:
    """Return the run that follows the current one of a locked instance, and remove it from the row."""
    asked = read(tx, pk)
    if asked is not None:
        lifecycle.update(tx, pk, next_run=None)
    return asked
