"""`WorkflowDecorator`: what the decorators are if they are called with options, for type checkers."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar, overload

from celery_durable.errors import AsyncNotSupported
from celery_durable.handles.workflow import Workflow
from celery_durable.model import WorkflowEvent
from celery_durable.step import Step

P = TypeVar("P")
R = TypeVar("R")

AsyncFunction = Callable[[WorkflowEvent[P], Step], Coroutine[Any, Any, Any]]
"""A function that is refused. Type checkers see that its decorator returns no workflow."""


class WorkflowDecorator(Protocol):
    """What `durable_workflow` and `Durable.workflow` return if they are called with options."""

    @overload
    def __call__(self, fn: AsyncFunction[P], /) -> AsyncNotSupported: ...  # type: ignore[overload-overlap]  # on purpose
    @overload
    def __call__(self, fn: Callable[[WorkflowEvent[P], Step], R], /) -> Workflow[P, R]: ...
    def __call__(self, fn: Callable[..., Any], /) -> Any:
        """Make the function a workflow."""
