"""The Celery tasks that steps of a harness send. No task is run: the mocks of the steps answer.

The message of each task is made as Celery would. So a task that refuses its own call fails its step here too.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from functools import partial
from typing import Any

from celery import current_app

from celery_durable import values
from celery_durable.all_operations import Operations
from celery_durable.errors import InstanceNotFound, StepInterrupted
from celery_durable.model import DueRun, ItemRef, OutboxMessage, RunRef, TaskReference
from celery_durable.operations.answers import TaskException
from celery_durable.runtime import Runtime
from celery_durable.tasks import ADVANCE, DELIVER, TASK_DONE, TASK_FAILED
from celery_durable.tasks.publishing.message_builder import MessageBuilder
from celery_durable.testing.errors import HarnessMisuse
from celery_durable.testing.mocks import Mocks
from celery_durable.values import PayloadLimits


class SentTasks:
    """The sent tasks without an answer. A task whose step has no mock never answers, so its step times out."""

    def __init__(self, operations: Callable[[], Operations], mocks: Mocks, limits: PayloadLimits) -> None:
        self._operations, self._mocks, self._limits = operations, mocks, limits
        self._out: dict[str, OutboxMessage] = {}
        self._known: set[str] = set()
        self._refused: dict[str, Exception] = {}

    def sent(self, message: OutboxMessage) -> Exception | None:
        """Remember a task that was sent, once, and return the error if it refuses its own call."""
        error = _check_call(message)
        if message.id not in self._known and "reference" in message.content:
            self._known.add(message.id)
            self._out[message.id] = message
            if error is not None:
                self._refused[message.id] = error
        return error

    def answer(self) -> bool:
        """Answer the first task that refused its call or whose step has a mock. Returns False if there is none."""
        for message in list(self._out.values()):
            reference = TaskReference.read(message.content["reference"])
            assert reference is not None
            ref = reference.ref
            step = self._find_asking_step(message.id, ref, reference.event_type)
            if step is None:
                del self._out[message.id]
            elif (refusal := self._refused.pop(message.id, None)) is not None:
                del self._out[message.id]
                payload = values.encode_error_answer(type(refusal).__name__, str(refusal), is_non_retryable=True)
                exception = TaskException(refusal, "harness", os.getpid())
                self._operations().answers.accept(reference, payload, exception=exception)
                return True
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


def _check_call(message: OutboxMessage) -> Exception | None:
    """Make a task's message as Celery would, and return the error; None if this process does not know the task."""
    app: Any = current_app
    task = app.tasks.get(message.name)
    if task is None:
        return None
    try:
        if app.conf.task_always_eager:  # `apply_async` would run the task
            body = message.content
            if task.typing:
                task.__header__(*body["args"], **body["kwargs"])
        else:
            MessageBuilder(
                app,
                Runtime(),
                advance=ADVANCE,
                deliver=DELIVER,
                answer_task_names=(TASK_DONE, TASK_FAILED),
                queue=lambda: "durable",
            ).build_outbox_messages(message)
    except Exception as exc:  # noqa: BLE001  # the application's own code may raise any error
        return exc
    return None


def _no_body() -> None: ...


def _no_runner() -> None:
    raise HarnessMisuse("A Celery task does this step: no runner is in it that could be killed.")


# The dispatch messages that a harness captures in place of a broker.


class Messages(list[DueRun]):
    """The messages that have not been delivered yet, oldest first. A test may read, reorder and delete them."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self._rng = rng

    def drop(self) -> int:
        """Lose all messages, as a broker that was emptied. Returns how many. A later sweep finds the work again."""
        lost = len(self)
        self.clear()
        return lost

    def duplicate(self, times: int = 2) -> None:
        """Repeat each message, so that it is delivered ``times`` times."""
        self[:] = [message for message in self for _ in range(times)]

    def shuffle(self) -> None:
        """Reorder the messages at random, from the seed."""
        self._rng.shuffle(self)
