"""Workflows that belong to no particular app, like tasks of `@shared_task`: from functions and from lists of steps."""

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
from celery_durable.values import UNSET, Duration, check_text_name

P = TypeVar("P")
R = TypeVar("R")
Handling = TypeVar("Handling", bound=Callable[[LinearContext], Outcome])


class LinearWorkflow(Workflow[P, Any]):
    """A workflow that is a list of steps, each with a handler. Every app of the process knows it.

    ``version``: of the list, recorded with each run. ``params``: the type of the parameters. ``queue``: replaces
    ``durable_queue``. ``retention``: how long an instance is kept after its end, replaces
    ``durable_retention_seconds``. ``on_complete``, ``on_failure``: as for `durable_workflow`.

    All steps are recorded when a run starts. The run follows them to its end, even if a deploy changes this list.
    Raises DefinitionInvalid and NameInvalid.
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
        """Make a function the handler of these steps: steps of the list, or of older lists that current runs follow."""
        for step in steps:
            check_text_name("Step name", step, 256)

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
    """Make a function a durable workflow. Every app of the process knows it, as `@shared_task` does for tasks.

    ``name``: defaults to the function's. ``queue``: replaces ``durable_queue``. ``step_defaults``: a StepConfig that
    is the default of all its steps. ``max_steps``: replaces ``durable_max_steps``. ``retention``: how long an instance
    is kept after its end, None for forever; replaces ``durable_retention_seconds``. ``max_run_duration``: a run that
    takes longer is terminated. ``max_suspend_duration``: a run is terminated if a single suspension lasts longer.
    ``on_complete``: a Celery task, or a task's name, that is sent when a run is complete. ``on_failure``: a task that
    is sent when a run failed or took too long. Both are sent at least once, with the outcome of the run.
    """

    def decorate(fn: Callable[..., Any]) -> Workflow[Any, Any]:
        definition = define(fn, **options)
        SHARED.add(definition)
        return Workflow(definition, functools.partial(current_durable, f"Workflow {definition.name!r}"))

    return decorate if fn is None else decorate(fn)
