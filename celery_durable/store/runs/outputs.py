"""What a run writes for its readers while it runs: log lines, and the values that it publishes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from celery_durable.model import Claim, LogLine, Published, from_us, to_us
from celery_durable.store.engine import Store, Tx
from celery_durable.store.engine.statements import param, statement
from celery_durable.store.runs.claims import GuardResult
from celery_durable.store.schema import dialects


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
    """Append log lines in order. The run may store ``remaining`` more; further ones are dropped and only counted."""
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


# --- in the statement of a step -----------------------------------------------------------------

MAX_WITH_STEP = 8
"""How many lines the statement of a step can append. Each number of lines is a statement of its own."""
_TYPES: dict[str, Any] = {
    "step_key": sa.String,
    "attempt": sa.Integer,
    "level": sa.String,
    "category": sa.String,
    "message": sa.Text,
    "data": sa.Text,
    "is_replay": sa.Boolean,
}


def insert_with(s: Store, held: sa.CTE, source: Any, count: int) -> list[sa.CTE]:
    """Build what a guarded statement (``held``) needs to append ``count`` log lines, if ``source`` has a row."""
    if not count:
        return []
    log, run = s.tables.log, s.tables.run
    selects = [
        sa.select(
            sa.literal_column(str(number)).label("position"),
            held.c.id,
            held.c.run_number,
            held.c.now_us,
            *(sa.cast(param(f"{name}_{number}", type_), type_).label(name) for name, type_ in _TYPES.items()),
        ).select_from(source)
        for number in range(count)
    ]
    lines = sa.union_all(*selects).subquery("lines")
    values = [lines.c.id, lines.c.run_number, lines.c.now_us, *(lines.c[name] for name in _TYPES)]
    columns = ["instance_pk", "run_number", "created_at", *_TYPES]
    inserted = sa.insert(log).from_select(columns, sa.select(*values).order_by(lines.c.position)).cte("logged")
    counted = (
        sa.update(run)
        .where(run.c.instance_pk == held.c.id, run.c.run_number == held.c.run_number)
        .values(log_count=run.c.log_count + count)
    )
    if source is not held:
        counted = counted.where(sa.exists(sa.select(sa.literal_column("1")).select_from(source)))
    return [inserted, counted.cte("counted")]


def encode_lines(lines: Sequence[LogLine]) -> dict[str, Any]:
    """Return the parameters of `insert_with`."""
    parameters: dict[str, Any] = {}
    for number, line in enumerate(lines):
        parameters |= {f"{name}_{number}": getattr(line, name) for name in _TYPES}
        parameters[f"level_{number}"] = line.level.value
    return parameters


# Values that runs publish while they run: one row per key, overwritten under the claim.
#
# A write follows a `claims.guard` or `claims.guard_without_renewal` in the same transaction. Reads need no lock.


@statement
def _write_published(s: Store) -> Any:
    values = {
        "instance_pk": param("pk", sa.BigInteger),
        "run_number": param("run", sa.Integer),
        "key": param("key", sa.String),
        "value": param("value", sa.Text),
        "updated_at": s.clock(),
    }
    return dialects.insert_or_update(s.database, s.tables.published, values, ("instance_pk", "run_number", "key"))


def write_published(tx: Tx, claim: Claim, values: Mapping[str, str]) -> None:
    """Set these keys of the run to these JSON texts."""
    scope = {"pk": claim.pk, "run": claim.ref.run_number}
    tx.run_many(_write_published, [scope | {"key": key, "value": values[key]} for key in sorted(values)])


def read_published(tx: Tx, pk: int, run_number: int) -> dict[str, Published]:
    """Return what a run has published, by key."""
    p = tx.t.published.c
    query = sa.select(p.key, p.value, p.updated_at).where(p.instance_pk == pk, p.run_number == run_number)
    return {
        row.key: Published(json.loads(row.value), updated_at=from_us(row.updated_at))
        for row in tx.execute(query.order_by(p.key))
    }
