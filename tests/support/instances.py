"""Workflows and instances of a world, read and changed as callers do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa
import sqlalchemy.orm

from celery_durable.definitions import WorkflowDefinition
from celery_durable.model import InstanceStatus, LogRecord, RunRef, Status, StepRecord, from_us
from celery_durable.signals import event_received, ignore, listen
from celery_durable.store.instances import instances


@contextmanager
def note_accepted_events(world: Any) -> Iterator[None]:
    """Note the ids of the events that are accepted in this block, for the invariants."""

    def note(event_id: str, **_: Any) -> None:
        world.accepted_events.append(event_id)

    listen(event_received, note)
    try:
        yield
    finally:
        ignore(event_received, note)


@dataclass(frozen=True)
class FlowControl:
    """A workflow of this world."""

    world: Any
    definition: WorkflowDefinition

    @property
    def name(self) -> str:
        return self.definition.name

    def create(self, params: Any = None, *, id: str = "i-1", **options: Any) -> Instance:
        made = self.world.operations.create.instance(self.name, params, id=id, **options)
        self.world.accepted.append((self.name, made))
        return Instance(self.world, self.name, made)

    def run(self, params: Any = None, *, id: str = "i-1", **options: Any) -> Instance:
        """Create an instance and advance it as far as it goes now."""
        instance = self.create(params, id=id, **options)
        self.world.run_until_idle()
        return instance

    def of(self, id: str) -> Instance:
        return Instance(self.world, self.name, id)


@dataclass(frozen=True)
class Instance:
    """An instance, read and changed through the operations."""

    world: Any
    workflow: str
    id: str

    @property
    def ref(self) -> RunRef:
        return RunRef(self.workflow, self.id, self.row.run_number)

    @property
    def row(self) -> sa.Row[Any]:
        i = self.world.store.tables.instance
        query = sa.select(i).where(i.c.workflow == self.workflow, i.c.instance_id == self.id)
        return self.world.store.read(lambda tx: tx.execute(query).one())

    @property
    def tag(self) -> str:
        """The tag of its version, as `if_version` takes it."""
        return self.world.store.read(lambda tx: instances.read_with_tag(tx, self.workflow, self.id)).tag

    @property
    def state(self) -> InstanceStatus:
        return self.world.operations.queries.get(self.workflow, self.id).status

    @property
    def status(self) -> Status:
        return self.state.status

    @property
    def output(self) -> Any:
        state = self.state
        assert state.status is Status.COMPLETE, state
        return state.output

    @property
    def error(self) -> str:
        error = self.state.error
        assert error is not None, self.state
        return f"{error.name}: {error.message}"

    @property
    def run_at(self) -> datetime:
        return from_us(self.row.run_at)

    def steps(self, run: int | None = None) -> tuple[StepRecord, ...]:
        return self.world.operations.history.read(self.workflow, self.id, run=run).steps

    def step(self, key: str, run: int | None = None) -> StepRecord:
        return next(step for step in self.steps(run) if step.step_key == key)

    def statuses(self, run: int | None = None) -> dict[str, str]:
        """Step keys in call order, and how each stands."""
        return {step.step_key: str(step.status) for step in self.steps(run)}

    def events(self, run: int | None = None) -> list[tuple[str, Any, str | None]]:
        """Each event's type, payload and the step that consumed it."""
        history = self.world.operations.history.read(self.workflow, self.id, run=run)
        return [(event.type, event.payload, event.consumed_by_step_key) for event in history.events]

    def logs(self, run: int | None = None) -> list[LogRecord]:
        return self.world.operations.history.logs(self.workflow, self.id, run=run)

    def lines(self, run: int | None = None) -> list[str]:
        return [line.message for line in self.logs(run)]

    def send(self, type_: str, payload: Any = None, **options: Any) -> bool:
        with note_accepted_events(self.world):
            return self.world.operations.events.send(self.workflow, self.id, type_, payload, **options)

    def pause(self) -> None:
        self.world.operations.lifecycle.pause(self.workflow, self.id)

    def resume(self) -> None:
        self.world.operations.lifecycle.resume(self.workflow, self.id)

    def cancel(self, reason: str | None = None) -> None:
        self.world.operations.lifecycle.cancel(self.workflow, self.id, reason=reason)

    def terminate(self, reason: str | None = None) -> None:
        self.world.operations.lifecycle.terminate(self.workflow, self.id, reason=reason)

    def restart(self) -> int:
        return self.world.restart(self)

    def advance(self, worker: Any = None) -> str:
        """Deliver one message for the current run."""
        return (worker or self.world.worker).advance(self.ref)
