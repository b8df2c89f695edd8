"""What all operations share: the store, the settings, and access to an instance within the caller's scope."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from celery_durable import values
from celery_durable.config import Settings
from celery_durable.definitions import Registry
from celery_durable.errors import (
    CreateDisabled,
    InstanceNotFound,
    InstanceTerminal,
    NameInvalid,
    ValueRefused,
    VersionMismatch,
)
from celery_durable.model import (
    Child,
    DueRun,
    EventRecord,
    InstanceHead,
    InstanceRow,
    ItemCounts,
    Origin,
    OutboxMessage,
    ParentStep,
    Scope,
    Status,
    StepRecord,
    VersionedInstance,
    parse_child_event_type,
)
from celery_durable.redaction import Redaction, make_no_redaction
from celery_durable.runtime import Runtime
from celery_durable.store.engine import Store, Tx, bounds, sessions
from celery_durable.store.engine.server_info import find_database_id
from celery_durable.store.instances import instances
from celery_durable.values import UNSET

if TYPE_CHECKING:  # the ORM takes a tenth of a second to import
    from sqlalchemy.orm import Session

T = TypeVar("T")
PublishRuns = Callable[[Sequence[DueRun]], None]
SendMessages = Callable[[Sequence[OutboxMessage]], None]
Versions = Collection[str] | None
"""The version tags (`VersionedInstance.tag`) that a change applies to; None means any."""
_MAX_PAGE_SIZE = 1000
_MAX_ACTOR_LENGTH = 255


def send_nothing(_: Sequence[OutboxMessage]) -> None:
    """Leave the messages in the outbox. A dispatcher sends them."""


def _find_no_queue(_: str) -> None:
    """Return nothing: without Celery the routes of tasks are unknown."""


@dataclass(frozen=True, slots=True)
class OperationContext:
    """The parts that every group of operations uses.

    ``publish_runs`` and ``send_messages`` are called after a commit, with what it made due and wrote.
    ``find_task_queue`` returns the queue of an encoded task. ``scope``: the only instances that the caller may reach.
    ``read_store``: the database for lists and counts.
    """

    store: Store
    settings: Settings
    registry: Registry
    runtime: Runtime
    publish_runs: PublishRuns
    send_messages: SendMessages = send_nothing
    find_task_queue: Callable[[str], str | None] = _find_no_queue
    scope: Scope | None = None
    read_store: Store | None = None
    make_redaction: Callable[[str, str], Redaction] = make_no_redaction

    def read_list(self, work: Callable[[Tx], T]) -> T:
        """Run ``work``, which reads a list or a count of many instances."""
        return (self.read_store or self.store).read(work)

    def after_commit(self, callback: Callable[[], object], session: Session | None = None) -> None:
        """Call ``callback`` once the last change is committed: now, unless it joined a transaction of the caller."""
        if session is not None:
            sessions.after_commit(session, callback)
        else:
            self.store.after_commit(callback)

    def check_create_enabled(self) -> None:
        """Raise CreateDisabled if new instances are refused now. Workflows still create their children."""
        if not self.settings.is_create_enabled:
            raise CreateDisabled

    @property
    def grace(self) -> timedelta:
        """How long a dispatcher leaves a run alone for which a message was just published."""
        return self.settings.grace

    def new_id(self) -> str:
        """Return a new random id, with the prefix of the caller's scope."""
        return (self.scope.id_prefix if self.scope is not None else "") + self.runtime.new_id()

    @property
    def scope_text(self) -> str:
        """A text that is equal for callers with the same scope."""
        return "" if self.scope is None else self.scope.to_text()

    def cursors(self, *of: object) -> values.Cursors:
        """Return the cursors of this list. They are valid only for callers with the same scope."""
        return values.Cursors(self.store.database_id or self.store.read(find_database_id) or "", (*of, self.scope_text))

    def lock_row(self, tx: Tx, workflow: str, instance_id: str, if_version: Versions = None) -> InstanceRow:
        """Lock and return the instance's row. The lock lasts until the transaction ends."""
        row = instances.lock(tx, workflow, require_possible_id(workflow, instance_id))
        self._check_in_scope(tx, row)
        if if_version is not None and instances.read_version_tag(tx, row) not in if_version:
            raise VersionMismatch(workflow, instance_id)
        return row

    def lock_unfinished(
        self, tx: Tx, workflow: str, instance_id: str, operation: str, if_version: Versions = None
    ) -> InstanceRow:
        """Lock and return the row of an instance that has not ended; raises InstanceTerminal, else as `lock_row`."""
        row = self.lock_row(tx, workflow, instance_id, if_version)
        if row.status.is_terminal:
            raise InstanceTerminal(workflow, instance_id, row.status, operation)
        return row

    def read_row(self, tx: Tx, workflow: str, instance_id: str) -> InstanceRow:
        """Return the instance's row without a lock; raises InstanceNotFound."""
        row = instances.read(tx, workflow, require_possible_id(workflow, instance_id))
        self._check_in_scope(tx, row)
        return row

    def read_head(self, tx: Tx, workflow: str, instance_id: str, run: int | None = None) -> InstanceHead:
        """Return the instance with a run, None for the current one; raises InstanceNotFound, RunNotFound."""
        name = require_possible_id(workflow, instance_id)
        head = instances.read_head(tx, workflow, name, run=run, scope=self.scope)
        return replace(head, parent=restrict_parent(tx, self.scope, head.parent))

    def read_with_tag(self, tx: Tx, workflow: str, instance_id: str) -> VersionedInstance:
        """Return the instance's row and version tag without a lock; raises InstanceNotFound."""
        found = instances.read_with_tag(tx, workflow, require_possible_id(workflow, instance_id))
        self._check_in_scope(tx, found.instance)
        return found

    def _check_in_scope(self, tx: Tx, row: InstanceRow) -> None:
        if not bounds.is_in_scope(tx, self.scope, row.pk):
            raise InstanceNotFound(row.workflow, row.instance_id)

    def retention(self, workflow: str) -> timedelta | None:
        """Return how long a new instance is kept after its end; None means forever."""
        definition = self.registry.find(workflow)
        return self.settings.retention_of(UNSET if definition is None else definition.retention)

    @staticmethod
    def check_actor(by: str) -> str:
        """Return the name of the person who does something, or raise NameInvalid."""
        return values.check_text_name("The person who does it", by, _MAX_ACTOR_LENGTH)

    def clean_reason(self, reason: str | None) -> str | None:
        """Return the reason as it is stored: cut, and without characters that databases refuse. Raises NameInvalid."""
        if reason is None:
            return None
        return values.sanitize_text(values.require_text("Reason", reason), self.settings.max_log_message)


def require_possible_id(workflow: str, instance_id: str) -> str:
    """Return the id, or raise InstanceNotFound for one that databases would treat differently, such as a NUL."""
    if not is_possible_id(workflow, instance_id):
        raise InstanceNotFound(workflow, instance_id)
    return instance_id


def is_possible_id(workflow: str, instance_id: str) -> bool:
    """Whether an instance of this workflow can have this id."""
    try:
        values.check_instance_id(instance_id, values.MAX_ID_LENGTH)
    except NameInvalid:
        return False
    return is_possible_workflow_name(workflow)


def is_possible_workflow_name(workflow: str) -> bool:
    """Whether a workflow can have this name."""
    try:
        values.check_identifier("Workflow name", workflow, values.MAX_ID_LENGTH)
    except NameInvalid:
        return False
    return True


def check_limit(limit: object, most: int = _MAX_PAGE_SIZE) -> None:
    """Raise ValueRefused unless the page size is 1 to ``most``."""
    if isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit <= most:
        raise ValueRefused(f"A page of {limit!r} items is not possible: ask for 1 to {most}.")


def read_status(status: Any) -> Status:
    """Return the status of this name; raises ValueRefused."""
    try:
        return Status(status)
    except ValueError:
        raise ValueRefused(f"status={status!r} is not known: use one of {', '.join(Status)}.") from None


# Links from one instance to others: those to instances outside the caller's scope are removed.


def restrict_steps(tx: Tx, scope: Scope | None, steps: Sequence[StepRecord]) -> tuple[StepRecord, ...]:
    """Remove the links of steps to their child instances."""
    if scope is None:
        return tuple(steps)
    children = {step.child for step in steps if step.child is not None}
    hidden = children - bounds.filter_in_scope(tx, scope, children)
    return tuple(
        replace(step, child=None if step.child in hidden else step.child, items=_without_children(step.items))
        for step in steps
    )


def _without_children(items: ItemCounts | None) -> ItemCounts | None:
    """Remove the links of a map to its children: their ids have no prefix, and they start without labels."""
    if items is None:
        return None
    return replace(items, children=(), failures=tuple(replace(each, child=None) for each in items.failures))


def restrict_events(tx: Tx, scope: Scope | None, events: Sequence[EventRecord]) -> tuple[EventRecord, ...]:
    """Remove the child's id from the types of answer events, as `restrict_steps` removes the links."""
    if scope is None:
        return tuple(events)
    children = {
        event.seq: Child(*found) for event in events if (found := parse_child_event_type(event.type)) is not None
    }
    hidden = set(children.values()) - bounds.filter_in_scope(tx, scope, set(children.values()))
    return tuple(
        replace(event, type=f"{event.type.partition('/')[0]}/") if children.get(event.seq) in hidden else event
        for event in events
    )


def restrict_origin(tx: Tx, scope: Scope | None, row: InstanceRow, origin: Origin | None) -> Origin | None:
    """Return the run that a run continues; None if it is of an instance outside the scope."""
    if origin is None or origin.instance_id == row.instance_id:
        return origin
    instance = Child(row.workflow, origin.instance_id)
    return origin if instance in bounds.filter_in_scope(tx, scope, [instance]) else None


def restrict_parent(tx: Tx, scope: Scope | None, parent: ParentStep | None) -> ParentStep | None:
    """Return the step that created an instance; None if its own instance is outside the scope."""
    if parent is None:
        return None
    instance = Child(parent.workflow, parent.instance_id)
    return parent if instance in bounds.filter_in_scope(tx, scope, [instance]) else None
