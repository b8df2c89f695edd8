"""Reading instances: their status, lists of them, and why they do not move."""

from __future__ import annotations

import itertools
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from celery_durable import values
from celery_durable.errors import ValueRefused
from celery_durable.insight.explain import Diagnosis, Facts, explain
from celery_durable.insight.history import get_run
from celery_durable.model import (
    Child,
    Count,
    InstanceDetails,
    InstanceMeta,
    InstanceRow,
    InstanceStatus,
    InstanceSummary,
    LimitWait,
    Page,
    Status,
    StepRecord,
    VersionedInstance,
)
from celery_durable.operations import context
from celery_durable.operations.context import (
    OperationContext,
    check_limit,
    is_possible_id,
    is_possible_workflow_name,
    read_status,
)
from celery_durable.store import heartbeats
from celery_durable.store.engine import Tx, bounds, server_info
from celery_durable.store.instances import families, instances, limit_reads, lists
from celery_durable.store.instances.lists import InstanceFilter, InstanceList
from celery_durable.store.runs import attempts, history, outbox, runs

_MAX_TASK_QUEUES = 10
_MAX_WORKFLOWS = 200
"""In how many workflows an id is searched."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """An instance at one moment: its row, and the status that users see."""

    instance: InstanceRow
    status: InstanceStatus


class QueryOperations:
    """The operations that read instances."""

    def __init__(self, context: OperationContext) -> None:
        self._context = context

    def get(self, workflow: str, instance_id: str) -> Snapshot:
        """Return an instance and its current status; raises InstanceNotFound."""

        def work(tx: Tx) -> Snapshot:
            row = self._context.read_row(tx, workflow, instance_id)
            return Snapshot(row, history.build_status(row.status, get_run(tx, row, row.run_number)))

        return self._context.store.read(work)

    def read(self, workflow: str, instance_id: str) -> InstanceRow:
        """Return only the instance's row, for callers that poll; raises InstanceNotFound."""
        return self._context.store.read(lambda tx: self._context.read_row(tx, workflow, instance_id))

    def read_with_tag(self, workflow: str, instance_id: str) -> VersionedInstance:
        """Return only the instance's row and version tag, for clients that poll; raises InstanceNotFound."""
        return self._context.store.read(lambda tx: self._context.read_with_tag(tx, workflow, instance_id))

    def details(self, workflow: str, instance_id: str) -> tuple[str, InstanceDetails]:
        """Return an instance's version tag, and the instance with its current run; raises InstanceNotFound."""

        def work(tx: Tx) -> tuple[str, InstanceDetails]:
            versioned = self._context.read_with_tag(tx, workflow, instance_id)
            row = versioned.instance
            record = get_run(tx, row, row.run_number)
            step = lists.find_current_step(tx, row.pk, row.run_number)
            meta = InstanceMeta(
                workflow=workflow,
                run_number=row.run_number,
                params=json.loads(record.params),
                labels=instances.read_labels(tx, row.pk),
                created_at=row.created_at,
                updated_at=row.updated_at,
                started_at=record.started_at,
                completed_at=record.completed_at,
                cancel_requested_at=record.cancel_requested_at,
                reason=record.reason,
                pause_requested=row.pause_requested and record.cancel_requested_at is None,
                max_run=row.max_run,
                current_step=None if step is None else context.restrict_steps(tx, self._context.scope, [step])[0],
                running=row.running,
                worker=row.claimed_by,
            )
            status = history.build_status(row.status, record)
            return versioned.tag, InstanceDetails(id=instance_id, details=status, meta=meta)

        return self._context.store.read(work)

    def explain(self, workflow: str, instance_id: str) -> Diagnosis:
        """Explain the state of an instance, from one read of the database; raises InstanceNotFound."""
        return explain(self.facts(workflow, instance_id))

    def facts(self, workflow: str, instance_id: str) -> Facts:
        """Return the facts that `explain` uses; raises InstanceNotFound."""
        definition = self._context.registry.find(workflow)

        def work(tx: Tx) -> Facts:
            row = self._context.read_row(tx, workflow, instance_id)
            open_, last = history.read_open_steps(tx, row.pk, row.run_number)
            open_ = context.restrict_steps(tx, self._context.scope, open_)
            last = None if last is None else context.restrict_steps(tx, self._context.scope, [last])[0]
            buffered = history.read_buffered_types(tx, row.pk, row.run_number)
            run = get_run(tx, row, row.run_number)
            last_attempt = next(iter(attempts.read(tx, row.pk, row.run_number, newest_first=True, limit=1)), None)
            now, beats = heartbeats.read(tx)
            return Facts(
                now,
                row,
                run,
                open_steps=open_,
                last_step=last,
                cancellation=runs.find_raised_cancellation(tx, row.pk, row.run_number),
                last_attempt=last_attempt,
                limit_waits=self._find_limit_waits(tx, row, open_),
                buffered=buffered,
                heartbeats=beats,
                is_read_only=server_info.is_read_only(tx),
                locker=server_info.find_locker(tx, row.pk),
                dispatcher=self._context.settings.dispatcher,
                lease=self._context.settings.lease,
                is_execution_enabled=self._context.settings.is_execution_enabled,
                answered=history.count_answered_tasks(tx, row.pk, row.run_number),
                unsent=outbox.find_existing(tx, [step.task_id for step in open_ if step.task_id is not None]),
                unsent_items=outbox.count_by_step(
                    tx, row.pk, row.run_number, [step.step_key for step in open_ if step.items is not None]
                ),
                failed_children=self._find_failed_children(tx, row),
                children=instances.read_statuses(tx, [step.child for step in open_ if step.child is not None]),
                parent=context.restrict_parent(tx, self._context.scope, row),
                task_queues=self._find_task_queues(tx, row, open_),
                is_known_here=definition is not None,
                max_run_duration=None if definition is None else definition.max_run_duration,
            )

        return self._context.store.read(work)

    def _find_failed_children(self, tx: Tx, row: InstanceRow) -> tuple[tuple[Child, Status], ...]:
        """Return the first two children whose failure ended the run, if a retry keeps them and the caller sees them."""
        if row.status is not Status.ERRORED:
            return ()
        steps = runs.read_source(tx, row).find_failed_child_steps()
        read = (each.instance for each in families.read_children(tx, row, steps))
        kept = (
            (Child(each.workflow, each.instance_id), each.status) for each in read if each.status != Status.TERMINATED
        )
        visible = (each for each in kept if bounds.filter_in_scope(tx, self._context.scope, [each[0]]))
        return tuple(itertools.islice(visible, 2))

    def _find_limit_waits(self, tx: Tx, row: InstanceRow, steps: Sequence[StepRecord]) -> tuple[LimitWait, ...]:
        if self._context.scope is not None or not any(
            step.waits_for_limits or step.items is not None for step in steps
        ):
            return ()
        return tuple(limit_reads.find_waits(tx, row.pk, row.run_number))

    def _find_task_queues(self, tx: Tx, row: InstanceRow, steps: Sequence[StepRecord]) -> dict[str, str]:
        """Return the queues of the tasks of the first steps that wait for tasks, by step key, where known."""
        found: dict[str, str] = {}
        waiting = [step.step_key for step in steps if step.task is not None]
        for step_key in waiting[:_MAX_TASK_QUEUES]:
            sent = history.find_sent_task(tx, row.pk, row.run_number, step_key)
            queue = None if sent is None else sent[0] or self._context.find_task_queue(sent[1])
            if queue is not None:
                found[step_key] = queue
        return found

    def list(
        self,
        workflow: str | None = None,
        *,
        status: Status | str | None = None,
        cursor: str | None = None,
        limit: int = 25,
        labels: Mapping[str, str] | None = None,
    ) -> Page[InstanceSummary]:
        """Return a page of instances, newest first."""
        check_limit(limit)
        chosen = InstanceFilter(
            workflow, None if status is None else read_status(status), values.check_labels(labels), self._context.scope
        )
        cursors = self._context.cursors("instances", workflow, chosen.status, sorted(chosen.labels.items()))
        before = None if cursor is None else cast("int", cursors.read(cursor)[0])
        if workflow is not None and not is_possible_workflow_name(workflow):
            return Page((), None)

        def work(tx: Tx) -> InstanceList:
            found = lists.read_page(tx, chosen, before_pk=before, limit=limit)
            return InstanceList([*self._restrict_steps(tx, found.items)], found.next_pk)

        found = self._context.read_list(work)
        return Page(tuple(found.items), None if found.next_pk is None else cursors.write(found.next_pk))

    def find(self, instance_id: str, workflows: Collection[str]) -> Sequence[InstanceSummary]:
        """Return the instances with this id of some workflows, newest first."""
        if len(workflows) > _MAX_WORKFLOWS:
            raise ValueRefused(f"There are {len(workflows)} workflows: choose one, or search for workflow/id.")
        names = [name for name in workflows if is_possible_id(name, instance_id)]

        def work(tx: Tx) -> Sequence[InstanceSummary]:
            found = lists.read_named(tx, names, instance_id, self._context.scope)
            return self._restrict_steps(tx, found)

        return self._context.read_list(work) if names else []

    def _restrict_steps(self, tx: Tx, found: Sequence[InstanceSummary]) -> Sequence[InstanceSummary]:
        """Return summaries without what the current steps say of instances outside the caller's scope."""
        steps = [item.current_step for item in found if item.current_step is not None]
        shown = iter(context.restrict_steps(tx, self._context.scope, steps))
        return [item if item.current_step is None else replace(item, current_step=next(shown)) for item in found]

    def count(
        self,
        workflow: str | None = None,
        *,
        status: Status | str | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> Count:
        """Count the instances that `list` returns for this filter."""
        chosen = InstanceFilter(
            workflow, None if status is None else read_status(status), values.check_labels(labels), self._context.scope
        )
        if workflow is not None and not is_possible_workflow_name(workflow):
            return Count(0)
        return self._context.read_list(lambda tx: lists.count(tx, chosen))
