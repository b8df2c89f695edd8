"""Reads for users: statuses, steps, events and logs of a run. Takes no locks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import sqlalchemy as sa

from celery_durable import values
from celery_durable.ancestry import RunFailure
from celery_durable.model import (
    OPEN_STEPS,
    PRIVATE_TYPE_PATTERN,
    SHOWN_AS_STORED,
    Child,
    ErrorInfo,
    EventRecord,
    HoldState,
    InstanceRow,
    InstanceStatus,
    ItemCounts,
    ItemFailure,
    ItemStatus,
    LogLevel,
    LogRecord,
    Origin,
    RunRow,
    Status,
    StepRecord,
    StepRow,
    StepStatus,
    StepType,
    from_us,
    from_us_or_none,
    get_public_event_type,
    parse_child_event_type,
    parse_children_event_type,
    parse_task_event_type,
    parse_topic_event_type,
    task_id,
)
from celery_durable.store.engine import Store, Tx
from celery_durable.store.engine.statements import param, statement
from celery_durable.store.runs import items
from celery_durable.store.schema.step_format import STEPS

_MAX_FAILURES = _MAX_CHILDREN = 10

_OPEN = sorted(status.value for status in OPEN_STEPS)


RUN_COLUMNS = (
    "run_number", "params", "output", "error_name", "error_message", "reason", "created_at", "started_at",
    "completed_at", "dropped_log_count", "forked_from_instance_id", "forked_from_run_number", "forked_from_step_key",
    "cancel_requested_at", "failed_steps",
)  # fmt: skip
"""The columns of workflow_run that `to_run_row` takes, and the failed steps."""


@statement
def _select_run(s: Store) -> Any:
    r = s.tables.run
    return sa.select(r).where(r.c.instance_pk == param("pk"), r.c.run_number == param("run"))


def read_run(tx: Tx, pk: int, run_number: int) -> RunRow | None:
    """Return one run of an instance, if it exists."""
    row = tx.run(_select_run, pk=pk, run=run_number).first()
    return None if row is None else to_run_row(row)


def to_run_row(row: Any) -> RunRow:
    """Convert the columns of workflow_run to the row of a run."""
    return RunRow(
        run_number=row.run_number,
        params=row.params,
        output=row.output,
        error_name=row.error_name,
        error_message=row.error_message,
        reason=row.reason,
        created_at=from_us(row.created_at),
        started_at=from_us_or_none(row.started_at),
        completed_at=from_us_or_none(row.completed_at),
        dropped_logs=row.dropped_log_count,
        origin=None
        if row.forked_from_instance_id is None
        else Origin(row.forked_from_instance_id, row.forked_from_run_number, row.forked_from_step_key),
        cancel_requested_at=from_us_or_none(row.cancel_requested_at),
    )


def build_status(status: Status, run_: RunRow) -> InstanceStatus:
    """Return a status; an instance that ended between the two reads must not show an output beside "active"."""
    return InstanceStatus(
        status=status,
        error=to_error_info(run_.error_name, run_.error_message) if status is Status.ERRORED else None,
        output=json.loads(run_.output) if status is Status.COMPLETE and run_.output is not None else None,
    )


def derive_run_status(instance: InstanceRow, run_: RunRow) -> Status:
    """Return the status of a run: the instance's status for the current run, the recorded outcome for an earlier one.

    A completed run has an output, if only ``null``. An earlier run without output or error was terminated or restarted.
    """
    if run_.run_number == instance.run_number:
        return instance.status
    if run_.error_name is not None:
        return Status.ERRORED
    return Status.COMPLETE if run_.output is not None else Status.TERMINATED


def read_steps(tx: Tx, pk: int, run_number: int) -> tuple[StepRecord, ...]:
    """Return a run's steps in call order."""
    return tuple(record for _, record in read_step_page(tx, pk, run_number))


@dataclass(frozen=True, slots=True)
class StepFilter:
    """Which steps to read: this one, or those with a text in their names, or that have an error."""

    key: str | None = None
    text: str = ""
    has_error: bool = False

    def conditions(self, st: sa.FromClause) -> list[sa.ColumnElement[bool]]:
        """Return the conditions on the table of the steps."""
        found: list[sa.ColumnElement[bool]] = [] if self.key is None else [st.c.step_key == self.key]
        found += [st.c.name.icontains(self.text, autoescape=True)] if self.text else []
        return found + ([st.c.error_name.is_not(None)] if self.has_error else [])


_ALL = StepFilter()


def read_step_page(
    tx: Tx,
    pk: int,
    run_number: int,
    *,
    after: tuple[int, str] | None = None,
    newest_first: bool = False,
    limit: int | None = None,
    where: StepFilter = _ALL,
    with_results: bool = True,
) -> list[tuple[int, StepRecord]]:
    """Return a run's steps in call order, or reversed, that come after (seq, step key); each with its seq."""
    st = tx.t.step
    query = sa.select(*STEPS.select(st, with_results=with_results)).limit(limit)
    query = query.where(st.c.instance_pk == pk, st.c.run_number == run_number, *where.conditions(st))
    if newest_first:
        query = query.order_by(st.c.seq.desc(), st.c.step_key.desc())
    else:
        query = query.order_by(st.c.seq, st.c.step_key)
    if after is not None:
        seq, key = after
        further = (st.c.seq < seq, st.c.step_key < key) if newest_first else (st.c.seq > seq, st.c.step_key > key)
        query = query.where(sa.or_(further[0], sa.and_(st.c.seq == seq, further[1])))
    rows = tx.execute(query).all()
    records = [to_step_record(row, pk, run_number) for row in rows]
    records = with_items(tx, pk, run_number, records, with_results=with_results, with_children=with_results)
    records = _with_limits(tx, pk, run_number, records)
    return [(row.seq, record) for row, record in zip(rows, records, strict=True)]


def _with_limits(tx: Tx, pk: int, run_number: int, records: list[StepRecord]) -> list[StepRecord]:
    """Add the names of the limits for which steps wait."""
    if not any(record.waits_for_limits for record in records):
        return records
    h, names = tx.t.hold.c, dict[str, list[str]]()
    is_its = [h.instance_pk == pk, h.run_number == run_number, h.state != HoldState.HELD.value, h.position <= 0]
    for row in tx.execute(sa.select(h.step_key, h.name).where(*is_its).order_by(h.name)):
        names.setdefault(row.step_key, []).append(row.name)
    return [
        replace(each, limits=tuple(names.get(each.step_key, ())) or None) if each.waits_for_limits else each
        for each in records
    ]


def with_items(
    tx: Tx,
    pk: int,
    run_number: int,
    records: Sequence[StepRecord],
    *,
    with_results: bool = False,
    with_children: bool = True,
) -> list[StepRecord]:
    """Add the item counts to the records of maps; if wanted, also the answers and first failures, and open children."""
    if not any(map(items.has_items, records)):
        return list(records)
    counts = _count_items(tx, pk, run_number)
    extended = []
    for record in records:
        result = record.result
        if not items.has_items(record):
            extended.append(record)
            continue
        if with_results and record.status is StepStatus.COMPLETED and result is None:
            found = items.read_answers(tx, pk, run_number, record.step_key)
            result = [json.loads(answer) for answer, _ in found]
        its = counts.get(record.step_key)
        if with_results and its is not None and its.failed:
            its = replace(its, failures=_read_failures(tx, pk, run_number, record))
        if with_children and its is not None and record.workflow is not None and record.is_waiting:
            ids = items.find_ids(tx, pk, run_number, record.step_key, ItemStatus.SENT, limit=_MAX_CHILDREN)
            its = replace(its, children=tuple(Child(record.workflow, id_) for id_ in ids))
        extended.append(replace(record, items=its, result=result))
    return extended


def _count_items(tx: Tx, pk: int, run_number: int) -> dict[str, ItemCounts]:
    """Return the progress of each map of a run, by step key."""
    item = tx.t.item.c
    query = (
        sa.select(
            item.step_key,
            sa.func.count().label("total"),
            sa.func.count(sa.case((item.status == ItemStatus.DONE.value, 1))).label("done"),
            sa.func.count(sa.case((item.status == ItemStatus.DEAD.value, 1))).label("failed"),
        )
        .where(item.instance_pk == pk, item.run_number == run_number)
        .group_by(item.step_key)
    )
    return {row.step_key: ItemCounts(row.total, row.done, row.failed) for row in tx.execute(query)}


def _read_failures(tx: Tx, pk: int, run_number: int, record: StepRecord) -> tuple[ItemFailure, ...]:
    key, i = record.step_key, tx.t.instance.c
    errors = items.read_errors(tx, pk, run_number, key, limit=_MAX_FAILURES)
    children = {}
    if record.workflow is not None:
        dead = items.find_ids(tx, pk, run_number, key, ItemStatus.DEAD, limit=_MAX_FAILURES)
        named = sa.select(i.instance_id).where(i.workflow == record.workflow, i.instance_id.in_(dead))
        children = {dead[id_]: Child(record.workflow, id_) for id_ in tx.execute(named).scalars()}
    found = []
    for position, answer, attempts in errors:
        error = values.read_answer_error(answer)
        assert error is not None
        found.append(ItemFailure(position, attempts, ErrorInfo(error.name, error.message), children.get(position)))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class OpenSteps:
    """The unfinished steps of a run in call order, the last finished one, and those that were asked for by key."""

    open: Sequence[StepRecord]
    last: StepRecord | None
    failed: Sequence[StepRow]


def read_open_steps(tx: Tx, pk: int, run_number: int, *, failed: Sequence[str] = ()) -> OpenSteps:
    """Return a run's unfinished steps, the last finished one, and those with the keys ``failed``; without results."""
    st = tx.t.step
    is_open = st.c.status.in_(_OPEN)
    is_finished = sa.and_(~is_open, st.c.status != StepStatus.LINEAR_PENDING.value)
    parts = [(is_open, None), (is_finished, 1), *([(st.c.step_key.in_(failed), None)] if failed else [])]
    selected = []
    for number, (condition, limit) in enumerate(parts):
        part: sa.ColumnElement[int] = sa.literal_column(str(number)).label("part")
        query = sa.select(*STEPS.select(st, with_results=False), part)
        query = query.where(st.c.instance_pk == pk, st.c.run_number == run_number, condition)
        selected.append(sa.select(query.order_by(st.c.seq.desc(), st.c.step_key.desc()).limit(limit).subquery()))
    union = sa.union_all(*selected).subquery()
    rows = tx.execute(sa.select(union).order_by(union.c.seq, union.c.step_key)).all()
    of_part = [[row[:-1] for row in rows if row.part == number] for number in range(3)]
    records = [to_step_record(row, pk, run_number) for row in of_part[0] + of_part[1]]
    open_, last = records[: len(of_part[0])], records[len(of_part[0]) :]
    return OpenSteps(
        with_items(tx, pk, run_number, open_), last[0] if last else None, [STEPS.read(row) for row in of_part[2]]
    )


def count_answered_tasks(tx: Tx, pk: int, run_number: int) -> int:
    """Count the Celery tasks of a run that have completed or failed their steps."""
    st = tx.t.step.c
    is_over = st.status.in_((StepStatus.COMPLETED.value, StepStatus.ERRORED.value))
    mine = (st.instance_pk == pk, st.run_number == run_number, st.type == StepType.TASK.value)
    return int(tx.execute(sa.select(sa.func.count()).where(*mine, is_over)).scalar_one())


def get_failed_step(text: str | None) -> str | None:
    """Return the key of the first step whose failure ended a run, from the stored text."""
    failure = RunFailure.parse(text)
    return None if failure is None or not failure.keys else failure.keys[0]


def to_step_record(selected: Sequence[Any], pk: int, run_number: int) -> StepRecord:
    """Convert the values of `StepFormat.select` to the record that users see."""
    row = STEPS.read(selected)
    event_type, asked = row.wait_event_type, values.read_ask(row.ask)
    task, child = parse_task_event_type(event_type), parse_child_event_type(event_type)
    is_one_task = event_type is not None and task is not None and row.type is StepType.TASK
    return StepRecord(
        **{name: getattr(row, name) for name in SHOWN_AS_STORED},
        wait_event_type=get_public_event_type(event_type),
        wait_topic=parse_topic_event_type(event_type),
        result=None if row.result is None else json.loads(row.result),
        error=to_error_info(row.error_name, row.error_message),
        task=task,
        task_id=task_id(event_type or "", pk, run_number) if is_one_task else None,
        child=None if child is None else Child(*child),
        workflow=parse_children_event_type(event_type),
        ask=asked.get("ask"),
        to=asked.get("to"),
    )


def read_buffered_types(tx: Tx, pk: int, run_number: int) -> tuple[str, ...]:
    """Return the types of a run's unconsumed events, each once. Private types, for one wait only, are left out."""
    e = tx.t.event
    left = (e.c.consumed_by_step_key.is_(None), e.c.type.not_like(PRIVATE_TYPE_PATTERN))
    mine = (e.c.instance_pk == pk, e.c.run_number == run_number, *left)
    query = sa.select(e.c.type).where(*mine).distinct().order_by(e.c.type).limit(50)
    return tuple(tx.execute(query).scalars())


def read_events(
    tx: Tx,
    pk: int,
    run_number: int,
    *,
    after: int | None = None,
    newest_first: bool = False,
    limit: int | None = None,
) -> tuple[EventRecord, ...]:
    """Return a run's events in the order of acceptance, or reversed, that come after the seq ``after``."""
    e = tx.t.event
    query = sa.select(e).where(e.c.instance_pk == pk, e.c.run_number == run_number).limit(limit)
    query = query.order_by(e.c.seq.desc() if newest_first else e.c.seq)
    if after is not None:
        query = query.where(e.c.seq < after if newest_first else e.c.seq > after)
    return tuple(
        EventRecord(
            seq=row.seq,
            event_id=row.event_id,
            type=parse_topic_event_type(row.type) or row.type,
            payload=json.loads(row.payload),
            created_at=from_us(row.created_at),
            delivered_at=from_us_or_none(row.delivered_at),
            consumed_by_step_key=row.consumed_by_step_key,
            by=row.actor,
        )
        for row in tx.execute(query)
    )


def read_logs(
    tx: Tx,
    pk: int,
    run_number: int,
    *,
    after_id: int | None,
    limit: int,
    levels: Sequence[LogLevel] | None = None,
    category: str | None = None,
    newest_first: bool = False,
) -> list[LogRecord]:
    """Return a run's log lines after ``after_id``, in the order they were written, or reversed."""
    log = tx.t.log
    query = sa.select(log).where(log.c.instance_pk == pk, log.c.run_number == run_number).limit(limit)
    query = query.order_by(log.c.id.desc() if newest_first else log.c.id)
    if after_id is not None:
        query = query.where(log.c.id < after_id if newest_first else log.c.id > after_id)
    if levels is not None:
        query = query.where(log.c.level.in_([LogLevel(level).value for level in levels]))
    if category is not None:
        query = query.where(log.c.category == category)
    return [
        LogRecord(
            id=row.id,
            run_number=row.run_number,
            level=LogLevel(row.level),
            category=row.category,
            message=row.message,
            data=None if row.data is None else json.loads(row.data),
            step_key=row.step_key,
            attempt=row.attempt,
            is_replay=bool(row.is_replay),
            created_at=from_us(row.created_at),
        )
        for row in tx.execute(query)
    ]


def to_error_info(name: str | None, message: str | None) -> ErrorInfo | None:
    """Return a stored error, or None if there is no name."""
    return None if name is None else ErrorInfo(name, message or "")


def find_sent_tasks(tx: Tx, pk: int, run_number: int, step_keys: Sequence[str]) -> list[tuple[str, str | None, str]]:
    """Return of each of these steps the key, with queue and encoded task of a sent task. Queue None: by its route."""
    item, selected = tx.t.item.c, []
    for key in step_keys:
        is_sent = (item.step_key == key, item.status == ItemStatus.SENT.value)
        one = sa.select(item.step_key, item.queue, item.task)
        one = one.where(item.instance_pk == pk, item.run_number == run_number, *is_sent).limit(1)
        selected.append(sa.select(one.subquery()))
    rows = tx.execute(sa.union_all(*selected)).all() if selected else ()
    return [(row.step_key, row.queue, row.task) for row in rows]
