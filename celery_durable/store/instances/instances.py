"""Instance rows and their labels, which are written with the instance or under the lock of its row."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from datetime import datetime, timedelta
from types import SimpleNamespace
from typing import Any

import sqlalchemy as sa

from celery_durable import values
from celery_durable.ancestry import RunFailure
from celery_durable.errors import InstanceNotFound, RunNotFound
from celery_durable.model import (
    Child,
    InstanceHead,
    InstanceRow,
    Parent,
    ParentStep,
    RunningStep,
    RunPlan,
    Scope,
    Status,
    VersionedInstance,
    WakeReason,
    WorkflowKind,
    duration_us,
    from_us,
    from_us_or_none,
    to_us,
)
from celery_durable.store.engine import Store, Tx, bounds
from celery_durable.store.engine.statements import param, statement
from celery_durable.store.runs import history, runs
from celery_durable.store.runs.claims import FIRST_VERSION, STARTING
from celery_durable.store.runs.runs import Continuation, RunStart
from celery_durable.store.schema import dialects

REPLAY = RunPlan()
_MAX_RUN_NUMBER = 2**31 - 1


# --- insert -------------------------------------------------------------------------------------


KEY = ("workflow", "instance_id")


def instance_values(s: Store) -> dict[str, Any]:
    """Return the values of a new instance, from the parameters of `encode_start` and from its id, ``instance``."""
    now = s.clock()
    run_at = sa.func.coalesce(param("run_us", sa.BigInteger), now)
    return {
        "workflow": param("workflow", sa.String),
        "instance_id": param("instance", sa.String),
        "kind": param("kind", sa.String),
        "run_number": 1,
        "status": param("status", sa.String),
        "run_at": run_at,
        "next_check_at": run_at + param("grace_us", sa.BigInteger),
        "sent_at": sa.case((param("run_us", sa.BigInteger).is_(None), now), else_=sa.null()),
        "wake_reason": WakeReason.START.value,
        "priority": STARTING,
        "dispatch_count": 0,
        "crash_count": 0,
        "pause_requested": sa.false(),
        "version": FIRST_VERSION,
        "queue": param("queue", sa.String),
        "parent_pk": param("parent_pk", sa.BigInteger),
        "parent_run_number": param("parent_run", sa.Integer),
        "parent_step_key": param("parent_key", sa.String),
        "created_at": now,
        "updated_at": now,
        "retention_us": param("retention_us", sa.BigInteger),
        "max_run_us": param("max_run_us", sa.BigInteger),
    }


def _build_insert(s: Store) -> Any:
    insert = dialects.insert_or_nothing(s.database, s.tables.instance, instance_values(s), KEY)
    return insert.returning(s.tables.instance.c.id)


@statement
def _insert(s: Store) -> Any:
    return _build_insert(s)


@statement
def _insert_with_run(s: Store) -> Any:
    """Insert an instance and its first run in one statement."""
    instance, run = _build_insert(s).cte("new_instance"), s.tables.run
    values = {"instance_pk": instance.c.id, **runs.run_values(s)}
    source = sa.select(*values.values()).select_from(instance)
    return sa.insert(run).from_select(list(values), source).returning(run.c.instance_pk)


def insert(
    tx: Tx,
    *,
    workflow: str,
    instance_id: str,
    params: str,
    queue: str,
    grace: timedelta,
    commit_id: str,
    plan: RunPlan = REPLAY,
    run_at: datetime | None = None,
    parent: Parent | None = None,
    continuation: Continuation | None = None,
    retention: timedelta | None = None,
    max_run: timedelta | None = None,
    initial_labels: Mapping[str, str] | None = None,
) -> bool:
    """Insert an instance and its first run. Returns False if the id is taken, which does not abort the transaction.

    After a commit in doubt you may repeat the call with the same ``commit_id``. ``run_at`` is when the run is due, None
    for now. If the caller does not publish the run, the sweep does after ``grace``. ``parent`` is the step that creates
    the instance, ``continuation`` what a fork starts with. ``retention`` None: kept for ever. ``max_run`` None: as the
    workflow says.
    """
    options: dict[str, Any] = {"run_at": run_at, "parent": parent, "retention": retention, "max_run": max_run}
    given = {"instance": instance_id, **encode_start(workflow, queue=queue, grace=grace, plan=plan, **options)}
    start = RunStart(params, commit_id, plan, continuation=continuation)
    combined = tx.run_combined(_insert_with_run, **given, **start.encode(1))
    pk = (tx.run(_insert, **given) if combined is None else combined).scalar()
    if pk is None:
        return runs.find_creator(tx, workflow, instance_id) == commit_id
    insert_run = runs.insert if combined is None else runs.insert_rows
    insert_run(tx, pk, 1, start)
    if initial_labels:
        insert_labels(tx, pk, initial_labels)
    if continuation is not None:
        # Events are numbered by the version: continue after the events that the run starts with.
        i = tx.t.instance
        tx.execute(sa.update(i).where(i.c.id == pk).values(version=continuation.source_version))
    return True


def insert_if_missing(tx: Tx, **new: Any) -> bool:
    """As `insert`, for an id that usually exists.

    On MariaDB a refused INSERT leaves the transaction with a shared lock on the row, so that of several which then
    lock it all but one would end in a deadlock.
    """
    creator = runs.find_creator(tx, new["workflow"], new["instance_id"])
    return insert(tx, **new) if creator is None else creator == new["commit_id"]


def encode_start(
    workflow: str,
    *,
    queue: str,
    grace: timedelta,
    plan: RunPlan,
    retention: timedelta | None,
    run_at: datetime | None = None,
    parent: Parent | None = None,
    max_run: timedelta | None = None,
) -> dict[str, Any]:
    """Return the parameters of `instance_values`, except for the id."""
    return {
        "workflow": workflow,
        "kind": plan.kind.value,
        "status": (Status.ACTIVE if run_at is None else Status.WAITING).value,
        "run_us": None if run_at is None else to_us(run_at),
        "grace_us": duration_us(grace) if run_at is None else 0,
        "queue": queue,
        "parent_pk": None if parent is None else parent.pk,
        "parent_run": None if parent is None else parent.run_number,
        "parent_key": None if parent is None else parent.column,
        "retention_us": None if retention is None else duration_us(retention),
        "max_run_us": None if max_run is None else duration_us(max_run),
    }


@statement
def _select_clock(s: Store) -> Any:
    return sa.select(s.clock())


def read_clock(tx: Tx) -> datetime:
    """Return the database's time, which decides when instances are due."""
    return from_us(tx.run(_select_clock).scalar_one())


# --- lock and read ------------------------------------------------------------------------------

_COLUMNS = (
    "id", "workflow", "instance_id", "kind", "run_number", "status", "claim_token", "claim_task_id", "claimed_by",
    "lease_until", "run_at", "next_check_at", "wake_reason", "priority", "dispatch_count", "crash_count",
    "pause_requested", "version", "queue", "sent_at", "created_at", "updated_at", "running_step_key",
    "running_attempt", "running_since", "max_run_us",
)  # fmt: skip


def _select(s: Store) -> Any:
    i = s.tables.instance.c
    return sa.select(*(i[name] for name in _COLUMNS)).where(
        i.workflow == param("workflow"), i.instance_id == param("instance")
    )


@statement
def _lock(s: Store) -> Any:
    return _select(s).with_for_update(key_share=True)


@statement
def _lock_if_free(s: Store) -> Any:
    return _select(s).with_for_update(key_share=True, skip_locked=True)


@statement
def _read(s: Store) -> Any:
    return _select(s)


@statement
def _read_with_step_count(s: Store) -> Any:
    i, st = s.tables.instance.c, s.tables.step.c
    steps = sa.select(sa.func.count()).where(st.instance_pk == i.id, st.run_number == i.run_number)
    return _select(s).add_columns(steps.scalar_subquery().label("steps"))


@statement
def _count_steps(s: Store) -> Any:
    st = s.tables.step.c
    return sa.select(sa.func.count()).where(st.instance_pk == param("pk"), st.run_number == param("run"))


def lock(tx: Tx, workflow: str, instance_id: str) -> InstanceRow:
    """Lock an instance's row and return it; raises InstanceNotFound."""
    return _instance(tx.run(_lock, workflow=workflow, instance=instance_id).first(), workflow, instance_id)


def lock_if_free(tx: Tx, workflow: str, instance_id: str) -> InstanceRow | None:
    """As `lock`, or return None if another transaction has locked it."""
    row = tx.run(_lock_if_free, workflow=workflow, instance=instance_id).first()
    if row is None:
        read(tx, workflow, instance_id)
        return None
    return _instance(row, workflow, instance_id)


def read(tx: Tx, workflow: str, instance_id: str) -> InstanceRow:
    """Return an instance's row without a lock; raises InstanceNotFound."""
    return _instance(tx.run(_read, workflow=workflow, instance=instance_id).first(), workflow, instance_id)


def read_with_tag(tx: Tx, workflow: str, instance_id: str) -> VersionedInstance:
    """Return an instance and its opaque version tag (an ETag) without a lock; raises InstanceNotFound."""
    found = tx.run(_read_with_step_count, workflow=workflow, instance=instance_id).first()
    row = _instance(found, workflow, instance_id)
    return VersionedInstance(row, _tag(row, 0 if found is None else found.steps))


def _build_head(s: Store) -> Any:
    i, r, p, label = s.tables.instance, s.tables.run, s.tables.instance.alias("parent"), s.tables.label.c
    number = sa.func.coalesce(param("run", sa.Integer), i.c.run_number)
    joined = i.outerjoin(r, sa.and_(r.c.instance_pk == i.c.id, r.c.run_number == number))
    labels = sa.select(dialects.collect_object(s.database, label.name, label.value))
    columns = [
        *(i.c[name] for name in _COLUMNS),
        *(r.c[name].label(f"run_{name}") for name in history.RUN_COLUMNS),
        *(i.c[name] for name in ("parent_pk", "parent_run_number", "parent_step_key")),
        p.c.workflow.label("parent_workflow"),
        p.c.instance_id.label("parent_instance_id"),
        labels.where(label.instance_pk == i.c.id).scalar_subquery().label("labels"),
        s.clock().label("now_us"),
    ]
    is_it = (i.c.workflow == param("workflow"), i.c.instance_id == param("instance"))
    return sa.select(*columns).select_from(joined.outerjoin(p, p.c.id == i.c.parent_pk)).where(*is_it)


@statement
def _read_head(s: Store) -> Any:
    return _build_head(s)


def read_head(
    tx: Tx, workflow: str, instance_id: str, *, run: int | None = None, scope: Scope | None = None
) -> InstanceHead:
    """Return an instance in the scope with a run, None for the current one; raises InstanceNotFound, RunNotFound."""
    given = {"workflow": workflow, "instance": instance_id, "run": None if run is None else min(run, _MAX_RUN_NUMBER)}
    if scope is None:
        row = tx.run(_read_head, **given).first()
    else:
        row = tx.execute(_build_head(tx.store).where(*bounds.scope_conditions(tx.t, scope)), **given).first()
    instance = _instance(row, workflow, instance_id)
    if row.run_run_number is None:
        raise RunNotFound(workflow, instance_id, run or 0, instance.run_number)
    of_run = SimpleNamespace(**{name: getattr(row, f"run_{name}") for name in history.RUN_COLUMNS})
    parent, failure = None, RunFailure.parse(of_run.failed_steps)
    if row.parent_workflow is not None:
        parent = _to_parent_step(row, row.parent_workflow, row.parent_instance_id)
    return InstanceHead(
        from_us(row.now_us),
        instance,
        history.to_run_row(of_run),
        dict(sorted(json.loads(row.labels or "{}").items())),
        parent,
        () if failure is None else failure.keys,
    )


def read_version_tag(tx: Tx, row: InstanceRow) -> str:
    """Return the version tag of an instance whose row is locked."""
    return _tag(row, tx.run(_count_steps, pk=row.pk, run=row.run_number).scalar_one())


def _tag(row: InstanceRow, steps: int) -> str:
    return values.make_version_tag(row.pk, row.run_number, row.version, steps)


def read_statuses(tx: Tx, children: Collection[Child]) -> dict[Child, Status]:
    """Return the statuses of these child instances. Children that do not exist are left out."""
    i = tx.t.instance.c
    wanted = sa.tuple_(i.workflow, i.instance_id).in_([(each.workflow, each.instance_id) for each in children])
    rows = tx.execute(sa.select(i.workflow, i.instance_id, i.status).where(wanted)) if children else ()
    return {Child(row.workflow, row.instance_id): Status(row.status) for row in rows}


@statement
def _select_parent(s: Store) -> Any:
    i = s.tables.instance.c
    return sa.select(i.parent_pk, i.parent_run_number, i.parent_step_key).where(
        i.workflow == param("workflow"), i.instance_id == param("instance"), i.parent_pk.is_not(None)
    )


def find_parent(tx: Tx, workflow: str, instance_id: str) -> Parent | None:
    """Return the step that created an instance, which never changes; None without a step or an instance."""
    row = tx.run(_select_parent, workflow=workflow, instance=instance_id).first()
    return None if row is None else Parent.read(row.parent_pk, row.parent_run_number, row.parent_step_key)


@statement
def _select_parent_step(s: Store) -> Any:
    i, p = s.tables.instance.c, s.tables.instance.alias("parent").c
    query = sa.select(p.workflow, p.instance_id, i.parent_pk, i.parent_run_number, i.parent_step_key)
    return query.where(i.id == param("pk"), p.id == i.parent_pk)


def find_parent_step(tx: Tx, pk: int) -> ParentStep | None:
    """Return the names of the step that created an instance. None if no step did, or if the parent is deleted."""
    row = tx.run(_select_parent_step, pk=pk).first()
    return None if row is None else _to_parent_step(row, row.workflow, row.instance_id)


def _to_parent_step(row: Any, workflow: str, instance_id: str) -> ParentStep:
    step = Parent.read(row.parent_pk, row.parent_run_number, row.parent_step_key)
    position = None if step.item is None else step.item.position
    return ParentStep(workflow, instance_id, step.run_number, step.step_key, position)


def find_pk(tx: Tx, workflow: str, instance_id: str) -> int | None:
    """Return the primary key of an instance, or None. It never changes. Rows are locked in the order of these keys."""
    row = tx.run(_read, workflow=workflow, instance=instance_id).first()
    return None if row is None else int(row.id)


def _instance(row: Any, workflow: str, instance_id: str) -> InstanceRow:
    if row is None:
        raise InstanceNotFound(workflow, instance_id)
    return InstanceRow(
        pk=row.id,
        workflow=row.workflow,
        instance_id=row.instance_id,
        kind=WorkflowKind(row.kind),
        run_number=row.run_number,
        status=Status(row.status),
        claim_token=row.claim_token,
        claim_task_id=row.claim_task_id,
        claimed_by=row.claimed_by,
        lease_until=from_us_or_none(row.lease_until),
        run_at=from_us_or_none(row.run_at),
        next_check_at=from_us_or_none(row.next_check_at),
        wake_reason=WakeReason(row.wake_reason),
        priority=row.priority,
        dispatch_count=row.dispatch_count,
        crash_count=row.crash_count,
        pause_requested=bool(row.pause_requested),
        version=row.version,
        queue=row.queue,
        sent_at=from_us_or_none(row.sent_at),
        created_at=from_us(row.created_at),
        updated_at=from_us(row.updated_at),
        running=to_running_step(row),
        max_run=None if row.max_run_us is None else timedelta(microseconds=row.max_run_us),
    )


def to_running_step(row: Any) -> RunningStep | None:
    """Return the step that a worker runs, from the row of an instance. Rows without a claim may name an old one."""
    if row.claim_token is None or row.running_step_key is None:
        return None
    return RunningStep(row.running_step_key, row.running_attempt, from_us(row.running_since))


@statement
def _insert_label(s: Store) -> Any:
    row = {"instance_pk": param("pk"), "name": param("name"), "value": param("value")}
    return sa.insert(s.tables.label).values(row).inline()


@statement
def _update_label(s: Store) -> Any:
    t = s.tables.label
    return sa.update(t).where(t.c.instance_pk == param("pk"), t.c.name == param("name")).values(value=param("value"))


@statement
def _delete_label(s: Store) -> Any:
    t = s.tables.label
    return sa.delete(t).where(t.c.instance_pk == param("pk"), t.c.name == param("name"))


@statement
def _select_labels(s: Store) -> Any:
    t = s.tables.label.c
    return sa.select(t.name, t.value).where(t.instance_pk == param("pk")).order_by(t.name)


def insert_labels(tx: Tx, pk: int, labels: Mapping[str, str]) -> None:
    """Insert labels of an instance that has no label with these names."""
    insert_labels_of_many(tx, {pk: labels})


def insert_labels_of_many(tx: Tx, labels_by_pk: Mapping[int, Mapping[str, str]]) -> None:
    """Insert labels of instances that have no label with these names."""
    tx.run_many(
        _insert_label,
        [
            {"pk": pk, "name": name, "value": value}
            for pk, labels in labels_by_pk.items()
            for name, value in labels.items()
        ],
    )


def merge_labels(tx: Tx, pk: int, changes: Mapping[str, str | None]) -> None:
    """Set labels of a locked instance, and delete those with the value None; raises TooManyLabels."""
    old = read_labels(tx, pk)
    new = values.check_label_count({name: value for name, value in {**old, **changes}.items() if value is not None})
    insert_labels(tx, pk, {name: value for name, value in new.items() if name not in old})
    changed = {name: value for name, value in new.items() if name in old and old[name] != value}
    tx.run_many(_update_label, [{"pk": pk, "name": name, "value": value} for name, value in changed.items()])
    tx.run_many(_delete_label, [{"pk": pk, "name": name} for name in old if name not in new])


def read_labels(tx: Tx, pk: int) -> dict[str, str]:
    """Return an instance's labels by name."""
    return {row.name: row.value for row in tx.run(_select_labels, pk=pk)}


def read_labels_of_many(tx: Tx, pks: Collection[int]) -> dict[int, dict[str, str]]:
    """Return the labels of instances by primary key. Instances without labels are left out."""
    t = tx.t.label.c
    query = sa.select(t.instance_pk, t.name, t.value).where(t.instance_pk.in_(pks)).order_by(t.instance_pk, t.name)
    found: dict[int, dict[str, str]] = {}
    for row in tx.execute(query) if pks else ():
        found.setdefault(row.instance_pk, {})[row.name] = row.value
    return found
