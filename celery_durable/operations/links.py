"""Links from one instance to others: those to instances outside the caller's scope are removed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from celery_durable.model import (
    Child,
    EventRecord,
    InstanceRow,
    Origin,
    ParentStep,
    Scope,
    StepRecord,
    parse_child_event_type,
)
from celery_durable.store.engine import Tx, bounds
from celery_durable.store.instances import instances


def restrict_steps(tx: Tx, scope: Scope | None, steps: Sequence[StepRecord]) -> tuple[StepRecord, ...]:
    """Remove the links of steps to their child instances."""
    children = {step.child for step in steps if step.child is not None}
    hidden = children - bounds.filter_in_scope(tx, scope, children)
    return tuple(replace(step, child=None) if step.child in hidden else step for step in steps)


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


def restrict_parent(tx: Tx, scope: Scope | None, row: InstanceRow) -> ParentStep | None:
    """Return the step that created the instance; None if there is none, or it is outside the scope."""
    parent = instances.find_parent_step(tx, row.pk)
    if parent is None:
        return None
    instance = Child(parent.workflow, parent.instance_id)
    return parent if instance in bounds.filter_in_scope(tx, scope, [instance]) else None
