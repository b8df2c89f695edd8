"""The log lines of a run, as its pass writes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from celery_durable.model import Claim, LogLine, to_us
from celery_durable.store.claims import GuardResult
from celery_durable.store.engine import Store, Tx, param, statement


@statement
def _insert_log(s: Store) -> Any:
    return (
        sa.insert(s.tables.log)
        .values(
            instance_pk=param("pk"),
            run_number=param("run"),
            step_key=param("key"),
            attempt=param("attempt"),
            level=param("level"),
            category=param("category"),
            message=param("message"),
            data=param("data"),
            is_replay=param("is_replay", sa.Boolean),
            created_at=param("now_us"),
        )
        .inline()
    )


@statement
def _count_logs(s: Store) -> Any:
    r = s.tables.run
    return (
        sa.update(r)
        .where(r.c.instance_pk == param("pk"), r.c.run_number == param("run"))
        .values(
            log_count=r.c.log_count + param("kept", sa.Integer),
            dropped_log_count=r.c.dropped_log_count + param("dropped", sa.Integer),
        )
    )


def write_logs(tx: Tx, claim: Claim, guard_result: GuardResult, lines: Sequence[LogLine], *, remaining: int) -> None:
    """Append log lines in order.

    ``remaining`` is how many lines the run may still store. Further lines are dropped and only counted.
    """
    if not lines:
        return
    kept = lines[: max(remaining, 0)]
    scope = {"pk": claim.pk, "run": claim.ref.run_number}
    tx.run_many(
        _insert_log,
        [
            scope
            | {
                "key": line.step_key,
                "attempt": line.attempt,
                "level": line.level.value,
                "category": line.category,
                "message": line.message,
                "data": line.data,
                "is_replay": line.is_replay,
                "now_us": to_us(guard_result.now),
            }
            for line in kept
        ],
    )
    tx.run(_count_logs, **scope, kept=len(kept), dropped=len(lines) - len(kept))
