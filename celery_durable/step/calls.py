"""The calls of `Step` methods as plain data, which `Step` passes to the running pass, and `StepFuture`."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Generic, Literal, Protocol, TypeVar

from celery_durable.definitions import Definition
from celery_durable.model import LogLevel, OnLost, WorkflowEvent, hot_dataclass
from celery_durable.values import Duration, StepConfig

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


@dataclass(frozen=True, slots=True)
class TaskCall:
    """A call of `task`. ``signature``: a Signature, a task, or a task's name. ``on_lost``: None for the setting."""

    name: str
    signature: Any
    config: StepConfig
    on_lost: OnLost | None = None


@dataclass(frozen=True, slots=True)
class MapCall:
    """A call of `map`: ``task`` as in `TaskCall`, one for each of ``items``, ``max_concurrency`` at a time."""

    name: str
    task: Any
    items: tuple[Any, ...]
    config: StepConfig
    max_concurrency: int | None
    return_exceptions: bool
    on_lost: OnLost | None = None


@dataclass(frozen=True, slots=True)
class ChildCall:
    """A call of `child`. ``timeout``: None for ``durable_max_sleep_seconds``."""

    name: str
    definition: Definition
    params: Any
    instance_id: str | None
    timeout: Duration | None
    labels: Mapping[str, str]


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
