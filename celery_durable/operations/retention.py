"""Deleting instances that ended long ago, with all their runs."""

from __future__ import annotations

import functools
import logging
from collections.abc import Collection

from celery_durable import values
from celery_durable.errors import ValueRefused
from celery_durable.model import TERMINAL, Count, Scope, Status
from celery_durable.operations.context import OperationContext, is_possible_workflow_name
from celery_durable.store.instances import limit_waits, retention
from celery_durable.store.instances.retention import EndedFilter, Position, PruneBatch
from celery_durable.store.runs.holds import LimitKey

logger = logging.getLogger("celery_durable.retention")

_BATCH, _MAX_EXPIRED_BATCHES = 25, 20
"""Instances in one transaction, and transactions in one call of `delete_expired`."""
_MAX_LIMITS = 1000
_CHECK_SECONDS, _BACKLOG_PAUSE_SECONDS = 60.0, 1.0


class RetentionOperations:
    """The operations that delete instances."""

    def __init__(self, context: OperationContext) -> None:
        self._context = context
        self._last_limit: LimitKey | None = None

    def count_ended(
        self, *, older_than: values.Duration, workflow: str | None = None, statuses: Collection[Status] = TERMINAL
    ) -> Count:
        """Count the instances that `prune` would delete."""
        ended = _select_ended(older_than, workflow, statuses, self._context.scope)
        if ended is None:
            return Count(0)
        return self._context.read_list(functools.partial(retention.count_ended, ended=ended))

    def prune(
        self, *, older_than: values.Duration, workflow: str | None = None, statuses: Collection[Status] = TERMINAL
    ) -> int:
        """Delete instances that ended long ago, with their runs, in small transactions, each of which is kept."""
        ended = _select_ended(older_than, workflow, statuses, self._context.scope)
        if ended is None:
            return 0
        deleted, position = 0, None
        while True:
            batch = self._delete_batch(ended, position)
            deleted, position = deleted + batch.deleted, batch.next_position
            if position is None:
                return deleted

    def _delete_batch(self, ended: EndedFilter, after: Position | None) -> PruneBatch:
        return self._context.store.transact(lambda tx: retention.delete_ended(tx, ended, limit=_BATCH, after=after))

    def delete_expired(self) -> int:
        """Delete a bounded number of instances whose retention is over. Returns how many."""
        deleted = 0
        for _ in range(_MAX_EXPIRED_BATCHES):
            batch = self._context.store.transact(functools.partial(retention.delete_expired, limit=_BATCH))
            deleted += batch
            if batch < _BATCH:
                break
        if deleted:
            logger.info("Deleted %s instances whose retention was over", deleted)
        return deleted

    def run_job(self) -> float:
        """Call `delete_expired`, and delete unused limits. Returns after how many seconds to call it again."""
        delete = functools.partial(limit_waits.delete_unused, after=self._last_limit, limit=_MAX_LIMITS)
        self._last_limit = self._context.store.transact(delete)
        has_more = self.delete_expired() == _BATCH * _MAX_EXPIRED_BATCHES
        return _BACKLOG_PAUSE_SECONDS if has_more else _CHECK_SECONDS


def _select_ended(
    older_than: values.Duration, workflow: str | None, statuses: Collection[Status], scope: Scope | None
) -> EndedFilter | None:
    live = [str(status) for status in statuses if not Status(status).is_terminal]
    if live:
        raise ValueRefused(f"Instances that are {live[0]} cannot be pruned: terminate them first.")
    if workflow is not None and not is_possible_workflow_name(workflow):
        return None
    return EndedFilter(
        values.parse_duration(older_than), workflow, frozenset(Status(status) for status in statuses), scope
    )
