"""The base of all operations: their settings, and access to an instance within the caller's scope."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from typing import Self

from celery_durable import values
from celery_durable.config import Settings
from celery_durable.definitions import Registry
from celery_durable.errors import (
    InstanceNotFound,
    NameInvalid,
    ValueRefused,
    VersionMismatch,
)
from celery_durable.model import (
    DueRun,
    InstanceRow,
    OutboxMessage,
    Scope,
)
from celery_durable.runtime import Runtime
from celery_durable.store import instances, scopes
from celery_durable.store.database_identity import read_database_id
from celery_durable.store.engine import Store, Tx
from celery_durable.values import UNSET

PublishRuns = Callable[[Sequence[DueRun]], None]
Versions = Collection[str] | None
"""The version tags (`VersionedInstance.tag`) that a change applies to; None means any."""
_MAX_PAGE_SIZE = 1000


class OperationsBase:
    """What all operations share: the store, the settings, the caller's scope, and two callbacks.

    After a commit, ``publish_runs`` is called with the runs that became due, and ``send_messages`` with the messages
    that the transaction wrote to the outbox.
    """

    def __init__(
        self,
        store: Store,
        settings: Settings,
        registry: Registry,
        runtime: Runtime,
        publish_runs: PublishRuns,
        *,
        send_messages: Callable[[Sequence[OutboxMessage]], None] = lambda _: None,
    ) -> None:
        self._store, self._settings, self._registry, self._runtime = store, settings, registry, runtime
        self._publish_runs, self._send_messages = publish_runs, send_messages
        self._grace = settings.grace
        self._scope: Scope | None = None

    def restrict_to(self, scope: Scope | None) -> Self:
        """Return the same operations for a caller that may reach only one scope.

        Instances outside the scope are not found.

        Args:
            scope: The scope; None means all instances.

        Returns:
            A copy of these operations.
        """
        found = copy.copy(self)
        found._scope = scope  # noqa: SLF001  # its own
        return found

    def new_id(self) -> str:
        """Return a new random id, with the prefix of the caller's scope."""
        return (self._scope.id_prefix if self._scope is not None else "") + self._runtime.new_id()

    @property
    def scope_text(self) -> str:
        """A text that is equal for callers with the same scope."""
        return "" if self._scope is None else self._scope.to_text()

    def _cursors(self, *of: object) -> values.Cursors:
        """Return the cursors of this list. They are valid only for callers with the same scope."""
        return values.Cursors(self._store.database_id or self._store.read(read_database_id), (*of, self.scope_text))

    def _lock_row(self, tx: Tx, workflow: str, instance_id: str, if_version: Versions = None) -> InstanceRow:
        """Lock and return the instance's row. The lock lasts until the transaction ends.

        Raises:
            InstanceNotFound: No instance in the caller's scope has this id.
            VersionMismatch: The version tag is not in ``if_version``.
        """
        row = instances.lock(tx, workflow, require_possible_id(workflow, instance_id))
        self._check_in_scope(tx, row)
        if if_version is not None and instances.read_version_tag(tx, row) not in if_version:
            raise VersionMismatch(workflow, instance_id)
        return row

    def _read_row(self, tx: Tx, workflow: str, instance_id: str) -> InstanceRow:
        """Return the instance's row without a lock; raises InstanceNotFound."""
        row = instances.read(tx, workflow, require_possible_id(workflow, instance_id))
        self._check_in_scope(tx, row)
        return row

    def _check_in_scope(self, tx: Tx, row: InstanceRow) -> None:
        if not scopes.is_in_scope(tx, self._scope, row.pk):
            raise InstanceNotFound(row.workflow, row.instance_id)

    def _retention(self, workflow: str) -> timedelta | None:
        """Return how long a new instance is kept after its end; None means forever."""
        definition = self._registry.find(workflow)
        return self._settings.retention_of(UNSET if definition is None else definition.retention)


def require_possible_id(workflow: str, instance_id: str) -> str:
    """Return the id, or raise InstanceNotFound if no instance can have it.

    Such an id never reaches the database, because databases treat a NUL or a number differently.
    """
    try:
        values.check_instance_id(instance_id, values.MAX_ID_LENGTH)
    except NameInvalid:
        raise InstanceNotFound(workflow, instance_id) from None
    if not is_possible_workflow_name(workflow):
        raise InstanceNotFound(workflow, instance_id)
    return instance_id


def is_possible_workflow_name(workflow: str) -> bool:
    """Whether a workflow can have this name."""
    try:
        values.check_identifier("Workflow name", workflow, values.MAX_ID_LENGTH)
    except NameInvalid:
        return False
    return True


def check_limit(limit: int) -> None:
    """Raise ValueRefused unless the page size is 1 to 1000."""
    if not 1 <= limit <= _MAX_PAGE_SIZE:
        raise ValueRefused(f"A page of {limit} items is not possible: ask for 1 to {_MAX_PAGE_SIZE}.")
