"""A linear workflow in a world of the engine's tests, whose handlers answer what the test says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery_durable import Completed, LinearContext, LinearStep, TaskType, Waiting
from celery_durable.definitions import define_linear
from celery_durable.values import UNSET
from tests.support.world import FlowControl, Instance, World

ORDER = [LinearStep("VALIDATE", max_attempts=3, delay="10s", backoff="constant"), LinearStep("PAY"), LinearStep("SHIP")]

Answer = Callable[[LinearContext], Any]


class Line:
    """A linear workflow of a world; its handlers answer what the test says, and remember what they were called with."""

    def __init__(
        self, world: World, steps: list[LinearStep] | None = None, *, retention: Any = UNSET, **answers: Answer
    ) -> None:
        self.world, self.calls = world, list[LinearContext]()
        self.deploy(steps or ORDER, retention=retention, **answers)

    def deploy(self, steps: list[LinearStep], *, version: int = 1, retention: Any = UNSET, **answers: Answer) -> None:
        """Put this code in the place of what there was."""
        definition = define_linear("order", module=__name__, version=version, steps=steps, retention=retention)
        for step in steps:
            definition.handlers[step.name] = self._handler(answers.get(step.name, done))
        self.world.registry.replace(definition)
        self.flow = FlowControl(self.world, definition)  # type: ignore[arg-type]

    def answer(self, **answers: Answer) -> None:
        for name, answer in answers.items():
            self.flow.definition.handlers[name] = self._handler(answer)

    def _handler(self, answer: Answer) -> Answer:
        def handle(ctx: LinearContext) -> Any:
            self.calls.append(ctx)
            return answer(ctx)

        return handle

    @property
    def called(self) -> list[tuple[str, str, int]]:
        return [(ctx.step, str(ctx.task_type), ctx.attempt) for ctx in self.calls]


def done(ctx: LinearContext) -> Completed:
    return Completed(f"{ctx.step} done")


def waits_for(type_: str = "paid", timeout: Any = "1 hour", **more: Any) -> Answer:
    """Wait when it is its turn, be done when the event or the end of time comes."""

    def answer(ctx: LinearContext) -> Any:
        if ctx.task_type is TaskType.RUN:
            return Waiting(type_, timeout, **more)
        return Completed(None if ctx.event is None else ctx.event.payload)

    return answer


def rows(instance: Instance, run: int | None = None) -> list[str]:
    return [str(step.status) for step in instance.steps(run)]


def state(instance: Instance) -> str:
    return instance.status.linear
