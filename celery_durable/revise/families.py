"""Retry of a family: an errored instance, the children that failed it, and the parents that it failed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from celery_durable import values
from celery_durable.errors import InstanceNotErrored, InstanceNotFound, VersionMismatch
from celery_durable.model import Child, InstanceRow, Status
from celery_durable.operations.context import OperationContext, Versions
from celery_durable.revise.rewind import RewindOperations
from celery_durable.store.engine import Tx, bounds
from celery_durable.store.instances import families, instances
from celery_durable.store.runs import runs


class FamilyOperations:
    """The operations that retry an instance and its family, each member in its own transaction.

    The scope of the caller limits which instance they begin with, not the children of that instance.
    """

    def __init__(self, context: OperationContext) -> None:
        self._context = context
        self._rewind = RewindOperations(dataclasses.replace(context, scope=None))

    def preview_retry(
        self, workflow: str, instance_id: str, *, family: bool = True, if_version: Versions = None
    ) -> list[Child]:
        """Return the instances that `retry` would retry now, in its order; those in the scope of the caller."""

        def work(tx: Tx) -> list[Child]:
            members = self._find_failed(tx, workflow, instance_id, if_version)
            mine = Child(workflow, instance_id)
            visible = bounds.filter_in_scope(tx, self._context.scope, members) if family else {mine}
            return [member for member in members if member in visible]

        return self._context.store.read(work)

    def retry(
        self,
        workflow: str,
        instance_id: str,
        *,
        delay: values.Duration | None = None,
        reason: str | None = None,
        if_version: Versions = None,
    ) -> int:
        """Retry an errored instance, the children whose failure ended it, and the parents that it ended.

        A parent waits for the same children again. If this process dies in between, a call for the parent continues: it
        waits for a child that was retried already, or takes its outcome. Returns the number of the instance's new run.
        """
        number = 0
        for member in self._context.store.read(lambda tx: self._find_failed(tx, workflow, instance_id, if_version)):
            is_it = member == Child(workflow, instance_id)
            try:
                started = self._rewind.retry(
                    member.workflow,
                    member.instance_id,
                    delay=delay,
                    reason=reason,
                    if_version=if_version if is_it else None,
                    keeps_children=True,
                )
            except (InstanceNotErrored, InstanceNotFound):  # another process has retried or deleted it meanwhile
                if is_it:
                    raise
            else:
                number = started if is_it else number
        return number

    def _find_failed(self, tx: Tx, workflow: str, instance_id: str, if_version: Versions) -> list[Child]:
        """Return the errored members of a family, children before their parents."""
        found = self._context.read_with_tag(tx, workflow, instance_id)
        if if_version is not None and found.tag not in if_version:
            raise VersionMismatch(workflow, instance_id)
        if found.instance.status is not Status.ERRORED:
            raise InstanceNotErrored(workflow, instance_id, found.instance.status)
        return list(_find_failed_descendants(tx, self._find_oldest(tx, found.instance)))

    def _find_oldest(self, tx: Tx, row: InstanceRow) -> InstanceRow:
        """Return the oldest ancestor that failed because of this instance, or the instance itself."""
        while (step := instances.find_parent_step(tx, row.pk)) is not None:
            try:
                parent = self._context.read_row(tx, step.workflow, step.instance_id)
            except InstanceNotFound:  # out of the caller's scope
                return row
            if row.pk not in [child.pk for child in _find_failed_children(tx, parent)]:
                return row
            row = parent
        return row


def _find_failed_children(tx: Tx, parent: InstanceRow) -> list[InstanceRow]:
    """Return the errored children whose failure ended the run of this instance."""
    if parent.status is not Status.ERRORED:
        return []
    children = families.read_children(tx, parent, runs.read_source(tx, parent).find_failed_child_steps())
    return [each.instance for each in children if each.instance.status is Status.ERRORED]


def _find_failed_descendants(tx: Tx, row: InstanceRow) -> Iterator[Child]:
    """Yield the failed children, theirs before them, and the instance itself."""
    for child in _find_failed_children(tx, row):
        yield from _find_failed_descendants(tx, child)
    yield Child(row.workflow, row.instance_id)
