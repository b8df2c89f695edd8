"""Reading instances: their status, lists of them, and why they do not move."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from celery_durable import values
from celery_durable.errors import ValueRefused
from celery_durable.insight.explain import Diagnosis, Facts, explain
from celery_durable.insight.stats import Health
from celery_durable.model import (
    RUNNABLE,
    Count,
    InstanceDetails,
    InstanceHead,
    InstanceMeta,
    InstanceRow,
    InstanceStatus,
    InstanceSummary,
    ItemStatus,
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
from celery_durable.store.engine import Tx, server_info
from celery_durable.store.instances import families, instances, limit_reads, lists
from celery_durable.store.instances.lists import InstanceFilter, InstanceList
from celery_durable.store.runs import attempts, history, items, outbox, runs

_MAX_TASK_QUEUES, _MAX_UNSENT = 10, 1_000
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
            head = self._context.read_head(tx, workflow, instance_id)
            return Snapshot(head.instance, history.build_status(head.instance.status, head.run))

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
            head = self._context.read_head(tx, workflow, instance_id)
            row, record = head.instance, head.run
            tag = instances.read_version_tag(tx, row)  # before the steps, so that it never names a step that is missing
            step = lists.find_current_step(tx, row.pk, row.run_number)
            meta = InstanceMeta(
                workflow=workflow,
                run_number=row.run_number,
                params=json.loads(record.params),
                labels=head.labels,
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
            return tag, InstanceDetails(id=instance_id, details=status, meta=meta)

        return self._context.store.read(work)

    def explain(self, workflow: str, instance_id: str) -> Diagnosis:
        """Explain the state of an instance, from one read of the database; raises InstanceNotFound."""
        return explain(self.facts(workflow, instance_id))

    def facts(self, workflow: str, instance_id: str, health: Health | None = None) -> Facts:
        """Return the facts that `explain` uses; raises InstanceNotFound. ``health``: if it was just read."""

        def work(tx: Tx) -> Facts:
            return self._read_facts(tx, self._context.read_head(tx, workflow, instance_id), health)

        return self._context.store.read(work)

    def _read_facts(self, tx: Tx, head: InstanceHead, health: Health | None) -> Facts:
        """Read what can matter for the diagnosis of an instance in this state, by one statement for each kind."""
        scope, settings, row = self._context.scope, self._context.settings, head.instance
        of_run, is_failed = (row.pk, head.run.run_number), row.status is Status.ERRORED
        definition = self._context.registry.find(row.workflow)
        found = history.read_open_steps(tx, *of_run, failed=head.failed_steps if is_failed else ())
        open_ = context.restrict_steps(tx, scope, found.open)
        tasks = [step for step in open_ if step.task_id is not None]
        maps = [step for step in open_ if step.items is not None and step.task is not None]
        children = [step.child for step in open_ if step.child is not None]
        has_error = is_failed or row.crash_count > 0 or any(step.error is not None for step in open_)
        is_limited = scope is None and any(step.waits_for_limits or step.items is not None for step in open_)
        was_cancelled = head.run.cancel_requested_at is not None
        is_due = row.status in RUNNABLE and row.claim_token is None and (row.run_at is None or row.run_at <= head.now)
        attempt = next(iter(attempts.read(tx, *of_run, newest_first=True, limit=1)), None) if has_error else None
        return Facts(
            head,
            open_steps=open_,
            last_step=None if found.last is None else context.restrict_steps(tx, scope, [found.last])[0],
            cancellation=runs.find_raised_cancellation(tx, *of_run) if was_cancelled else None,
            last_attempt=attempt,
            limit_waits=tuple(limit_reads.find_waits(tx, *of_run)) if is_limited else (),
            buffered=history.read_buffered_types(tx, *of_run) if any(step.wait_event_type for step in open_) else (),
            heartbeats=heartbeats.read(tx)[1] if health is None else health.heartbeats,
            is_read_only=is_due and (server_info.is_read_only(tx) if health is None else health.is_read_only),
            locker=server_info.find_locker(tx, row.pk) if is_due else None,
            dispatcher=settings.dispatcher,
            lease=settings.lease,
            is_execution_enabled=settings.is_execution_enabled,
            answered=history.count_answered_tasks(tx, *of_run) if tasks else 0,
            unsent=outbox.find_existing(tx, [step.task_id for step in tasks if step.task_id is not None]),
            unsent_items={step.step_key: self._count_unsent(tx, of_run, step) for step in maps[:_MAX_TASK_QUEUES]},
            failed_children=tuple(families.find_failed_children(tx, row, found.failed, scope=scope)),
            children=instances.read_statuses(tx, children),
            task_queues=self._find_task_queues(tx, of_run, [*tasks, *maps][:_MAX_TASK_QUEUES]),
            is_known_here=definition is not None,
            max_run_duration=None if definition is None else definition.max_run_duration,
        )

    @staticmethod
    def _count_unsent(tx: Tx, of_run: tuple[int, int], step: StepRecord) -> Count:
        """Count the tasks of a map that are in the outbox, among the last that were stored: they are sent in order."""
        ids = list(items.find_ids(tx, *of_run, step.step_key, ItemStatus.SENT, limit=_MAX_UNSENT, last=True))
        count = len(outbox.find_existing(tx, ids))
        return Count(count, count < _MAX_UNSENT)

    def _find_task_queues(self, tx: Tx, of_run: tuple[int, int], steps: Sequence[StepRecord]) -> dict[str, str]:
        """Return the queues of the tasks of these steps, by step key, where known."""
        sent = history.find_sent_tasks(tx, *of_run, [step.step_key for step in steps])
        queues = {key: queue or self._context.find_task_queue(task) for key, queue, task in sent}
        return {key: queue for key, queue in queues.items() if queue is not None}

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
