"""A map over pages, each converted by a Celery task."""

from __future__ import annotations

from typing import Any

from celery import Celery

from celery_durable import Step, StepFailed, WorkflowEvent
from celery_durable.model import OutboxMessage
from tests.support.world import World

app = Celery("press", set_as_current=False)


@app.task(name="press.convert", shared=False)
def convert(page: int, to: str) -> str:
    """Never run here."""


def pages(messages: list[OutboxMessage]) -> list[int]:
    return [message.content["args"][0] for message in messages]


def mapping(world: World, count: int = 4, name: str = "press", **options: Any) -> Any:
    """A workflow with one map, which tells what came of it."""

    @world.workflow(name=name)
    def press(event: WorkflowEvent, step: Step) -> Any:
        try:
            got = step.map("convert", convert.s("png"), range(count), **options)
        except StepFailed as exc:
            return [type(exc).__name__, exc.error_name, exc.error_message, exc.attempts]
        return [str(each) if isinstance(each, Exception) else each for each in got]

    return press
