"""Reading instances: their status, their history, their logs, and why they do not move."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

from celery_durable import values
from celery_durable.errors import (
    CursorInvalid,
    RunNotFound,
)
from celery_durable.explain import Diagnosis, Facts, explain
from celery_durable.model import (
    Child,
    EventRecord,
    History,
    HistoryPage,
    InstanceDetails,
    InstanceRow,
    InstanceStatus,
    InstanceSummary,
    LogLevel,
    LogRecord,
    Origin,
    Page,
    ParentStep,
    Published,
    Status,
    StepRecord,
    StepType,
    VersionedInstance,
    parse_child_event_type,
)
from celery_durable.operations.base import OperationsBase, check_limit, is_possible_workflow_name, require_possible_id
from celery_durable.store import heartbeats, history, instances, interventions, labels, outbox, published_values, scopes
from celery_durable.store.engine import Tx

T = TypeVar("T")
_MAX_RUN_NUMBER = 2**31 - 1
"""Also the largest position of a step: both columns have 32 bits."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """An instance at one moment: its row, and the status that users see."""

    instance: InstanceRow
    status: InstanceStatus


class QueryOperations(OperationsBase):
    """The operations that read."""

    def get(self, workflow: str, instance_id: str) -> Snapshot:
        """Return an instance and its current status; raises InstanceNotFound."""

        def work(tx: Tx) -> Snapshot:
            row = self._read_row(tx, workflow, instance_id)
            return Snapshot(row, history.build_status(row.status, self._get_run(tx, row, row.run_number)))

        return self._store.read(work)

    def read(self, workflow: str, instance_id: str) -> InstanceRow:
        """Return only the instance's row, for callers that poll; raises InstanceNotFound."""
        return self._store.read(lambda tx: self._read_row(tx, workflow, instance_id))

    def read_with_tag(self, workflow: str, instance_id: str) -> VersionedInstance:
        """Return only the instance's row and version tag, for clients that poll; raises InstanceNotFound."""
        return self._store.read(lambda tx: self._read_with_tag(tx, workflow, instance_id))

    def _read_with_tag(self, tx: Tx, workflow: str, instance_id: str) -> VersionedInstance:
        found = instances.read_with_tag(tx, workflow, require_possible_id(workflow, instance_id))
        self._check_in_scope(tx, found.instance)
        return found

    def details(self, workflow: str, instance_id: str) -> InstanceDetails:
        """Return an instance with its current run and step; raises InstanceNotFound."""

        def work(tx: Tx) -> InstanceDetails:
            versioned = self._read_with_tag(tx, workflow, instance_id)
            row = versioned.instance
            record = self._get_run(tx, row, row.run_number)
            step = history.find_current_step(tx, row.pk, row.run_number)
            return InstanceDetails(
                instance=row,
                tag=versioned.tag,
                status=history.build_status(row.status, record),
                params=json.loads(record.params),
                started_at=record.started_at,
                completed_at=record.completed_at,
                reason=record.reason,
                current_step=None if step is None else self._restrict_steps(tx, [step])[0],
                labels=labels.read(tx, row.pk),
            )

        return self._store.read(work)

    def outcome(self, workflow: str, instance_id: str, *, run: int) -> InstanceStatus:
        """Return the status or the outcome of one run; raises InstanceNotFound, RunNotFound."""

        def work(tx: Tx) -> InstanceStatus:
            row = self._read_row(tx, workflow, instance_id)
            record = self._get_run(tx, row, run)
            return history.build_status(history.derive_run_status(row, record), record)

        return self._store.read(work)

    def steps(
        self, workflow: str, instance_id: str, *, run: int, after: tuple[int, str] | None = None, limit: int = 100
    ) -> list[tuple[int, StepRecord]]:
        """Return a page of the steps of a run, in call order.

        Args:
            workflow: The workflow's name.
            instance_id: The instance's id.
            run: The number of the run.
            after: The position and the key of the last step of the page before; None starts at the first step.
            limit: The largest number of steps to return.

        Returns:
            Pairs of a step's position and the step.

        Raises:
            InstanceNotFound: No instance has this id.
        """

        def work(tx: Tx) -> list[tuple[int, StepRecord]]:
            found = history.read_step_page(
                tx, self._read_row(tx, workflow, instance_id).pk, run, after=after, limit=limit
            )
            shown = self._restrict_steps(tx, [record for _, record in found])
            return [(seq, record) for (seq, _), record in zip(found, shown, strict=True)]

        return self._store.read(work)

    def history(self, workflow: str, instance_id: str, *, run: int | None = None) -> History:
        """Return one run with all its steps and events.

        Args:
            workflow: The workflow's name.
            instance_id: The instance's id.
            run: The number of the run; None means the current one.

        Returns:
            The history.

        Raises:
            InstanceNotFound: No instance has this id.
            RunNotFound: The instance has no such run.
        """

        def work(tx: Tx) -> History:
            row = self._read_row(tx, workflow, instance_id)
            record = self._get_run(tx, row, row.run_number if run is None else run)
            return History(
                workflow=workflow,
                instance_id=instance_id,
                run_number=record.run_number,
                status=history.build_status(history.derive_run_status(row, record), record),
                params=json.loads(record.params),
                created_at=record.created_at,
                started_at=record.started_at,
                completed_at=record.completed_at,
                reason=record.reason,
                steps=tuple(self._restrict_steps(tx, history.read_steps(tx, row.pk, record.run_number))),
                events=self._restrict_events(tx, history.read_events(tx, row.pk, record.run_number)),
                origin=self._restrict_origin(tx, row, record.origin),
                audit=interventions.read_audit(tx, row.pk, record.run_number),
                labels=labels.read(tx, row.pk),
                parent=self._restrict_parent(tx, row),
            )

        return self._store.read(work)

    def explain(self, workflow: str, instance_id: str) -> Diagnosis:
        """Explain the state of an instance, from one read of the database; raises InstanceNotFound."""
        return explain(self.facts(workflow, instance_id))

    def facts(self, workflow: str, instance_id: str) -> Facts:
        """Return the facts that `explain` uses; raises InstanceNotFound."""

        def work(tx: Tx) -> Facts:
            row = self._read_row(tx, workflow, instance_id)
            open_, last = history.read_open_steps(tx, row.pk, row.run_number)
            open_ = tuple(self._restrict_steps(tx, open_))
            last = None if last is None else self._restrict_steps(tx, [last])[0]
            buffered = history.read_buffered_types(tx, row.pk, row.run_number)
            run = self._get_run(tx, row, row.run_number)
            now, beats = heartbeats.read(tx)
            return Facts(
                now,
                row,
                run,
                open_steps=open_,
                last_step=last,
                buffered=buffered,
                heartbeats=beats,
                answered=history.count_answered_tasks(tx, row.pk, row.run_number),
                unsent=outbox.find_existing(tx, [step.task_id for step in open_ if step.task_id is not None]),
                unsent_items=outbox.count_by_step(
                    tx, row.pk, row.run_number, [step.step_key for step in open_ if step.type is StepType.MAP]
                ),
                children=instances.read_statuses(tx, [step.child for step in open_ if step.child is not None]),
                parent=self._restrict_parent(tx, row),
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
        """Return a page of a run's steps, events and log lines. Each list has its own cursor.

        A cursor belongs to one run, order and filter. Without ``run``, a cursor continues with its own run, even after
        a restart.

        Args:
            workflow: The workflow's name.
            instance_id: The instance's id.
            run: The number of the run; None means the current one.
            limit: The largest number of items to return in each list, 1 to 1000.
            newest_first: Whether to reverse the order of the lists.
            steps_cursor: Continues the steps of an earlier page.
            events_cursor: Continues the events of an earlier page.
            logs_cursor: Continues the log lines of an earlier page.
            with_logs: Whether to return log lines.
            with_audit: Whether to return all manual changes to steps.
            levels: Return only log lines of these levels.
            category: Return only log lines of this category.

        Returns:
            The run and the pages.

        Raises:
            InstanceNotFound: No instance has this id.
            RunNotFound: The instance has no such run.
            CursorInvalid: A cursor belongs to another run, order, filter or caller.
            ValueRefused: ``limit`` is out of range.
        """
        check_limit(limit)
        given = {"steps": steps_cursor, "events": events_cursor, "logs": logs_cursor}
        lists = self._history_cursors(workflow, instance_id, newest_first, levels, category)
        after = {kind: lists[kind].read(cursor) for kind, cursor in given.items() if cursor is not None}
        for kind, (number, *_) in after.items():
            if run is None:
                run = cast("int", number)
            elif number != run:
                raise CursorInvalid(given[kind])

        def work(tx: Tx) -> HistoryPage:
            row = self._read_row(tx, workflow, instance_id)
            record = self._get_run(tx, row, row.run_number if run is None else run)
            number = record.run_number

            def page(kind: str, found: Sequence[T], key: Callable[[T], tuple[values.CursorPart, ...]]) -> Page[T]:
                items = tuple(found[:limit])
                more = lists[kind].write(number, *key(items[-1])) if len(found) > limit else None
                return Page(items, more)

            options: dict[str, Any] = {"newest_first": newest_first, "limit": limit + 1}
            last_step = cast("tuple[int, str] | None", after["steps"][1:] if "steps" in after else None)
            found = page(
                "steps",
                history.read_step_page(tx, row.pk, number, after=last_step, **options),
                lambda item: (item[0], item[1].step_key),
            )
            last_event = cast("int | None", after["events"][1] if "events" in after else None)
            last_log = cast("int | None", after["logs"][1] if "logs" in after else None)
            log_filter: dict[str, Any] = {"after_id": last_log, "levels": levels, "category": category}
            return HistoryPage(
                run_number=number,
                status=history.build_status(history.derive_run_status(row, record), record),
                params=json.loads(record.params),
                created_at=record.created_at,
                started_at=record.started_at,
                completed_at=record.completed_at,
                reason=record.reason,
                steps=Page(tuple(self._restrict_steps(tx, [record for _, record in found.items])), found.cursor),
                events=page(
                    "events",
                    self._restrict_events(tx, history.read_events(tx, row.pk, number, after=last_event, **options)),
                    lambda event: (event.seq,),
                ),
                logs=page(
                    "logs", history.read_logs(tx, row.pk, number, **log_filter, **options), lambda line: (line.id,)
                )
                if with_logs
                else None,
                origin=self._restrict_origin(tx, row, record.origin),
                audit=interventions.read_audit(tx, row.pk, number) if with_audit else (),
                labels=labels.read(tx, row.pk),
                parent=self._restrict_parent(tx, row),
            )

        return self._store.read(work)

    def _history_cursors(
        self,
        workflow: str,
        instance_id: str,
        newest_first: bool,  # noqa: FBT001  # only called here, with names that match
        levels: Sequence[LogLevel] | None,
        category: str | None,
    ) -> dict[str, values.Cursors]:
        """Return the cursors of each list of a history. The run is part of a cursor's text."""
        filters: dict[str, tuple[object, ...]] = {"steps": (), "events": (), "logs": (levels, category)}
        list_key = (workflow, instance_id, newest_first)
        return {kind: self._cursors(kind, *list_key, *list_filter) for kind, list_filter in filters.items()}

    def stream_cursors(self, workflow: str, instance_id: str) -> values.Cursors:
        """Return the cursors that mark how far a client has followed an instance."""
        return self._cursors("stream", workflow, instance_id)

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
        """Return the log lines of a run.

        Args:
            workflow: The workflow's name.
            instance_id: The instance's id.
            run: The number of the run; None means the current one.
            after_id: Return only lines with a greater id.
            limit: The largest number of lines to return.
            levels: Return only lines of these levels.
            category: Return only lines of this category.

        Returns:
            The log lines, oldest first.

        Raises:
            InstanceNotFound: No instance has this id.
        """

        def work(tx: Tx) -> list[LogRecord]:
            row = self._read_row(tx, workflow, instance_id)
            number = row.run_number if run is None else run
            return history.read_logs(
                tx, row.pk, number, after_id=after_id, limit=limit, levels=levels, category=category
            )

        return self._store.read(work)

    def published(self, workflow: str, instance_id: str, *, run: int | None = None) -> dict[str, Published]:
        """Return the values that a run has published.

        Args:
            workflow: The workflow's name.
            instance_id: The instance's id.
            run: The number of the run; None means the current one.

        Returns:
            The values by key.

        Raises:
            InstanceNotFound: No instance has this id.
            RunNotFound: The instance has no such run.
        """

        def work(tx: Tx) -> dict[str, Published]:
            row = self._read_row(tx, workflow, instance_id)
            if run is not None:
                self._get_run(tx, row, run)
            return published_values.read(tx, row.pk, row.run_number if run is None else run)

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
        """Return a page of instances, newest first.

        Args:
            workflow: Return only instances of this workflow.
            status: Return only instances in this status.
            cursor: Continues an earlier page with the same filter.
            limit: The largest number of instances to return, 1 to 1000.
            labels: Return only instances that have all of these labels.

        Returns:
            The page; its ``cursor`` is None if it is the last one.

        Raises:
            CursorInvalid: The cursor belongs to another filter or caller.
            InvalidLabel: A label breaks the rules for labels.
            TooManyLabels: There are too many labels.
            ValueRefused: ``limit`` is out of range.
        """
        check_limit(limit)
        filters: dict[str, Any] = {
            "workflow": workflow,
            "status": None if status is None else Status(status),
            "with_labels": values.check_labels(labels),
            "scope": self._scope,
        }
        cursors = self._cursors("instances", workflow, filters["status"], sorted(filters["with_labels"].items()))
        before = None if cursor is None else cast("int", cursors.read(cursor)[0])
        if workflow is not None and not is_possible_workflow_name(workflow):
            return Page((), None)
        found = self._store.read(lambda tx: history.list_instances(tx, **filters, before_pk=before, limit=limit + 1))
        has_more, items = len(found) > limit, found[:limit]
        return Page(tuple(item for _, item in items), cursors.write(items[-1][0]) if has_more else None)

    def _restrict_steps(self, tx: Tx, steps: Sequence[StepRecord]) -> Sequence[StepRecord]:
        """Remove the links of steps to instances that are outside the caller's scope."""
        children = {step.child for step in steps if step.child is not None}
        hidden = children - scopes.filter_in_scope(tx, self._scope, children)
        return [replace(step, child=None) if step.child in hidden else step for step in steps]

    def _restrict_events(self, tx: Tx, events: Sequence[EventRecord]) -> tuple[EventRecord, ...]:
        """Remove the child's id from the types of answer events, as `_restrict_steps` removes the links."""
        if self._scope is None:
            return tuple(events)
        children = {
            event.seq: Child(*found) for event in events if (found := parse_child_event_type(event.type)) is not None
        }
        hidden = set(children.values()) - scopes.filter_in_scope(tx, self._scope, set(children.values()))
        return tuple(
            replace(event, type=f"{event.type.partition('/')[0]}/") if children.get(event.seq) in hidden else event
            for event in events
        )

    def _restrict_origin(self, tx: Tx, row: InstanceRow, origin: Origin | None) -> Origin | None:
        if origin is None or origin.instance_id == row.instance_id:
            return origin
        instance = Child(row.workflow, origin.instance_id)
        return origin if instance in scopes.filter_in_scope(tx, self._scope, [instance]) else None

    def _restrict_parent(self, tx: Tx, row: InstanceRow) -> ParentStep | None:
        parent = instances.find_parent_step(tx, row.pk)
        if parent is None:
            return None
        instance = Child(parent.workflow, parent.instance_id)
        return parent if instance in scopes.filter_in_scope(tx, self._scope, [instance]) else None

    @staticmethod
    def _get_run(tx: Tx, row: InstanceRow, number: int) -> Any:
        found = history.read_run(tx, row.pk, number) if number <= _MAX_RUN_NUMBER else None
        if found is None:
            raise RunNotFound(row.workflow, row.instance_id, number, row.run_number)
        return found
