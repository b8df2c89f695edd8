"""Celery tasks that do steps, and their answers."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery

from celery_durable import Retries, Step, StepFailed, WorkflowEvent, values
from celery_durable.model import AnswerResult, OutboxMessage, TaskReference
from tests.support.world import World

app = Celery("media", set_as_current=False)


@app.task(name="media.resize", shared=False)
def resize(width: int, *, crop: bool = False) -> dict[str, int]:
    """Never run here."""


def answer(world: World, message: OutboxMessage, output: Any = None, *, error: Exception | None = None) -> bool:
    """What comes back from the worker that did it; False: it was not taken."""
    return answered(world, message, output, error=error).is_taken


def answered(
    world: World, message: OutboxMessage, output: Any = None, *, error: Exception | None = None
) -> AnswerResult:
    """What becomes of what comes back from the worker that did it."""
    reference = TaskReference.read(message.content["reference"])
    assert reference is not None
    if error is None:
        payload = values.encode_answer(values.encode(output, what="Result", limits=world.settings.limits))
    else:
        payload = values.encode_error_answer(type(error).__name__, str(error))
    return world.operations.answers.accept(reference, payload)


@pytest.fixture
def media(world: World) -> Any:
    """A workflow with one task, which is sent twice at most; it tells what came of it."""

    @world.workflow
    def media(event: WorkflowEvent[int], step: Step) -> Any:
        try:
            retries = Retries(limit=1, delay=30)
            return step.task("thumb", resize.s(event.payload, crop=True), timeout="1 hour", retries=retries)
        except StepFailed as exc:
            return [type(exc).__name__, exc.error_name, exc.error_message, exc.attempts]

    return media
