"""The suspension of a run that only sleeps: one statement, if the database can combine writes (PostgreSQL).

A sleep ends at its time alone, so nothing but the locked row decides (LAW 2b). A wait for an event has to be suspended
by `releases.suspend`: whether an event is there must be read after the lock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError

from celery_durable.errors import Superseded
from celery_durable.model import Claim, ReleaseOutcome, StepRow, StepWrite, WakeReason, decide_release, from_us, to_us
from celery_durable.store.claims import RELEASED, RESUMING
from celery_durable.store.engine import Store, Tx
from celery_durable.store.statements import param, statement_for
from celery_durable.store.step_columns import STEP_COLUMNS
from celery_durable.store.step_format import STEPS
from celery_durable.store.step_rows import hold_without_change, insert_values


@dataclass(frozen=True, slots=True)
class Suspended:
    """The row of the sleep as written, and how the instance was left: waiting or paused."""

    row: StepRow
    released: ReleaseOutcome


@statement_for
def _suspend_and_insert(s: Store, fields: Sequence[str]) -> Any:
    i, r, held = s.tables.instance, s.tables.run, hold_without_change(s)
    values = insert_values(STEP_COLUMNS, fields, held.c.id, held.c.run_number, held.c.now_us)
    written = sa.insert(s.tables.step).from_select(list(values), sa.select(*values.values()).select_from(held))
    until, is_paused = values["wake_at"], held.c.pause_requested
    paused, waiting = (sa.literal(each.status.value) for each in (ReleaseOutcome.PAUSED, ReleaseOutcome.WAITING))
    released = (
        sa.update(i)
        .where(i.c.id == held.c.id)
        .values(
            **RELEASED,
            status=sa.case((is_paused, paused), else_=waiting),
            run_at=until,
            next_check_at=sa.case((is_paused, sa.null()), else_=until),
            sent_at=None,
            wake_reason=WakeReason.TIMER.value,
            priority=RESUMING,
            dispatch_count=0,
            crash_count=0,
            pause_requested=sa.false(),
            version=i.c.version + 1,
            updated_at=held.c.now_us,
        )
    )
    started = (
        sa.update(r)
        .where(r.c.instance_pk == held.c.id, r.c.run_number == held.c.run_number, r.c.started_at.is_(None))
        .values(started_at=param("started_us", sa.BigInteger))
    )
    changes = written.cte("written"), released.cte("released"), started.cte("started")
    return sa.select(is_paused, held.c.now_us).add_cte(*changes)


def suspend_for_sleep(tx: Tx, claim: Claim, write: StepWrite) -> Suspended:
    """Write the row of a new sleep, and release the instance until its end; raises Superseded.

    A requested pause takes effect. If the end has passed meanwhile, the run is due, and the next sweep publishes it.
    """
    assert write.replaces is None
    parameters = STEPS.encode_write(write)
    fields = tuple(parameters)
    key = {"pk": claim.pk, "token": claim.token, "started_us": to_us(claim.claimed_at)}
    try:
        found = tx.run(_suspend_and_insert(fields), **key, **parameters)
    except IntegrityError as error:  # another worker has inserted the row
        raise Superseded(str(error.orig)) from error
    if not found:
        raise Superseded(str(claim.ref))
    [(pause_requested, now_us)] = found
    released = decide_release(is_due=False, pause_requested=pause_requested)
    return Suspended(STEPS.to_written_row(write, fields, from_us(now_us)), released)
