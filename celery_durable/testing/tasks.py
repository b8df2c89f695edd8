"""The Celery tasks that steps of a harness wait for. The mocks of the steps answer; no task is run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from celery_durable import values
from celery_durable.errors import InstanceNotFound, StepInterrupted
from celery_durable.model import ItemRef, OutboxMessage, RunRef, TaskReference
from celery_durable.operations import Operations
from celery_durable.testing.errors import HarnessMisuse
from celery_durable.testing.mocks import Mocks
from celery_durable.values import PayloadLimits


class SentTasks:
    """The sent tasks without an answer. A task whose step has no mock never answers, so its step times out."""

    def __init__(self, operations: Callable[[], Operations], mocks: Mocks, limits: PayloadLimits) -> None:
        self._operations, self._mocks, self._limits = operations, mocks, limits
        self._out: dict[str, OutboxMessage] = {}
        self._known: set[str] = set()

    def sent(self, message: OutboxMessage) -> None:
        """Remember a task that was sent. A second message with its id changes nothing."""
        if message.id not in self._known and "reference" in message.content:
            self._known.add(message.id)
            self._out[message.id] = message

    def answer(self) -> bool:
        """Answer the first task whose step has a mock. Returns False if there is none."""
        for message in list(self._out.values()):
            reference = TaskReference.read(message.content["reference"])
            assert reference is not None
            ref = reference.ref
            step = self._find_asking_step(message.id, ref, reference.event_type)
            if step is None:
                del self._out[message.id]
            elif (act := self._act(ref, step, message)) is not None:
                del self._out[message.id]
                self._operations().answers.accept(reference, self._said(act, message, step))
                return True
        return False

    def _find_asking_step(self, id_: str, ref: RunRef, asked: str) -> str | None:
        """Return the name of the step that waits for a task; None if no step waits any more."""
        try:
            row = self._operations().queries.get(ref.workflow, ref.instance_id).instance
        except InstanceNotFound:
            return None
        if row.run_number != ref.run_number or row.status.is_terminal:
            return None
        item = ItemRef.read(asked)
        if item is not None:  # the history of a map has all its answers, so it is not read
            return item.step_key
        steps = self._operations().history.read(ref.workflow, ref.instance_id).steps
        return next((step.name for step in steps if step.is_waiting and step.task_id == id_), None)

    def _act(self, ref: RunRef, step: str, message: OutboxMessage) -> Callable[[], Any] | None:
        """Return the function that answers in place of the task; None if its step has no mock."""
        mock = self._mocks.of_task(ref.workflow, step)
        if mock is not None:
            return partial(mock.use, *message.content["args"], **message.content["kwargs"])
        mock = self._mocks.of_step(ref.workflow, step)
        return None if mock is None else partial(mock.use, _no_body, _no_runner)

    def _said(self, act: Callable[[], Any], message: OutboxMessage, step: str) -> str:
        try:
            return values.encode_answer(values.encode(act(), what=f"Mock of {step!r}", limits=self._limits))
        except StepInterrupted:
            return values.encode_error_answer("StepTimeout", f"Celery task {message.name!r} did not answer in time")
        except HarnessMisuse:
            raise
        except Exception as exc:  # noqa: BLE001  # a mock may raise anything
            return values.encode_error_answer(type(exc).__name__, str(exc))


def _no_body() -> None:
    """In place of the step's function: a task does this step."""


def _no_runner() -> None:
    raise HarnessMisuse("A Celery task does this step: no runner is in it that could be killed.")
