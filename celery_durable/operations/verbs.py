"""What every verb works with, and how it gets at its instance."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from datetime import timedelta

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
    Due,
    InstanceRow,
    Kind,
    Outgoing,
)
from celery_durable.runtime import Runtime
from celery_durable.store import instances
from celery_durable.store.engine import Store, Tx
from celery_durable.values import UNSET

WakeUp = Callable[[Sequence[Due]], None]
Versions = Collection[int] | None
"""The versions of an instance that a change is meant for; None: whatever it is."""
_LARGEST_PAGE = 1000


class Verbs:
    """Verbs over one store. ``wake`` is told what became due, and ``post`` what is to be sent, after the commit."""

    def __init__(
        self,
        store: Store,
        settings: Settings,
        registry: Registry,
        runtime: Runtime,
        wake: WakeUp,
        *,
        post: Callable[[Sequence[Outgoing]], None] = lambda _: None,
    ) -> None:
        self._store, self._settings, self._registry, self._runtime = store, settings, registry, runtime
        self._wake, self._post = wake, post
        self._grace = settings.grace

    def _retention(self, workflow: str) -> timedelta | None:
        """How long an instance that is made now is kept after its end."""
        definition = self._registry.find(workflow)
        return self._settings.retention_of(UNSET if definition is None else definition.retention)


def lock_row(tx: Tx, workflow: str, instance_id: str, if_version: Versions = None) -> InstanceRow:
    """The instance's row, locked; raises InstanceNotFound, VersionMismatch."""
    row = instances.lock(tx, workflow, possible(workflow, instance_id))
    if if_version is not None and row.version not in if_version:
        raise VersionMismatch(workflow, instance_id, row.version)
    return row


def read_row(tx: Tx, workflow: str, instance_id: str) -> InstanceRow:
    """The instance's row; raises InstanceNotFound."""
    return instances.read(tx, workflow, possible(workflow, instance_id))


def refuse_linear(row: InstanceRow, what: str) -> None:
    """Steps of a linear run are done once, in order; raises ValueRefused."""
    if row.kind is Kind.LINEAR:
        raise ValueRefused(
            f"Instance {row.instance_id!r} of workflow {row.workflow!r} cannot be {what}: it is linear, and its run "
            "follows its rows from the first to the last. Restart it as a whole, or terminate it."
        )


def possible(workflow: str, instance_id: str) -> str:
    """An id that no instance can have is not asked for: databases differ in what they make of a NUL or a number."""
    try:
        values.instance_id(instance_id, values.LONGEST_ID)
    except NameInvalid:
        raise InstanceNotFound(workflow, instance_id) from None
    if not can_be_named(workflow):
        raise InstanceNotFound(workflow, instance_id)
    return instance_id


def can_be_named(workflow: str) -> bool:
    """Whether a workflow can have this name."""
    try:
        values.identifier("Workflow name", workflow, values.LONGEST_ID)
    except NameInvalid:
        return False
    return True


def check_limit(limit: int) -> None:
    """How many items a page may have; raises ValueRefused."""
    if not 1 <= limit <= _LARGEST_PAGE:
        raise ValueRefused(f"A page of {limit} items is not possible: ask for 1 to {_LARGEST_PAGE}.")
