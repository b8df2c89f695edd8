"""Workflows that are functions: their options, and the checks when one is defined."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from celery_durable.definitions.definition import Definition, parse_optional_duration
from celery_durable.definitions.steps import resolve_annotation, resolve_annotation_or_warn
from celery_durable.errors import DefinitionInvalid, WorkflowNameTaken, WorkflowNotFound
from celery_durable.model import RunPlan, WorkflowEvent, WorkflowKind
from celery_durable.values import (
    UNSET,
    Codec,
    CompletionHooks,
    Duration,
    Limit,
    StepConfig,
    StepPolicy,
    check_identifier,
    check_limits,
    check_text_name,
    list_keywords,
    refuse_async,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkflowDefinition(Definition):
    fn: Callable[..., Any]
    step_defaults: StepConfig | None
    max_steps: int | None
    limits: tuple[Limit, ...] = ()
    kind = WorkflowKind.REPLAY

    @property
    def source_location(self) -> str:
        return f"{self.fn.__module__}.{self.fn.__qualname__}"

    def plan(self, policy: StepPolicy) -> RunPlan:  # noqa: ARG002  # its steps are what the function calls
        return RunPlan()


class WorkflowOptions(TypedDict, total=False):
    """The options of the decorators and of `define`; `durable_workflow` documents them."""

    name: str | None
    queue: str | None
    step_defaults: StepConfig | None
    max_steps: int | None
    retention: Duration | None
    max_run_duration: Duration | None
    max_suspend_duration: Duration | None
    on_complete: Any
    on_failure: Any
    limits: Sequence[Limit]


@functools.partial(list_keywords, "A workflow")
def define(
    fn: Callable[..., Any],
    *,
    name: str | None = None,
    queue: str | None = None,
    step_defaults: StepConfig | None = None,
    max_steps: int | None = None,
    retention: Duration | None = UNSET,
    max_run_duration: Duration | None = None,
    max_suspend_duration: Duration | None = None,
    on_complete: Any = None,
    on_failure: Any = None,
    limits: Sequence[Limit] = (),
) -> WorkflowDefinition:
    """Check a workflow function and return its definition; raises DefinitionInvalid, and AsyncNotSupported."""
    if not inspect.isfunction(fn):
        raise DefinitionInvalid(f"{fn!r} cannot be a workflow: decorate a plain function.")
    refuse_async("Workflow", fn)
    if inspect.isgeneratorfunction(fn):
        raise DefinitionInvalid(f"Workflow function {fn.__qualname__} contains a yield: return its result instead.")
    signature = inspect.signature(fn)
    try:
        signature.bind(None, None)
    except TypeError:
        raise DefinitionInvalid(
            f"Workflow function {fn.__qualname__} must take two parameters: "
            "def fn(event: WorkflowEvent[Params], step: Step)."
        ) from None
    _check_types(fn.__qualname__, max_steps, step_defaults)
    first = next(iter(signature.parameters))
    params = Codec.for_stored_values(
        lambda: _payload_type(resolve_annotation_or_warn(fn, first)),
        what=f"The parameter type of workflow {fn.__qualname__}",
    )
    output = Codec.for_stored_values(
        lambda: resolve_annotation_or_warn(fn, "return"), what=f"The return type of workflow {fn.__qualname__}"
    )
    # A type that cannot be resolved yet is resolved when it is needed: the module may define it below the workflow.
    if not isinstance(params_type := resolve_annotation(fn, first), str):
        params.resolve_type(_payload_type(params_type))
    if not isinstance(return_type := resolve_annotation(fn, "return"), str):
        output.resolve_type(return_type)
    return WorkflowDefinition(
        name=check_identifier("Workflow name", fn.__name__ if name is None else name, 255),
        fn=fn,
        queue=None if queue is None else check_text_name("Queue", queue, 255),
        step_defaults=step_defaults,
        max_steps=max_steps,
        params=params,
        output=output,
        retention=retention if retention is UNSET else parse_optional_duration(retention),
        max_run_duration=parse_optional_duration(max_run_duration),
        max_suspend_duration=parse_optional_duration(max_suspend_duration),
        limits=check_limits(f"limits of workflow {fn.__qualname__}", limits),
        hooks=CompletionHooks.read(fn.__qualname__, on_complete=on_complete, on_failure=on_failure),
    )


def _check_types(function: str, max_steps: object, step_defaults: object) -> None:
    if max_steps is not None and (isinstance(max_steps, bool) or not isinstance(max_steps, int) or max_steps < 1):
        raise DefinitionInvalid(f"max_steps={max_steps!r} of {function} must be a whole number of at least 1.")
    if step_defaults is not None and not isinstance(step_defaults, StepConfig):
        raise DefinitionInvalid(
            f"step_defaults={step_defaults!r} of {function} must be a StepConfig, such as StepConfig(retries=3)."
        )


def _payload_type(annotation: Any) -> Any:
    if typing.get_origin(annotation) is WorkflowEvent:
        return typing.get_args(annotation)[0]
    return None


# The workflows that a process knows.


class Registry:
    """The workflows that this process knows, by name."""

    def __init__(self, parent: Registry | None = None) -> None:
        self._definitions: dict[str, Definition] = {}
        self._parent = parent

    def add(self, definition: Definition) -> None:
        """Register a definition. A reloaded module replaces its own; WorkflowNameTaken if other code has this name."""
        existing = self.find(definition.name)
        if existing is not None and existing.source_location != definition.source_location:
            raise WorkflowNameTaken(definition.name, existing.source_location, definition.source_location)
        self._definitions[definition.name] = definition

    def find(self, name: str) -> Definition | None:
        found = self._definitions.get(name)
        return found if found is not None or self._parent is None else self._parent.find(name)

    def get(self, name: str) -> Definition:
        found = self.find(name)
        if found is None:
            raise WorkflowNotFound(name, list(self))
        return found

    def __iter__(self) -> Iterator[str]:
        inherited = [] if self._parent is None else [n for n in self._parent if n not in self._definitions]
        return iter([*inherited, *self._definitions])


SHARED = Registry()
"""The workflows that `@durable_workflow` registers. Every app of the process knows them, as with `@shared_task`."""
