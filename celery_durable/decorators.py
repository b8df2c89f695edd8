"""Workflows of no particular app, as `@shared_task` makes tasks: of functions, and of lists of steps."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, Unpack, overload

from celery_durable.app import current_durable
from celery_durable.definitions import SHARED, LinearDefinition, LinearStep, WorkflowOptions, define, define_linear
from celery_durable.handles import Workflow, WorkflowDecorator
from celery_durable.linear import LinearContext, Outcome
from celery_durable.model import WorkflowEvent
from celery_durable.step import Step
from celery_durable.values import UNSET, Duration, label

P = TypeVar("P")
R = TypeVar("R")
Handling = TypeVar("Handling", bound=Callable[[LinearContext], Outcome])


class LinearWorkflow(Workflow[P, Any]):
    """A workflow that is a list of steps, each with a handler; known to every app of the process.

    ``version``: of the list, kept with each run. ``params``: the type of the parameters. ``queue``: other than
    ``durable_queue``. ``retention``: how long an instance is kept after its end, other than
    ``durable_retention_seconds``. ``on_complete``, ``on_failure``: as for `durable_workflow`. All steps are inserted
    when a run begins, and it follows them to its end, whatever a deploy makes of this list. Raises DefinitionInvalid,
    NameInvalid.
    """

    definition: LinearDefinition

    def __init__(
        self,
        name: str,
        version: int,
        steps: Sequence[LinearStep],
        *,
        params: type[P] | None = None,
        queue: str | None = None,
        retention: Duration | None = UNSET,
        on_complete: Any = None,
        on_failure: Any = None,
    ) -> None:
        module = str(sys._getframe(1).f_globals.get("__name__"))  # noqa: SLF001  # as namedtuple does
        definition = define_linear(
            name,
            module=module,
            version=version,
            steps=steps,
            params=params,
            queue=queue,
            retention=retention,
            on_complete=on_complete,
            on_failure=on_failure,
        )
        SHARED.add(definition)
        super().__init__(definition, functools.partial(current_durable, f"Workflow {name!r}"))

    def handler(self, *steps: str) -> Callable[[Handling], Handling]:
        """Make a function the handler of these steps: of the list's, or of older lists that runs in flight follow."""
        for step in steps:
            label("Step name", step, 256)

        def register(fn: Handling) -> Handling:
            for step in steps:
                self.definition.handlers[step] = fn
            return fn

        return register


@overload
def durable_workflow(fn: Callable[[WorkflowEvent[P], Step], R], /) -> Workflow[P, R]: ...
@overload
def durable_workflow(**options: Unpack[WorkflowOptions]) -> WorkflowDecorator: ...
def durable_workflow(fn: Any = None, /, **options: Unpack[WorkflowOptions]) -> Any:
    """Make a function a durable workflow, known to every app of the process, as `@shared_task` does for tasks.

    ``name``: defaults to the function's. ``queue``: other than ``durable_queue``. ``step_defaults``: a StepConfig
    under all its steps. ``max_steps``: other than ``durable_max_steps``. ``retention``: how long an instance is kept
    after its end, other than ``durable_retention_seconds``; None without end. ``max_run_duration``: a run that takes
    longer is terminated, ``max_suspend_duration``: also one that waits longer at one place. ``on_complete``: a Celery
    task, or a task's name, that is sent when a run is complete, ``on_failure``: when it failed or took too long; at
    least once, with what became of the run.
    """

    def decorate(fn: Callable[..., Any]) -> Workflow[Any, Any]:
        definition = define(fn, **options)
        SHARED.add(definition)
        return Workflow(definition, functools.partial(current_durable, f"Workflow {definition.name!r}"))

    return decorate if fn is None else decorate(fn)
