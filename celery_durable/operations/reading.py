"""Reading instances: where they stand, what they did, and why they do not move."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from celery_durable import values
from celery_durable.errors import (
    CursorInvalid,
    RunNotFound,
)
from celery_durable.explain import Diagnosis, Facts, explain
from celery_durable.model import (
    History,
    HistoryPage,
    InstanceDetails,
    InstanceRow,
    InstanceStatus,
    InstanceSummary,
    LogLevel,
    LogRecord,
    Page,
    Published,
    Status,
    StepRecord,
    StepType,
)
from celery_durable.operations.verbs import Verbs, can_be_named, check_limit, read_row
from celery_durable.store import heartbeats, history, instances, interventions, labels, outbox, published
from celery_durable.store.engine import Tx

T = TypeVar("T")
_LARGEST_RUN = 2**31 - 1
"""And the largest place of a step: both columns are of 32 bits."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """An instance at one moment: its row, and the status people see."""

    instance: InstanceRow
    status: InstanceStatus


class Reading(Verbs):
    """The verbs that read."""

    def get(self, workflow: str, instance_id: str) -> Snapshot:
        """An instance and its status now; raises InstanceNotFound."""

        def work(tx: Tx) -> Snapshot:
            row = read_row(tx, workflow, instance_id)
            return Snapshot(row, history.status_of(row.status, self._run(tx, row, row.run_number)))

        return self._store.read(work)

    def read(self, workflow: str, instance_id: str) -> InstanceRow:
        """The instance's row and nothing else, for who looks often; raises InstanceNotFound."""
        return self._store.read(lambda tx: read_row(tx, workflow, instance_id))

    def details(self, workflow: str, instance_id: str) -> InstanceDetails:
        """An instance with its current run and step; raises InstanceNotFound."""

        def work(tx: Tx) -> InstanceDetails:
            row = read_row(tx, workflow, instance_id)
            record = self._run(tx, row, row.run_number)
            return InstanceDetails(
                instance=row,
                status=history.status_of(row.status, record),
                params=json.loads(record.params),
                started_at=record.started_at,
                completed_at=record.completed_at,
                reason=record.reason,
                current_step=history.current_step(tx, row.pk, row.run_number),
                labels=labels.of(tx, row.pk),
            )

        return self._store.read(work)

    def outcome(self, workflow: str, instance_id: str, *, run: int) -> InstanceStatus:
        """How a run stands, or what became of it; raises InstanceNotFound, RunNotFound."""

        def work(tx: Tx) -> InstanceStatus:
            row = read_row(tx, workflow, instance_id)
            record = self._run(tx, row, run)
            return history.status_of(history.past_status(row, record), record)

        return self._store.read(work)

    def steps(
        self, workflow: str, instance_id: str, *, run: int, after: tuple[int, str] | None = None, limit: int = 100
    ) -> list[tuple[int, StepRecord]]:
        """Up to ``limit`` steps of a run in call order, after (place in it, step key); with their places."""

        def work(tx: Tx) -> list[tuple[int, StepRecord]]:
            return history.step_page(tx, read_row(tx, workflow, instance_id).pk, run, after=after, limit=limit)

        return self._store.read(work)

    def history(self, workflow: str, instance_id: str, *, run: int | None = None) -> History:
        """The steps and events of a run (None: the current one); raises InstanceNotFound, RunNotFound."""

        def work(tx: Tx) -> History:
            row = read_row(tx, workflow, instance_id)
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
                origin=record.origin,
                audit=interventions.audit(tx, row.pk, record.run_number),
                labels=labels.of(tx, row.pk),
            )

        return self._store.read(work)

    def explain(self, workflow: str, instance_id: str) -> Diagnosis:
        """Why an instance stands where it stands, from one look at the database; raises InstanceNotFound."""
        return explain(self.facts(workflow, instance_id))

    def facts(self, workflow: str, instance_id: str) -> Facts:
        """What `explain` rests on; raises InstanceNotFound."""

        def work(tx: Tx) -> Facts:
            row = read_row(tx, workflow, instance_id)
            open_, last = history.open_steps(tx, row.pk, row.run_number)
            buffered = history.buffered_types(tx, row.pk, row.run_number)
            run = self._run(tx, row, row.run_number)
            now, beats = heartbeats.read(tx)
            return Facts(
                now,
                row,
                run,
                open_steps=open_,
                last_step=last,
                buffered=buffered,
                heartbeats=beats,
                answered=history.answered_tasks(tx, row.pk, row.run_number),
                unsent=outbox.present(tx, [step.task_id for step in open_ if step.task_id is not None]),
                unsent_items=outbox.count_by_step(
                    tx, row.pk, row.run_number, [step.step_key for step in open_ if step.type is StepType.MAP]
                ),
                children=instances.statuses(tx, [step.child for step in open_ if step.child is not None]),
            )

        return self._store.read(work)

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
        with_audit: bool = False,
        levels: Sequence[LogLevel] | None = None,
        category: str | None = None,
    ) -> HistoryPage:
        """A page of a run's steps, events and, if asked for, logs, each with a cursor of its own.

        ``with_audit``: also all that people did to its steps.

        A cursor belongs to a run and an order: without ``run`` it goes on with its own run, also after a restart.
        Raises InstanceNotFound, RunNotFound, CursorInvalid.
        """
        check_limit(limit)
        given = {"steps": steps_cursor, "events": events_cursor, "logs": logs_cursor}
        after = {kind: _read_place(cursor, kind, newest_first) for kind, cursor in given.items() if cursor is not None}
        for kind, (number, *_) in after.items():
            if run is None:
                run = cast("int", number)
            elif number != run:
                raise CursorInvalid(given[kind])

        def work(tx: Tx) -> HistoryPage:
            row = read_row(tx, workflow, instance_id)
            record = self._run(tx, row, row.run_number if run is None else run)
            number = record.run_number

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
                status=history.status_of(history.past_status(row, record), record),
                params=json.loads(record.params),
                created_at=record.created_at,
                started_at=record.started_at,
                completed_at=record.completed_at,
                reason=record.reason,
                steps=Page(tuple(record for _, record in found.items), found.cursor),
                events=page(
                    "events",
                    history.events(tx, row.pk, number, after=last_event, **options),
                    lambda event: (event.seq,),
                ),
                logs=page("logs", history.logs(tx, row.pk, number, **narrowed, **options), lambda line: (line.id,))
                if with_logs
                else None,
                origin=record.origin,
                audit=interventions.audit(tx, row.pk, number) if with_audit else (),
                labels=labels.of(tx, row.pk),
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
            row = read_row(tx, workflow, instance_id)
            number = row.run_number if run is None else run
            return history.logs(tx, row.pk, number, after_id=after_id, limit=limit, levels=levels, category=category)

        return self._store.read(work)

    def published(self, workflow: str, instance_id: str, *, run: int | None = None) -> dict[str, Published]:
        """What a run (None: the current one) has published, by key; raises InstanceNotFound, RunNotFound."""

        def work(tx: Tx) -> dict[str, Published]:
            row = read_row(tx, workflow, instance_id)
            if run is not None:
                self._run(tx, row, run)
            return published.read(tx, row.pk, row.run_number if run is None else run)

        return self._store.read(work)

    def list(
        self,
        workflow: str | None = None,
        *,
        status: Status | None = None,
        cursor: str | None = None,
        limit: int = 25,
        labels: Mapping[str, str] | None = None,
    ) -> Page[InstanceSummary]:
        """Instances, newest first; ``cursor`` continues an earlier page. ``labels``: only those that have all of these.

        Raises CursorInvalid, InvalidLabel, TooManyLabels.
        """
        check_limit(limit)
        before = None if cursor is None else cast("int", values.read_cursor(cursor, "i", int)[0])
        chosen: dict[str, Any] = {
            "workflow": workflow,
            "status": None if status is None else Status(status),
            "labelled": values.labels(labels),
        }
        if workflow is not None and not can_be_named(workflow):
            return Page((), None)
        found = self._store.read(lambda tx: history.instances(tx, **chosen, before_pk=before, limit=limit + 1))
        more = found[limit:]
        items = found[:limit]
        return Page(tuple(item for _, item in items), values.write_cursor("i", items[-1][0]) if more else None)

    @staticmethod
    def _run(tx: Tx, row: InstanceRow, number: int) -> Any:
        found = history.run(tx, row.pk, number) if number <= _LARGEST_RUN else None
        if found is None:
            raise RunNotFound(row.workflow, row.instance_id, number, row.run_number)
        return found


def _read_place(cursor: str, kind: str, newest_first: bool) -> Sequence[values.CursorPart]:  # noqa: FBT001  # read aloud
    """The run number and the key of the last item."""
    key: tuple[type[values.CursorPart], ...] = (int, str) if kind == "steps" else (int,)
    number, order, *place = values.read_cursor(cursor, kind, int, str, *key)
    if order != ("d" if newest_first else "a") or (kind == "steps" and cast("int", place[0]) > _LARGEST_RUN):
        raise CursorInvalid(cursor)
    return number, *place
