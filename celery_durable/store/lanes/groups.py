"""Groups of step rows: the finished steps of several runs, written in one statement or transaction.

Each is a new row without another change (``changes_instance=False``). A group never waits for a lock, so a locked row
delays no other run. A step that it could not write is left to its own run, whose statement decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql

from celery_durable.model import Claim, StepWrite, from_us
from celery_durable.store.engine import Store, Tx
from celery_durable.store.engine.statements import param, statement, statement_for
from celery_durable.store.lanes.steps import WrittenStep
from celery_durable.store.runs.step_rows import insert_new, insert_values
from celery_durable.store.schema import dialects
from celery_durable.store.schema.dialects import MARIADB, POSTGRESQL
from celery_durable.store.schema.step_format import STEP_COLUMNS, STEPS

_KEYS: dict[str, Any] = {"position": sa.Integer(), "pk": sa.BigInteger(), "token": sa.String()}


@dataclass(slots=True, eq=False)
class GroupedStep:
    """A finished step to add under a claim. ``parameters``: those of `StepFormat.encode_write`."""

    claim: Claim
    write: StepWrite
    parameters: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.parameters = STEPS.encode_write(self.write)

    @property
    def fields(self) -> tuple[str, ...]:
        """The names of the parameters. All steps of a group have the same."""
        return tuple(self.parameters)


def _build_locked(s: Store, given: Any) -> Any:
    """Build the SELECT that locks the instances of the given rows whose token still holds, and skips locked ones.

    PostgreSQL expects a hundred given rows, and would scan a table that it has not analyzed yet. So it gets one search
    for each row: it cannot turn a subquery with an OFFSET into a join.
    """
    i = s.tables.instance
    is_held = sa.and_(i.c.id == given.c.pk, i.c.claim_token == given.c.token)
    columns = [i.c.id, i.c.run_number, i.c.pause_requested]
    lock: dict[str, Any] = {"key_share": True, "skip_locked": True, "of": i}
    if s.database is POSTGRESQL:
        offset: Any = sa.literal_column("0")
        its = sa.select(*columns).where(is_held).correlate(given).offset(offset).with_for_update(**lock).lateral("its")
        return sa.select(given.c.position, *its.c).select_from(given.join(its, sa.true()))
    # MariaDB reads an outer join in this order. Otherwise it might read, and lock, the whole table first.
    joined = given.outerjoin(i, is_held) if s.database is MARIADB else given.join(i, is_held)
    return sa.select(given.c.position, *columns).select_from(joined).with_for_update(**lock)


@statement_for
def _lock_and_insert_all(s: Store, fields: Sequence[str]) -> Any:
    """Build the statement that does both. It returns the steps that it has inserted."""
    types: dict[str, Any] = dict(_KEYS)

    def note_type(name: str, type_: Any) -> Any:
        types[name] = type_() if isinstance(type_, type) else type_
        return sa.literal_column("0")

    insert_values(STEP_COLUMNS, fields, 0, 0, 0, get_value=note_type)
    given = dialects.build_rows(s.database, param("rows", sa.Text), types)
    locked = _build_locked(s, given).add_columns(*(given.c[name] for name in fields if name in types)).cte("locked")
    # Not in the SELECT that locks: it computes its columns before it has the lock (LAW 4).
    held = sa.select(locked, s.clock().label("now_us")).cte("held")
    values = insert_values(
        STEP_COLUMNS, fields, held.c.id, held.c.run_number, held.c.now_us, get_value=lambda name, _: held.c[name]
    )
    written = (
        postgresql.insert(s.tables.step)
        .from_select(list(values), sa.select(*values.values()))
        .on_conflict_do_nothing()
        .returning(s.tables.step.c.instance_pk)
        .cte("written")
    )
    both = held.join(written, written.c.instance_pk == held.c.id)
    return sa.select(held.c.position, held.c.pause_requested, held.c.now_us).select_from(both)


@statement
def _lock_all(s: Store) -> Any:
    given = dialects.build_rows(s.database, param("rows", sa.Text), _KEYS)
    return _build_locked(s, given).add_columns(s.clock().label("now_us"))


def write_group(tx: Tx, group: Sequence[GroupedStep]) -> list[WrittenStep | None]:
    """Write the steps of a group; None for each that has to be written alone. All have the same `GroupedStep.fields`.

    Such a step belongs to an instance that is locked or no longer claimed, or its row exists. On a store that does not
    combine writes, a row that exists raises `sqlalchemy.exc.IntegrityError` instead, and nothing is written.
    """
    fields = group[0].fields
    keys = [{"position": n, "pk": each.claim.pk, "token": each.claim.token} for n, each in enumerate(group)]
    rows = [key | each.parameters for key, each in zip(keys, group, strict=True)]
    found: list[Any] | None = tx.run_combined(_lock_and_insert_all(fields), rows=dialects.encode_rows(rows))
    if found is None:
        found = [row for row in tx.run(_lock_all, rows=dialects.encode_rows(keys)) if row.id is not None]
        insert_new(
            tx, fields, [(group[row.position].claim, row.now_us, group[row.position].parameters) for row in found]
        )
    written: list[WrittenStep | None] = [None] * len(group)
    for row in found:
        step_row = STEPS.to_written_row(group[row.position].write, fields, from_us(row.now_us))
        written[row.position] = WrittenStep(step_row, bool(row.pause_requested))
    return written
