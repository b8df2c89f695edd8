"""Reading instances: their status, lists of them, and why they do not move."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from celery_durable import values
from celery_durable.explain import Diagnosis, Facts, explain
from celery_durable.model import (
    InstanceDetails,
    InstanceRow,
    InstanceStatus,
    InstanceSummary,
    Page,
    Status,
    StepType,
    VersionedInstance,
)
from celery_durable.operations import links
from celery_durable.operations.context import OperationContext, check_limit, is_possible_workflow_name
from celery_durable.operations.history import get_run
from celery_durable.store import heartbeats, history, instances, labels, outbox
from celery_durable.store.engine import Tx


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

    def details(self, workflow: str, instance_id: str) -> InstanceDetails:
        """Return an instance with its current run and step; raises InstanceNotFound."""

        def work(tx: Tx) -> InstanceDetails:
            versioned = self._context.read_with_tag(tx, workflow, instance_id)
            row = versioned.instance
            record = get_run(tx, row, row.run_number)
            step = history.find_current_step(tx, row.pk, row.run_number)
            return InstanceDetails(
                instance=row,
                tag=versioned.tag,
                status=history.build_status(row.status, record),
                params=json.loads(record.params),
                started_at=record.started_at,
                completed_at=record.completed_at,
                reason=record.reason,
                current_step=None if step is None else links.restrict_steps(tx, self._context.scope, [step])[0],
                labels=labels.read(tx, row.pk),
            )

        return self._context.store.read(work)

    def explain(self, workflow: str, instance_id: str) -> Diagnosis:
        """Explain the state of an instance, from one read of the database; raises InstanceNotFound."""
        return explain(self.facts(workflow, instance_id))

    def facts(self, workflow: str, instance_id: str) -> Facts:
        """Return the facts that `explain` uses; raises InstanceNotFound."""

        def work(tx: Tx) -> Facts:
            row = self._context.read_row(tx, workflow, instance_id)
            open_, last = history.read_open_steps(tx, row.pk, row.run_number)
            open_ = links.restrict_steps(tx, self._context.scope, open_)
            last = None if last is None else links.restrict_steps(tx, self._context.scope, [last])[0]
            buffered = history.read_buffered_types(tx, row.pk, row.run_number)
            run = get_run(tx, row, row.run_number)
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
                parent=links.restrict_parent(tx, self._context.scope, row),
            )

        return self._context.store.read(work)

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
            "scope": self._context.scope,
        }
        cursors = self._context.cursors(
            "instances", workflow, filters["status"], sorted(filters["with_labels"].items())
        )
        before = None if cursor is None else cast("int", cursors.read(cursor)[0])
        if workflow is not None and not is_possible_workflow_name(workflow):
            return Page((), None)
        found = self._context.store.read(
            lambda tx: history.list_instances(tx, **filters, before_pk=before, limit=limit + 1)
        )
        has_more, items = len(found) > limit, found[:limit]
        return Page(tuple(item for _, item in items), cursors.write(items[-1][0]) if has_more else None)
