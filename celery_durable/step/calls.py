"""The calls of `Step` methods as plain data, which `Step` passes to the running pass, and `StepFuture`."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Generic, Literal, Protocol, TypedDict, TypeVar, get_args

from celery_durable import values
from celery_durable.definitions import Definition
from celery_durable.errors import DefinitionInvalid, ValueRefused
from celery_durable.model import LogLevel, OnLost, OnParentEnd, WorkflowEvent, hot_dataclass
from celery_durable.values import Duration, Retries, StepConfig, parse_duration

T_co = TypeVar("T_co", covariant=True)
P_contra = TypeVar("P_contra", contravariant=True)


class HasDefinition(Protocol):
    """Anything that carries a workflow's definition, such as the handle that `@durable_workflow` makes."""

    @property
    def definition(self) -> Definition: ...


class TypedWorkflow(HasDefinition, Protocol[P_contra, T_co]):
    """A workflow with typed parameters and a typed output."""

    def __call__(self, event: WorkflowEvent[P_contra], step: Any, /) -> T_co: ...


@hot_dataclass()
class BodyCall:
    """A call of `do` or `submit`."""

    name: str | None
    config: StepConfig | None
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True, slots=True)
class SleepCall:
    """A call of `sleep`, or of `sleep_until`, which sets ``until``; ``duration`` is then ignored."""

    name: str
    duration: Duration
    until: datetime | None = None


@dataclass(frozen=True, slots=True)
class WaitCall:
    """A call of `wait_for_event`, or of `wait_for_topic`, where ``event_type`` is the topic."""

    name: str
    event_type: str
    timeout: Duration
    schema: Any
    is_topic: bool = False
    schema_error: Literal["refuse", "raise"] = "refuse"
    ask: str | None = None
    """The question as JSON text."""
    to: str | None = None


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


class StepCall(Protocol):
    """A call of a step. Its class says of which kind; any kind that the runner knows may have one."""

    @property
    def name(self) -> str | None:
        """The step's name; None if the kind derives it."""


class StepContext(Protocol):
    """The pass behind a `Step`: it runs the calls of the workflow's function."""

    def call(self, call: StepCall) -> Any: ...
    def submit(self, call: StepCall) -> StepFuture[Any]: ...
    def gather(self, futures: tuple[StepFuture[Any], ...], *, return_exceptions: bool) -> list[Any]: ...
    def first(self, name: str, futures: tuple[StepFuture[Any], ...]) -> Any: ...
    def log(self, level: LogLevel, message: str, category: str, data: dict[str, Any]) -> None: ...
    def publish(self, key: str, value: Any) -> None: ...
    def now(self) -> datetime: ...
    def random_source(self) -> random.Random: ...


class StepFuture(Generic[T_co]):
    """A branch: a step that runs at the same time as others, in `Step.gather` or `Step.first`.

    Attributes:
        name: The step's name.
        key: The step's key in the history: its name, with a number if the step is repeated.
    """

    def __init__(self, context: StepContext, name: str, key: str, branch: object) -> None:
        self.name, self.key = name, key
        self.branch = branch
        self._context = context

    def result(self) -> T_co:
        """Run this branch alone, or return its result if it has ended.

        Returns:
            What the method that was submitted would have returned.

        Raises:
            StepFailed: The branch failed.
            StepCancelled: Another branch of `Step.first` ended before it.
        """
        results: list[T_co] = self._context.gather((self,), return_exceptions=False)
        return results[0]

    def __repr__(self) -> str:
        return f"<StepFuture {self.name!r}>"


DEFAULT_EVENT_TIMEOUT = "24 hours"
DEFAULT_TASK_TIMEOUT = "24 hours"
MAX_MAP_ITEMS = 10_000
_MIN_TIMEOUT = timedelta(seconds=1)
_CONFIG_FIELDS = frozenset(StepConfig.__dataclass_fields__)


def build_body_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> BodyCall:
    """Build a call of `do` from its arguments: [name,] [config,] fn, then the arguments of ``fn``."""
    rest = list(args)
    name = rest.pop(0) if rest and isinstance(rest[0], str) else None
    config = rest.pop(0) if rest and isinstance(rest[0], StepConfig) else None
    if not rest or not callable(rest[0]):
        if name is None and any(map(callable, rest)):  # the function is behind something else: behind its name
            values.require_text("Step name", rest[0])
        raise DefinitionInvalid(
            "step.do() needs a function: step.do('name', fn, *args) or step.do('name', StepConfig(...), fn, *args); "
            f"it got {args!r}."
        )
    if not _CONFIG_FIELDS.isdisjoint(kwargs):
        _check_takes(rest[0], kwargs)
    return BodyCall(name, config, rest[0], tuple(rest[1:]), kwargs)


def _check_takes(fn: Callable[..., Any], kwargs: dict[str, Any]) -> None:
    """Raise DefinitionInvalid if an option of a step is among the arguments of a function that does not take it."""
    try:
        parameters = inspect.signature(fn).parameters
    except (TypeError, ValueError):  # a function in C
        return
    takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    for name in sorted(_CONFIG_FIELDS & kwargs.keys()):
        if not takes_any and name not in parameters:
            raise DefinitionInvalid(
                f"step.do() passes {name}= to {getattr(fn, '__qualname__', repr(fn))}, which has no such parameter. "
                f"To configure the step: step.do('name', StepConfig({name}={kwargs[name]!r}), fn, *args)."
            )


def build_wait_call(
    name: str,
    event_type: str,
    timeout: Duration,
    schema: Any,
    schema_error: Literal["refuse", "raise"],
    *,
    ask: str | Mapping[str, Any] | None,
    to: str | None,
) -> WaitCall:
    """Build a call of `wait_for_event`; raises ValueRefused."""
    question = values.check_question(name, ask, to)
    return WaitCall(name, event_type, timeout, schema, schema_error=schema_error, ask=question, to=to)


def build_task_call(
    name: str, signature: Any, timeout: Duration, retries: Retries | int | None, on_lost: OnLost | None
) -> TaskCall:
    """Build a call of `task`; raises ValueRefused, DurationInvalid."""
    return TaskCall(name, signature, build_task_config(timeout, retries), _check_on_lost(on_lost))


def _check_on_lost(on_lost: OnLost | None) -> OnLost | None:
    if on_lost is not None and on_lost not in get_args(OnLost):
        raise ValueRefused(f"on_lost={on_lost!r} must be one of {', '.join(get_args(OnLost))}.")
    return on_lost


def build_task_config(timeout: Duration, retries: Retries | int | None) -> StepConfig:
    """Build the configuration of a task from its timeout, at least 1 s, and its retries; raises DurationInvalid."""
    return StepConfig(retries=retries, timeout=parse_duration(timeout, minimum=_MIN_TIMEOUT))


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
) -> MapCall:
    """Build a call of `map`; raises ValueRefused, DurationInvalid."""
    definition = getattr(task, "definition", None)
    if not isinstance(definition, Definition):
        config = build_task_config(DEFAULT_TASK_TIMEOUT if timeout is None else timeout, retries)
        definition = None
    elif on_lost is not None:
        raise ValueRefused(f"step.map({name!r}) got on_lost={on_lost!r}, which is for tasks: no child is ever lost.")
    else:
        config = StepConfig(retries=retries) if timeout is None else build_task_config(timeout, retries)
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
) -> ChildCall:
    """Build a call of `child`; raises DefinitionInvalid, InvalidLabel, TooManyLabels, ValueRefused."""
    definition = require_definition(f"step.child({name!r})", workflow)
    child_id = values.read_text(id) if isinstance(id, str) else id
    if on_parent_end not in get_args(OnParentEnd):
        raise ValueRefused(f"on_parent_end={on_parent_end!r} must be one of {', '.join(get_args(OnParentEnd))}.")
    return ChildCall(name, definition, params, child_id, timeout, values.check_labels(labels), on_parent_end)


def require_definition(call: str, workflow: HasDefinition) -> Definition:
    """Return the definition of a workflow that was passed to a call; raises DefinitionInvalid."""
    definition = getattr(workflow, "definition", None)
    if not isinstance(definition, Definition):
        raise DefinitionInvalid(f"{call} needs a workflow, and got {workflow!r}: pass what @durable_workflow made.")
    return definition
