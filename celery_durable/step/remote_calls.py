"""The calls of `Step` methods whose work tasks and child workflows do, as plain data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, TypedDict, TypeVar, get_args

from celery_durable import values
from celery_durable.definitions import Definition
from celery_durable.errors import DefinitionInvalid, ValueRefused
from celery_durable.model import OnLost, OnParentEnd, WorkflowEvent
from celery_durable.values import Duration, Limit, Retries, StepConfig, parse_duration

T_co = TypeVar("T_co", covariant=True)
P_contra = TypeVar("P_contra", contravariant=True)


class HasDefinition(Protocol):
    """Anything that carries a workflow's definition, such as the handle that `@durable_workflow` makes."""

    @property
    def definition(self) -> Definition: ...


class TypedWorkflow(HasDefinition, Protocol[P_contra, T_co]):
    """A workflow with typed parameters and a typed output."""

    def __call__(self, event: WorkflowEvent[P_contra], step: Any, /) -> T_co: ...


@dataclass(frozen=True, slots=True)
class TaskCall:
    """A call of `task`. ``signature``: a Signature, a task, or a task's name. ``on_lost``: None for the setting."""

    name: str
    signature: Any
    config: StepConfig
    on_lost: OnLost | None = None


@dataclass(frozen=True, slots=True)
class MapCall:
    """A call of `map`: ``task`` as in `TaskCall`, one for each of ``items``, ``max_concurrency`` at a time.

    ``definition``: the workflow whose instances do the items; None if tasks do them.
    """

    name: str
    task: Any
    items: tuple[Any, ...]
    config: StepConfig
    max_concurrency: int | None
    return_exceptions: bool
    on_lost: OnLost | None = None
    definition: Definition | None = None


class MapOptions(TypedDict, total=False):
    """The options of `Step.map` for tasks and for workflows."""

    max_concurrency: int | None
    timeout: Duration | None
    retries: Retries | int | None
    limits: Sequence[Limit]


@dataclass(frozen=True, slots=True)
class ChildCall:
    """A call of `child`. ``timeout``: None for ``durable_max_sleep_seconds``."""

    name: str
    definition: Definition
    params: Any
    instance_id: str | None
    timeout: Duration | None
    labels: Mapping[str, str]
    on_parent_end: OnParentEnd = "terminate"
    limits: Sequence[Limit] = ()


DEFAULT_TASK_TIMEOUT = "24 hours"
MAX_MAP_ITEMS = 10_000
_MIN_TIMEOUT = timedelta(seconds=1)


def build_task_call(
    name: str,
    signature: Any,
    *,
    timeout: Duration,
    retries: Retries | int | None,
    on_lost: OnLost | None,
    limits: Sequence[Limit],
) -> TaskCall:
    """Build a call of `task`; raises ConfigInvalid, ValueRefused, DurationInvalid."""
    return TaskCall(name, signature, build_task_config(timeout, retries, limits), _check_on_lost(on_lost))


def _check_on_lost(on_lost: OnLost | None) -> OnLost | None:
    if on_lost is not None and on_lost not in get_args(OnLost):
        raise ValueRefused(f"on_lost={on_lost!r} must be one of {', '.join(get_args(OnLost))}.")
    return on_lost


def build_task_config(timeout: Duration, retries: Retries | int | None, limits: Sequence[Limit] = ()) -> StepConfig:
    """Build the configuration of a task from its timeout, at least 1 s, and its retries; raises DurationInvalid."""
    return StepConfig(retries=retries, timeout=parse_duration(timeout, minimum=_MIN_TIMEOUT), limits=limits)


def build_map_call(
    name: str,
    task: Any,
    items: object,
    *,
    max_concurrency: Any,
    timeout: Duration | None,
    retries: Retries | int | None,
    on_lost: OnLost | None,
    return_exceptions: bool,
    limits: Sequence[Limit],
) -> MapCall:
    """Build a call of `map`; raises ConfigInvalid, ValueRefused, DurationInvalid."""
    definition = getattr(task, "definition", None)
    if not isinstance(definition, Definition):
        config = build_task_config(DEFAULT_TASK_TIMEOUT if timeout is None else timeout, retries, limits)
        definition = None
    elif on_lost is not None:
        raise ValueRefused(f"step.map({name!r}) got on_lost={on_lost!r}, which is for tasks: no child is ever lost.")
    else:
        config = StepConfig(retries=retries, limits=limits)
        if timeout is not None:
            config = build_task_config(timeout, retries, limits)
    if max_concurrency is not None and (
        isinstance(max_concurrency, bool) or not isinstance(max_concurrency, int) or max_concurrency < 1
    ):
        raise ValueRefused(
            f"max_concurrency={max_concurrency!r} of step {name!r} must be at least 1, or None for all at once."
        )
    if isinstance(items, (str, bytes)) or not isinstance(items, Iterable):
        raise ValueRefused(
            f"step.map({name!r}) got {items!r} as its items: pass a list or another iterable that is no text."
        )
    given = tuple(items)
    if len(given) > MAX_MAP_ITEMS:
        raise ValueRefused(
            f"step.map({name!r}) got {len(given)} items, and {MAX_MAP_ITEMS} is the most: map chunks of them, or have "
            "child workflows map a part each."
        )
    return MapCall(name, task, given, config, max_concurrency, return_exceptions, _check_on_lost(on_lost), definition)


def build_child_call(
    name: str,
    workflow: HasDefinition,
    params: Any,
    *,
    id: str | None,  # the public name
    timeout: Duration | None,
    labels: Mapping[str, str] | None,
    on_parent_end: OnParentEnd,
    limits: Sequence[Limit],
) -> ChildCall:
    """Build a call of `child`; raises ConfigInvalid, DefinitionInvalid, InvalidLabel, TooManyLabels, ValueRefused."""
    definition = require_definition(f"step.child({name!r})", workflow)
    child_id = values.read_text(id) if isinstance(id, str) else id
    if on_parent_end not in get_args(OnParentEnd):
        raise ValueRefused(f"on_parent_end={on_parent_end!r} must be one of {', '.join(get_args(OnParentEnd))}.")
    limits = values.check_limits("limits", limits)
    return ChildCall(name, definition, params, child_id, timeout, values.check_labels(labels), on_parent_end, limits)


def require_definition(call: str, workflow: HasDefinition) -> Definition:
    """Return the definition of a workflow that was passed to a call; raises DefinitionInvalid."""
    definition = getattr(workflow, "definition", None)
    if not isinstance(definition, Definition):
        raise DefinitionInvalid(f"{call} needs a workflow, and got {workflow!r}: pass what @durable_workflow made.")
    return definition
