"""Lists of instances by keyset cursor, each with the step that it is at. Takes no locks."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa

from celery_durable.model import (
    OPEN_STEPS,
    Count,
    InstanceStatus,
    InstanceSummary,
    Scope,
    Status,
    StepRecord,
    StepStatus,
    from_us,
    from_us_or_none,
)
from celery_durable.store.engine import Tx, bounds
from celery_durable.store.engine.bounds import Range
from celery_durable.store.instances import instances
from celery_durable.store.instances.instances import to_running_step
from celery_durable.store.runs.history import get_failed_step, to_error_info, to_step_record, with_items
from celery_durable.store.schema.step_format import STEPS
from celery_durable.store.schema.tables import Tables

_OPEN = sorted(status.value for status in OPEN_STEPS)
_MAX_EXAMINED_STEPS = 10_000
"""How many steps a page may read to find the current ones. Instances beyond it are listed without a step."""


@dataclass(frozen=True, slots=True)
class InstanceList:
    """A page, and where it continues, as in `FoundKeys`."""

    items: list[InstanceSummary]
    next_pk: int | None


def read_page(tx: Tx, chosen: InstanceFilter, *, before_pk: int | None, limit: int) -> InstanceList:
    """Return the newest instances of the filter with keys below ``before_pk``."""
    found = find_page(tx, chosen, before_pk=before_pk, limit=limit)
    return InstanceList(_summarize(tx, found.pks), found.next_pk)


def read_named(tx: Tx, workflows: Sequence[str], instance_id: str, scope: Scope | None) -> list[InstanceSummary]:
    """Return the instances of these workflows with this id, newest first."""
    return _summarize(tx, find_named(tx, workflows, instance_id, scope))


def _summarize(tx: Tx, pks: Sequence[int]) -> list[InstanceSummary]:
    i, r = tx.t.instance, tx.t.run
    query = sa.select(i, r.c.error_name, r.c.error_message, r.c.failed_steps).join(
        r, sa.and_(r.c.instance_pk == i.c.id, r.c.run_number == i.c.run_number)
    )
    rows = tx.execute(query.where(i.c.id.in_(pks)).order_by(i.c.id.desc())).all() if pks else []
    labels_of = instances.read_labels_of_many(tx, pks)
    steps = _read_current_steps(tx, [row.id for row in rows if not Status(row.status).is_terminal])
    return [
        InstanceSummary(
            id=row.instance_id,
            workflow=row.workflow,
            run_number=row.run_number,
            details=InstanceStatus(Status(row.status), to_error_info(row.error_name, row.error_message)),
            run_at=from_us_or_none(row.run_at),
            created_at=from_us(row.created_at),
            updated_at=from_us(row.updated_at),
            labels=labels_of.get(row.id, {}),
            current_step=steps.get(row.id),
            running=to_running_step(row),
            worker=row.claimed_by,
            failed_step=get_failed_step(row.failed_steps),
        )
        for row in rows
    ]


def find_current_step(tx: Tx, pk: int, run_number: int) -> StepRecord | None:
    """Return the open step that is due first, else the last that has ended, else a planned step; without its result."""
    st = tx.t.step
    is_open, is_planned = st.c.status.in_(_OPEN), st.c.status == StepStatus.LINEAR_PENDING.value
    rank = sa.case((is_open, 0), (is_planned, 2), else_=1)
    due = sa.case((rank == 0, sa.func.coalesce(st.c.next_retry_at, st.c.wake_at, 0)), else_=0)
    query = (
        sa.select(*STEPS.select(st, with_results=False))
        .where(st.c.instance_pk == pk, st.c.run_number == run_number)
        .order_by(rank, due, st.c.seq.desc())
        .limit(1)
    )
    row = tx.execute(query).first()
    return None if row is None else with_items(tx, pk, run_number, [to_step_record(row, pk, run_number)])[0]


def _read_current_steps(tx: Tx, pks: Sequence[int]) -> dict[int, StepRecord]:
    """Return the open step that is due first of each of these instances that has one, without its result."""
    if not pks:
        return {}
    found = tx.execute(build_current_steps_query(tx.t, pks))
    return {row.instance_pk: to_step_record(row[2:], row.instance_pk, row.run_number) for row in found}


def build_current_steps_query(t: Tables, pks: Sequence[int]) -> sa.Select[Any]:
    """Build the query of the current steps of a page. It examines a limited number of steps."""
    i, st = t.instance.c, t.step.c
    due = sa.func.coalesce(st.next_retry_at, st.wake_at, 0).label("due")
    examined = (
        sa.select(st.instance_pk, st.run_number, st.step_key, st.status, st.seq, due)
        .join_from(t.instance, t.step, sa.and_(st.instance_pk == i.id, st.run_number == i.run_number))
        .where(i.id.in_(pks))
        .limit(_MAX_EXAMINED_STEPS)
        .subquery()
    ).c
    first = sa.func.row_number().over(partition_by=examined.instance_pk, order_by=(examined.due, examined.seq.desc()))
    ranked = (
        sa.select(examined.instance_pk, examined.run_number, examined.step_key, first.label("position"))
        .where(examined.status.in_(_OPEN))
        .subquery()
    ).c
    is_it = (ranked.instance_pk == st.instance_pk, ranked.run_number == st.run_number, ranked.step_key == st.step_key)
    columns = STEPS.select(t.step, with_results=False)
    return sa.select(st.instance_pk, st.run_number, *columns).where(*is_it, ranked.position == 1)


# The search for the instances of a filter, newest first: one index drives each filter (`bounds`).


Label = tuple[str, str]


@dataclass(frozen=True, slots=True)
class InstanceFilter:
    """Which instances to list: those with all these labels, in the scope of the caller. None means any."""

    workflow: str | None = None
    status: Status | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    scope: Scope | None = None

    @property
    def all_labels(self) -> list[Label]:
        return sorted({*self.labels.items(), *(self.scope.labels.items() if self.scope is not None else ())})


@dataclass(frozen=True, slots=True)
class FoundKeys:
    """The keys of a page. It continues below ``next_pk``, unless None, even if it has fewer keys than its limit."""

    pks: list[int]
    next_pk: int | None


def find_page(tx: Tx, chosen: InstanceFilter, *, before_pk: int | None, limit: int) -> FoundKeys:
    """Return the keys of the newest instances of the filter, below ``before_pk``."""
    source = _choose_source(tx, chosen)
    # Without further conditions, each examined row is one of the page.
    examined = source.build(tx, before_pk, limit=limit + 1 if source.is_exact else bounds.MAX_EXAMINED)
    key = examined.c[source.key]
    query = (
        sa.select(key)
        .where(*(() if source.is_exact else source.conditions(examined.c)))
        .order_by(key.desc())
        .limit(limit + 1)
    )
    pks = list(tx.execute(query).scalars())
    has_more, page = len(pks) > limit, pks[:limit]
    return FoundKeys(page, page[-1] if has_more else _read_last(tx, source, before_pk))


def find_named(tx: Tx, workflows: Sequence[str], instance_id: str, scope: Scope | None) -> list[int]:
    """Return the keys of the instances of these workflows with this id: one search of the unique index for each."""
    i = tx.t.instance.c
    is_it = (i.workflow.in_(workflows), i.instance_id == instance_id)
    query = sa.select(i.id).where(*is_it, *bounds.prefix_conditions(tx.t, scope, of=i))
    for label in InstanceFilter(scope=scope).all_labels:
        query = query.where(bounds.has_label(tx.t, i.id, *label))
    return list(tx.execute(query.order_by(i.id.desc())).scalars())


def count_examined(tx: Tx, chosen: InstanceFilter, *by: str) -> dict[tuple[Any, ...], Count]:
    """Count the instances of the filter by these columns, among the newest ones of each range of its index.

    Without a workflow, the ranges of all workflows share the bound: MariaDB reads each range to its own end.
    """
    source = _choose_source(tx, chosen)
    limit = bounds.divide(source.ranges)
    examined = dataclasses.replace(source, is_exact=False).build(tx, None, limit=limit)
    matching = sa.func.count(sa.case((sa.and_(sa.true(), *source.conditions(examined.c)), 1)))
    columns = [examined.c[name] for name in by]
    query = sa.select(examined.c.part, matching.label("n"), sa.func.count().label("examined"), *columns)
    sizes, numbers = Counter[int](), Counter[tuple[Any, ...]]()
    for row in tx.execute(query.group_by(examined.c.part, *columns)):
        sizes[row.part] += row.examined
        numbers[tuple(row[3:])] += row.n
    is_exact = all(size < limit for size in sizes.values())
    return {key: Count(number, is_exact) for key, number in numbers.items()}


def count(tx: Tx, chosen: InstanceFilter) -> Count:
    """Count the instances of the filter, as `count_examined` does."""
    return count_examined(tx, chosen).get((), Count(0))


@dataclass(frozen=True, slots=True)
class _Source:
    """The index that drives a list: ranges of a table, whose column ``key`` has the keys of instances in order.

    ``conditions`` returns the filter for the columns of an instance, unless the index ``is_exact``.
    """

    table: sa.Table
    key: str
    ranges: Sequence[Mapping[str, object]]
    conditions: Callable[[Any], list[sa.ColumnElement[bool]]]
    is_exact: bool

    def build(self, tx: Tx, before_pk: int | None, *, limit: int) -> Any:
        """Build the subquery of the instances to examine, newest first; ``limit`` in each range."""
        i = tx.t.instance
        if self.table is i and not self.is_exact:
            return self.build_rows(before_pk, *_EXAMINED, limit=limit)
        examined = self.build_rows(before_pk, self.key, limit=limit)
        if self.is_exact:
            return examined
        return bounds.look_up(
            tx.store.database, examined, i, *(i.c[name] for name in _EXAMINED), is_it=i.c.id == examined.c[self.key]
        )

    def build_rows(self, before_pk: int | None, *columns: str, limit: int) -> Any:
        """Build the subquery of the rows of ``table`` to examine, newest first; ``limit`` in each range."""

        def is_before(c: Any) -> list[sa.ColumnElement[bool]]:
            return [] if before_pk is None else [c[self.key] < before_pk]

        ranges = [Range(each, self.key, is_reversed=True, where=is_before) for each in self.ranges]
        return bounds.build_union(self.table, ranges, *columns, limit=limit)


_EXAMINED = ("id", "instance_id", "workflow", "status")


def _choose_source(tx: Tx, chosen: InstanceFilter) -> _Source:
    i, named, scope = tx.t.instance, chosen.all_labels, chosen.scope
    rarest = _find_rarest(tx, named) if named else None
    is_named = {} if chosen.workflow is None else {"workflow": chosen.workflow}
    is_in_status = {} if chosen.status is None else {"status": chosen.status.value}
    equal = is_named | is_in_status

    def conditions(c: Any) -> list[sa.ColumnElement[bool]]:
        return [
            *(c[name] == value for name, value in equal.items()),
            *(bounds.has_label(tx.t, c.id, *each) for each in named if each != rarest),
            *bounds.prefix_conditions(tx.t, scope, of=c),
        ]

    has_prefix = scope is not None and bool(scope.id_prefix)
    if rarest is not None:
        has_its = dict(zip(("name", "value"), rarest, strict=True))
        return _Source(tx.t.label, "instance_pk", [has_its], conditions, not (len(named) > 1 or equal or has_prefix))
    if is_named or not is_in_status:
        return _Source(i, "id", [equal], conditions, not has_prefix)
    if has_prefix:
        return _Source(i, "id", [{}], conditions, is_exact=False)
    # One range for each workflow: an index by status alone would cost each change of a status.
    names = bounds.read_workflow_names(tx) or [""]
    return _Source(i, "id", [{"workflow": name, **is_in_status} for name in names], conditions, is_exact=True)


def _find_rarest(tx: Tx, named: Sequence[Label]) -> Label:
    """Return the label that the fewest instances have. Counts end at the bound."""
    if len(named) == 1:
        return named[0]
    counts = []
    for name, value in named:
        its = tx.t.label.c
        # In order: else PostgreSQL may read the table until it meets enough rows of a common label.
        few = sa.select(its.instance_pk).where(its.name == name, its.value == value).order_by(its.instance_pk)
        counts.append(
            sa.select(sa.func.count()).select_from(few.limit(bounds.MAX_EXAMINED).subquery()).scalar_subquery()
        )
    found = tx.execute(sa.select(*counts)).one()
    return min(zip(found, named, strict=True))[1]


def _read_last(tx: Tx, source: _Source, before_pk: int | None) -> int | None:
    """Return the key of the last examined instance, or None if there was nothing left to examine."""
    if source.is_exact:
        return None
    key = source.build_rows(before_pk, source.key, limit=bounds.MAX_EXAMINED).c[source.key]
    last = tx.execute(sa.select(sa.func.count().label("n"), sa.func.min(key).label("key"))).one()
    return last.key if last.n == bounds.MAX_EXAMINED else None
