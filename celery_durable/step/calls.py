"""The calls of `Step` methods as plain data, which `Step` passes to the running pass, and `StepFuture`."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Generic, Literal, Protocol, TypeVar

from celery_durable import values
from celery_durable.errors import DefinitionInvalid
from celery_durable.model import LogLevel, hot_dataclass
from celery_durable.values import Duration, StepConfig

T_co = TypeVar("T_co", covariant=True)


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
