"""`durable_workflow` and `LinearWorkflow`: workflows that, like `@shared_task`, every app of the process knows."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar, Unpack, overload

from celery_durable.app import current_durable
from celery_durable.definitions import (
    SHARED,
    LinearDefinition,
    LinearStep,
    WorkflowOptions,
    define,
    define_linear,
)
from celery_durable.errors import AsyncNotSupported
from celery_durable.handles import AsyncFunction, Workflow, WorkflowDecorator
from celery_durable.linear import LinearContext, Outcome
from celery_durable.model import WorkflowEvent
from celery_durable.step import Step
from celery_durable.values import UNSET, Duration, check_text_name, refuse_async_generator

P = TypeVar("P")
R = TypeVar("R")
Handling = TypeVar("Handling", bound=Callable[[LinearContext], Outcome | Coroutine[Any, Any, Outcome]])


class LinearWorkflow(Workflow[P, Any]):
    """A workflow that is a list of steps, each with a handler. Every app of the process knows it.

    All steps are recorded when a run starts. The run follows them to its end, even if a deploy changes this list.

    Args:
        name: The workflow's name, unique in the process.
        version: The version of the list, a whole number from 1. It is recorded with each run.
        steps: The steps in order. Their names are unique.
        params: The type of the parameters, such as a pydantic model. None: JSON data as it is.
        queue: The Celery queue of its passes. None: ``durable_queue``.
        retention: How long an instance is kept after its end: a timedelta, seconds, or text such as "90 days". None:
            forever. Left out: ``durable_retention_seconds``.
        on_complete: As in `durable_workflow`.
        on_failure: As in `durable_workflow`.

    Raises:
        DefinitionInvalid: The version, the steps or a hook are invalid.
        DurationInvalid: ``retention`` cannot be read or is out of range.
        NameInvalid: The name or the queue breaks the rules.
        WorkflowNameTaken: Other code has registered a workflow with this name.
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
        """Make a function the handler of steps. Use it as a decorator.

        Args:
            steps: Names of steps in the list, or in older lists that unfinished runs still follow.

        Returns:
            A decorator that returns the function unchanged.

        Raises:
            NameInvalid: A name breaks the rules.
            DefinitionInvalid: The function is an async generator.
        """
        for step in steps:
            check_text_name("Step name", step, 256)

        def register(fn: Handling) -> Handling:
            refuse_async_generator("Handler", fn)
            for step in steps:
                self.definition.handlers[step] = fn
            return fn

        return register


@overload
def durable_workflow(fn: AsyncFunction[P], /) -> AsyncNotSupported: ...  # type: ignore[overload-overlap]  # refused
@overload
def durable_workflow(fn: Callable[[WorkflowEvent[P], Step], R], /) -> Workflow[P, R]: ...
@overload
def durable_workflow(**options: Unpack[WorkflowOptions]) -> WorkflowDecorator: ...
def durable_workflow(fn: Any = None, /, **options: Unpack[WorkflowOptions]) -> Any:
    """Make a function a durable workflow. Every app of the process knows it, as `@shared_task` does for tasks.

    Use it as ``@durable_workflow`` or as ``@durable_workflow(option=...)``. The function takes a WorkflowEvent and a
    Step. Options that are durations take a timedelta, seconds, or text such as "90 days", up to 36,500 days.

    Args:
        fn: The function, if the decorator is used without options.
        options: ``name``: the workflow's name; by default the function's. ``queue``: replaces ``durable_queue``.
            ``step_defaults``: a StepConfig with the defaults of all its steps. ``max_steps``: replaces
            ``durable_max_steps``. ``retention``: how long an instance is kept after its end, None for forever;
            replaces ``durable_retention_seconds``. ``max_run_duration``: a run that takes longer is terminated.
            ``max_suspend_duration``: a run is terminated if a single suspension lasts longer. ``on_complete``: a
            Celery task, or its name, that is sent when a run is complete. ``on_failure``: a task that is sent when a
            run failed or took too long. Both are sent at least once, with the outcome of the run. ``limits``: the
            limits that a run holds from before its first step until it ends, also while it sleeps.

    Returns:
        The `Workflow`, or with options a decorator that returns it.

    Raises:
        DefinitionInvalid: The function or an option is invalid.
        DurationInvalid: A duration cannot be read or is out of range.
        AsyncNotSupported: The function is a coroutine function.
        NameInvalid: The name or the queue breaks the rules.
        WorkflowNameTaken: Other code has registered a workflow with this name.
    """

    def decorate(fn: Callable[..., Any]) -> Workflow[Any, Any]:
        definition = define(fn, **options)
        SHARED.add(definition)
        return Workflow(definition, functools.partial(current_durable, f"Workflow {definition.name!r}"))

    return decorate if fn is None else decorate(fn)
