"""Labels as the store has them, and what it costs to read them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import sqlalchemy as sa

from celery_durable import Step, WorkflowEvent
from tests.support.world import FlowControl, Instance, World


def labels_of(instance: Instance) -> dict[str, str]:
    """As all views show them."""
    operations = instance.world.operations
    name, id_ = instance.workflow, instance.id
    [listed] = [item.labels for item in operations.queries.list(name).items if item.id == id_]
    assert operations.history.read(name, id_).labels == listed
    assert operations.queries.details(name, id_)[1].meta.labels == listed
    assert operations.history.page(name, id_).labels == listed
    return dict(listed)


def found(world: World, workflow: str | None = "order", **chosen: Any) -> list[str]:
    return [item.id for item in world.operations.queries.list(workflow, **chosen).items]


def rows(world: World) -> int:
    return len(world.rows(sa.select(world.store.tables.label)))


@contextmanager
def statements(*engines: sa.Engine) -> Iterator[list[str]]:
    """What is sent to the database meanwhile."""
    sent: list[str] = []

    def note(_: object, __: object, statement: str, *rest: object) -> None:
        sent.append(statement)

    for engine in engines:
        sa.event.listen(engine, "before_cursor_execute", note)
    yield sent
    for engine in engines:
        sa.event.remove(engine, "before_cursor_execute", note)


@pytest.fixture
def order(world: World) -> FlowControl:
    """Each step sets the labels that the params say."""

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        for number, labels in enumerate(event.payload or []):
            step.do(f"set {number}", lambda tx, labels=labels: tx.set_labels(labels))

    return order
