"""All that may be done to instances from outside: create, read, pause, resume, terminate, restart, send_event.

Each verb checks its input, runs one transaction, and only then wakes the workers: a broker that is
down delays work and fails nobody (LAW 1).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, TypeVar, cast

from sqlalchemy.orm import Session

from celery_durable import values
from celery_durable.config import Settings
from celery_durable.definitions import Registry, WorkflowDefinition
from celery_durable.errors import (
    BatchTooLarge,
    CursorInvalid,
    InstanceAlreadyExists,
    InstanceNotFound,
    InstanceTerminal,
    NameInvalid,
    RunNotFound,
    ValueRefused,
    VersionMismatch,
    WorkflowParamsInvalid,
)
from celery_durable.explain import Diagnosis, Facts, explain
from celery_durable.model import (
    CreateOptions,
    Due,
    History,
    HistoryPage,
    InstanceDetails,
    InstanceRow,
    InstanceStatus,
    InstanceSummary,
    LogLevel,
    LogRecord,
    Page,
    Ref,
    Status,
    StepRecord,
    Wake,
)
from celery_durable.runtime import Runtime
from celery_durable.store import heartbeats, history, instances
from celery_durable.store.engine import Store, Tx

T = TypeVar("T")
WakeUp = Callable[[Sequence[Due]], None]
IfExists = Literal["error", "return"]
Versions = Collection[int] | None
"""The versions of an instance that a change is meant for; None: whatever it is."""

_LARGEST_PAGE = 1000
_LARGEST_RUN = 2**31 - 1
"""And the largest place of a step: both columns are of 32 bits."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """An instance at one moment: its row, and the status people see."""

    instance: InstanceRow
    status: InstanceStatus


class Operations:
    """The verbs, over one store. ``wake`` is told what became due, after the commit."""

    def __init__(self, store: Store, settings: Settings, registry: Registry, runtime: Runtime, wake: WakeUp) -> None:
        self._store, self._settings, self._registry, self._runtime = store, settings, registry, runtime
        self._wake = wake
        self._grace = settings.grace

    # --- create ---------------------------------------------------------------------------------

    def create(
        self,
        workflow: str,
        params: Any = None,
        *,
        id: str | None = None,  # the public name
        if_exists: IfExists = "error",
        run_at: datetime | None = None,
        session: Session | None = None,
    ) -> str:
        """Record a new instance and have it advanced; answers with its id.

        ``session``: join the caller's transaction; the workers are told after his commit.
        Raises WorkflowNotFound, InvalidInstanceId, WorkflowParamsInvalid, NotSerializable, PayloadTooLarge,
        InstanceAlreadyExists, StoreMismatch; nothing is written then.
        """
        definition = self._definition(workflow)
        if if_exists not in ("error", "return"):
            raise ValueRefused(f'if_exists={if_exists!r} is not known: use "error" or "return".')
        instance_id = self._runtime.new_id() if id is None else values.instance_id(id, self._settings.max_instance_id)
        row = self._row(definition, instance_id, params)
        row["run_at"] = None if run_at is None else values.aware(run_at, "run_at")
        due = self._due(definition, instance_id)
        if session is not None:
            is_new = instances.insert(self._store.join(session), **row)
            if is_new and run_at is None:
                self._store.after_commit(session, lambda: self._wake([due]))
        else:
            is_new = self._store.transact(lambda tx: instances.insert(tx, **row))
            if is_new and run_at is None:
                self._wake([due])
        if not is_new and if_exists == "error":
            raise InstanceAlreadyExists(workflow, instance_id)
        return instance_id

    def create_batch(self, workflow: str, batch: Sequence[CreateOptions[Any]]) -> list[str]:
        """Record up to `durable_max_batch` instances in one transaction; answers with the ids of the new ones.

        Ids that exist, and repetitions within the batch, are skipped; one invalid item rejects all.
        """
        definition = self._definition(workflow)
        if len(batch) > self._settings.max_batch:
            raise BatchTooLarge(len(batch), self._settings.max_batch)
        rows: dict[str, dict[str, Any]] = {}
        for item in batch:
            instance_id = values.instance_id(item.id, self._settings.max_instance_id)
            rows.setdefault(instance_id, self._row(definition, instance_id, item.params, item=instance_id))
        # Sorted, so that two batches that share ids wait for each other instead of deadlocking.
        created = self._store.transact(lambda tx: {key for key in sorted(rows) if instances.insert(tx, **rows[key])})
        made = [key for key in rows if key in created]
        self._wake([self._due(definition, key) for key in made])
        return made

    def _definition(self, workflow: str) -> WorkflowDefinition:
        definition = self._registry.get(workflow)
        values.identifier("Workflow name", definition.name, self._settings.max_workflow_name)
        return definition

    def _row(
        self, definition: WorkflowDefinition, instance_id: str, params: Any, *, item: str | None = None
    ) -> dict[str, Any]:
        try:
            checked = definition.params.check(params)
        except values.Misfit as exc:
            raise WorkflowParamsInvalid(definition.name, exc.problems, item=item) from exc
        what = f"Parameters of workflow {definition.name!r}" + (f" for instance {item!r}" if item else "")
        return {
            "workflow": definition.name,
            "instance_id": instance_id,
            "params": definition.params.encode(checked, what=what, limits=self._settings.limits),
            "queue": definition.queue or self._settings.queue,
            "grace": self._grace,
            "commit_id": self._runtime.new_token(),
        }

    def _due(self, definition: WorkflowDefinition, instance_id: str) -> Due:
        return Due(Ref(definition.name, instance_id, 1), definition.queue or self._settings.queue)

    # --- change ---------------------------------------------------------------------------------

    def pause(self, workflow: str, instance_id: str, *, if_version: Versions = None) -> None:
        """Stop at the next step boundary, at once where nobody works on it; timers go on. Raises InstanceTerminal.

        ``if_version``, here and below: raises VersionMismatch where the instance is at none of these.
        """

        def work(tx: Tx) -> None:
            row = self._lock_live(tx, workflow, instance_id, "pause", if_version)
            instances.pause(tx, row)

        self._store.transact(work)

    def resume(self, workflow: str, instance_id: str, *, if_version: Versions = None) -> None:
        """Go on after a pause, or take back one that has not happened yet; otherwise nothing."""

        def work(tx: Tx) -> list[Due]:
            row = _lock(tx, workflow, instance_id, if_version)
            if row.status is Status.PAUSED:
                due = instances.resume(tx, row, grace=self._grace)
                return [] if due is None else [due]
            if row.pause_requested:
                instances.withdraw_pause(tx, row)
            return []

        self._wake(self._store.transact(work))

    def terminate(
        self, workflow: str, instance_id: str, *, reason: str | None = None, if_version: Versions = None
    ) -> None:
        """End it for good; of a body that runs on nothing is recorded. Raises InstanceTerminal."""
        reason = None if reason is None else values.storable(reason, self._settings.max_log_message)

        meant: list[int] = []

        def work(tx: Tx) -> bool:
            row = self._lock_live(tx, workflow, instance_id, "terminate", if_version)
            meant[:] = [row.run_number]
            instances.terminate(tx, row, reason=reason)
            return True

        def was_applied(tx: Tx) -> bool | None:
            row = _lock(tx, workflow, instance_id)
            # A restart meanwhile has ended the run that was meant, and begun one that was not.
            return True if row.status is Status.TERMINATED or row.run_number not in meant else None

        self._store.transact(work, resolve=was_applied)

    def restart(
        self, workflow: str, instance_id: str, *, reason: str | None = None, if_version: Versions = None
    ) -> int:
        """Begin a new run with the same parameters, from any state; answers with its number. Prior runs are kept."""
        commit_id = self._runtime.new_token()
        reason = None if reason is None else values.storable(reason, self._settings.max_log_message)

        def work(tx: Tx) -> Due:
            row = _lock(tx, workflow, instance_id, if_version)
            return instances.restart(tx, row, grace=self._grace, commit_id=commit_id, reason=reason)

        def was_applied(tx: Tx) -> Due | None:
            row = _lock(tx, workflow, instance_id)
            number = instances.find_run(tx, row, commit_id=commit_id)
            return None if number is None else Due(Ref(workflow, instance_id, number), row.queue)

        due = self._store.transact(work, resolve=was_applied)
        self._wake([due])
        return due.ref.run_number

    def send_event(
        self,
        workflow: str,
        instance_id: str,
        type_: str,
        payload: Any = None,
        *,
        id: str | None = None,  # the public name
        session: Session | None = None,
        if_version: Versions = None,
    ) -> bool:
        """Buffer an event for the current run; it is consumed once, by the first wait for its type.

        ``id``: an event of this id is accepted once per run; False tells that it had been. Raises
        InstanceNotFound, InstanceTerminal, InvalidEventType, NotSerializable, PayloadTooLarge.
        """
        values.event_type(type_, self._settings.max_event_type)
        event_id = self._runtime.new_id() if id is None else values.label("Event id", id, values.LONGEST_ID)
        text = values.encode(payload, what=f"Payload of event {type_!r}", limits=self._settings.limits)

        sent: list[instances.Sent | None] = []

        def work(tx: Tx) -> tuple[bool, list[Due]]:
            row = self._lock_live(tx, workflow, instance_id, "send an event to", if_version)
            sent[:] = [instances.insert_event(tx, row, type_=type_, payload=text, event_id=event_id)]
            if sent[0] is not None and instances.is_awaited(tx, row, type_):
                return True, [instances.make_due(tx, row, wake=Wake.WAKE, grace=self._grace)]
            return sent[0] is not None, []

        def was_applied(tx: Tx) -> tuple[bool, list[Due]] | None:
            row = _lock(tx, workflow, instance_id)
            ours = sent[0]
            if ours is None:
                return False, []  # it had been accepted before: nothing was to be written
            is_there = instances.was_sent(tx, row, ours, event_id=event_id)
            return (True, [Due(row.ref, row.queue)]) if is_there else None

        if session is not None:
            is_new, dues = work(self._store.join(session))
            self._store.after_commit(session, lambda: self._wake(dues))
        else:
            is_new, dues = self._store.transact(work, resolve=was_applied)
            self._wake(dues)
        return is_new

    @staticmethod
    def _lock_live(tx: Tx, workflow: str, instance_id: str, operation: str, if_version: Versions) -> InstanceRow:
        row = _lock(tx, workflow, instance_id, if_version)
        if row.status.is_terminal:
            raise InstanceTerminal(workflow, instance_id, row.status, operation)
        return row

    # --- read -----------------------------------------------------------------------------------

    def get(self, workflow: str, instance_id: str) -> Snapshot:
        """An instance and its status now; raises InstanceNotFound."""

        def work(tx: Tx) -> Snapshot:
            row = _read(tx, workflow, instance_id)
            return Snapshot(row, history.status_of(row.status, self._run(tx, row, row.run_number)))

        return self._store.read(work)

    def read(self, workflow: str, instance_id: str) -> InstanceRow:
        """The instance's row and nothing else, for who looks often; raises InstanceNotFound."""
        return self._store.read(lambda tx: _read(tx, workflow, instance_id))

    def details(self, workflow: str, instance_id: str) -> InstanceDetails:
        """An instance with its current run and step; raises InstanceNotFound."""

        def work(tx: Tx) -> InstanceDetails:
            row = _read(tx, workflow, instance_id)
            record = self._run(tx, row, row.run_number)
            return InstanceDetails(
                instance=row,
                status=history.status_of(row.status, record),
                params=json.loads(record.params),
                started_at=record.started_at,
                completed_at=record.completed_at,
                reason=record.reason,
                current_step=history.current_step(tx, row.pk, row.run_number),
            )

        return self._store.read(work)

    def outcome(self, workflow: str, instance_id: str, *, run: int) -> InstanceStatus:
        """How a run stands, or what became of it; raises InstanceNotFound, RunNotFound."""

        def work(tx: Tx) -> InstanceStatus:
            row = _read(tx, workflow, instance_id)
            record = self._run(tx, row, run)
            return history.status_of(history.past_status(row, record), record)

        return self._store.read(work)

    def steps(
        self, workflow: str, instance_id: str, *, run: int, after: tuple[int, str] | None = None, limit: int = 100
    ) -> list[tuple[int, StepRecord]]:
        """Up to ``limit`` steps of a run in call order, after (place in it, step key); with their places."""

        def work(tx: Tx) -> list[tuple[int, StepRecord]]:
            return history.step_page(tx, _read(tx, workflow, instance_id).pk, run, after=after, limit=limit)

        return self._store.read(work)

    def history(self, workflow: str, instance_id: str, *, run: int | None = None) -> History:
        """The steps and events of a run (None: the current one); raises InstanceNotFound, RunNotFound."""

        def work(tx: Tx) -> History:
            row = _read(tx, workflow, instance_id)
            record = self._run(tx, row, row.run_number if run is None else run)
            return History(
                workflow=workflow,
                instance_id=instance_id,
                run_number=record.run_number,
                status=history.status_of(history.past_status(row, record), record),
                params=json.loads(record.params),
                created_at=record.created_at,
                started_at=record.started_at,
                completed_at=record.completed_at,
                reason=record.reason,
                steps=history.steps(tx, row.pk, record.run_number),
                events=history.events(tx, row.pk, record.run_number),
            )

        return self._store.read(work)

    def explain(self, workflow: str, instance_id: str) -> Diagnosis:
        """Why an instance stands where it stands, from one look at the database; raises InstanceNotFound."""

        def work(tx: Tx) -> Facts:
            row = _read(tx, workflow, instance_id)
            open_, last = history.open_steps(tx, row.pk, row.run_number)
            buffered = history.buffered_types(tx, row.pk, row.run_number)
            run = self._run(tx, row, row.run_number)
            now, beats = heartbeats.read(tx)
            return Facts(now, row, run, open_steps=open_, last_step=last, buffered=buffered, heartbeats=beats)

        return explain(self._store.read(work))

    def history_page(
        self,
        workflow: str,
        instance_id: str,
        *,
        run: int | None = None,
        limit: int = 25,
        newest_first: bool = False,
        steps_cursor: str | None = None,
        events_cursor: str | None = None,
        logs_cursor: str | None = None,
        with_logs: bool = False,
        levels: Sequence[LogLevel] | None = None,
        category: str | None = None,
    ) -> HistoryPage:
        """A page of a run's steps, events and, if asked for, logs, each with a cursor of its own.

        A cursor belongs to a run and an order: without ``run`` it goes on with its own run, also after a restart.
        Raises InstanceNotFound, RunNotFound, CursorInvalid.
        """
        _check_limit(limit)
        given = {"steps": steps_cursor, "events": events_cursor, "logs": logs_cursor}
        after = {kind: _read_place(cursor, kind, newest_first) for kind, cursor in given.items() if cursor is not None}
        for kind, (number, *_) in after.items():
            if run is None:
                run = cast("int", number)
            elif number != run:
                raise CursorInvalid(given[kind])

        def work(tx: Tx) -> HistoryPage:
            row = _read(tx, workflow, instance_id)
            number = self._run(tx, row, row.run_number if run is None else run).run_number

            def page(kind: str, found: Sequence[T], key: Callable[[T], tuple[values.CursorPart, ...]]) -> Page[T]:
                items = tuple(found[:limit])
                order = "d" if newest_first else "a"
                more = values.write_cursor(kind, number, order, *key(items[-1])) if len(found) > limit else None
                return Page(items, more)

            options: dict[str, Any] = {"newest_first": newest_first, "limit": limit + 1}
            place = cast("tuple[int, str] | None", after["steps"][1:] if "steps" in after else None)
            found = page(
                "steps",
                history.step_page(tx, row.pk, number, after=place, **options),
                lambda item: (item[0], item[1].step_key),
            )
            last_event = cast("int | None", after["events"][1] if "events" in after else None)
            last_log = cast("int | None", after["logs"][1] if "logs" in after else None)
            narrowed: dict[str, Any] = {"after_id": last_log, "levels": levels, "category": category}
            return HistoryPage(
                run_number=number,
                steps=Page(tuple(record for _, record in found.items), found.cursor),
                events=page(
                    "events",
                    history.events(tx, row.pk, number, after=last_event, **options),
                    lambda event: (event.seq,),
                ),
                logs=page("logs", history.logs(tx, row.pk, number, **narrowed, **options), lambda line: (line.id,))
                if with_logs
                else None,
            )

        return self._store.read(work)

    def logs(
        self,
        workflow: str,
        instance_id: str,
        *,
        run: int | None = None,
        after_id: int = 0,
        limit: int = 1000,
        levels: Sequence[LogLevel] | None = None,
        category: str | None = None,
    ) -> list[LogRecord]:
        """Up to ``limit`` log lines of a run, after the line ``after_id``; raises InstanceNotFound."""

        def work(tx: Tx) -> list[LogRecord]:
            row = _read(tx, workflow, instance_id)
            number = row.run_number if run is None else run
            return history.logs(tx, row.pk, number, after_id=after_id, limit=limit, levels=levels, category=category)

        return self._store.read(work)

    def list(
        self,
        workflow: str | None = None,
        *,
        status: Status | None = None,
        cursor: str | None = None,
        limit: int = 25,
    ) -> Page[InstanceSummary]:
        """Instances, newest first; ``cursor`` continues an earlier page. Raises CursorInvalid."""
        _check_limit(limit)
        before = None if cursor is None else cast("int", values.read_cursor(cursor, "i", int)[0])
        wanted = None if status is None else Status(status)
        if workflow is not None and not _can_be_named(workflow):
            return Page((), None)
        found = self._store.read(
            lambda tx: history.instances(tx, workflow=workflow, status=wanted, before_pk=before, limit=limit + 1)
        )
        more = found[limit:]
        items = found[:limit]
        return Page(tuple(item for _, item in items), values.write_cursor("i", items[-1][0]) if more else None)

    @staticmethod
    def _run(tx: Tx, row: InstanceRow, number: int) -> Any:
        found = history.run(tx, row.pk, number) if number <= _LARGEST_RUN else None
        if found is None:
            raise RunNotFound(row.workflow, row.instance_id, number, row.run_number)
        return found


def _lock(tx: Tx, workflow: str, instance_id: str, if_version: Versions = None) -> InstanceRow:
    row = instances.lock(tx, workflow, _possible(workflow, instance_id))
    if if_version is not None and row.version not in if_version:
        raise VersionMismatch(workflow, instance_id, row.version)
    return row


def _read(tx: Tx, workflow: str, instance_id: str) -> InstanceRow:
    return instances.read(tx, workflow, _possible(workflow, instance_id))


def _possible(workflow: str, instance_id: str) -> str:
    """An id that no instance can have is not asked for: databases differ in what they make of a NUL or a number."""
    try:
        values.instance_id(instance_id, values.LONGEST_ID)
    except NameInvalid:
        raise InstanceNotFound(workflow, instance_id) from None
    if not _can_be_named(workflow):
        raise InstanceNotFound(workflow, instance_id)
    return instance_id


def _can_be_named(workflow: str) -> bool:
    try:
        values.identifier("Workflow name", workflow, values.LONGEST_ID)
    except NameInvalid:
        return False
    return True


def _check_limit(limit: int) -> None:
    if not 1 <= limit <= _LARGEST_PAGE:
        raise ValueRefused(f"A page of {limit} items is not possible: ask for 1 to {_LARGEST_PAGE}.")


def _read_place(cursor: str, kind: str, newest_first: bool) -> Sequence[values.CursorPart]:  # noqa: FBT001  # read aloud
    """The run number and the key of the last item."""
    key: tuple[type[values.CursorPart], ...] = (int, str) if kind == "steps" else (int,)
    number, order, *place = values.read_cursor(cursor, kind, int, str, *key)
    if order != ("d" if newest_first else "a") or (kind == "steps" and cast("int", place[0]) > _LARGEST_RUN):
        raise CursorInvalid(cursor)
    return number, *place
