"""The methods of `Step` for concurrent steps (branches): submit, gather and first."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, Unpack, overload

from celery_durable import values
from celery_durable.errors import StepFailed
from celery_durable.model import OnLost, OnParentEnd, ReceivedEvent
from celery_durable.step.calls import (
    DEFAULT_EVENT_TIMEOUT,
    SleepCall,
    StepContext,
    StepFuture,
    WaitCall,
    build_body_call,
)
from celery_durable.step.remote_calls import (
    DEFAULT_TASK_TIMEOUT,
    MapOptions,
    TypedWorkflow,
    build_child_call,
    build_map_call,
    build_task_call,
)
from celery_durable.step.tx import StepTx
from celery_durable.values import Duration, Limit, Retries, StepConfig

P = ParamSpec("P")
T = TypeVar("T")
W = TypeVar("W")


class Branches:
    """The methods of `Step` for branches. A submitted step starts when it is gathered."""

    def __init__(self, context: StepContext) -> None:
        self._context = context

    @overload
    def submit(
        self,
        name: str,
        fn: Callable[Concatenate[StepTx, P], Coroutine[Any, Any, T]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> StepFuture[T]: ...
    @overload
    def submit(
        self, name: str, fn: Callable[Concatenate[StepTx, P], T], /, *args: P.args, **kwargs: P.kwargs
    ) -> StepFuture[T]: ...
    @overload
    def submit(
        self, name: str, fn: Callable[P, Coroutine[Any, Any, T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> StepFuture[T]: ...
    @overload
    def submit(self, name: str, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> StepFuture[T]: ...
    @overload
    def submit(
        self,
        name: str,
        config: StepConfig,
        fn: Callable[Concatenate[StepTx, P], Coroutine[Any, Any, T]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> StepFuture[T]: ...
    @overload
    def submit(
        self,
        name: str,
        config: StepConfig,
        fn: Callable[Concatenate[StepTx, P], T],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> StepFuture[T]: ...
    @overload
    def submit(
        self,
        name: str,
        config: StepConfig,
        fn: Callable[P, Coroutine[Any, Any, T]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> StepFuture[T]: ...
    @overload
    def submit(
        self, name: str, config: StepConfig, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> StepFuture[T]: ...
    @overload
    def submit(
        self, fn: Callable[Concatenate[StepTx, P], Coroutine[Any, Any, T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> StepFuture[T]: ...
    @overload
    def submit(
        self, fn: Callable[Concatenate[StepTx, P], T], /, *args: P.args, **kwargs: P.kwargs
    ) -> StepFuture[T]: ...
    @overload
    def submit(
        self, fn: Callable[P, Coroutine[Any, Any, T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> StepFuture[T]: ...
    @overload
    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> StepFuture[T]: ...
    def submit(self, /, *args: Any, **kwargs: Any) -> StepFuture[Any]:
        """Submit a call of `Step.do` as a branch. Its function runs on a thread of its own, or as a task.

        Args:
            args: As in `Step.do`.
            kwargs: As in `Step.do`.

        Returns:
            A future for `gather` or `first`, or whose ``result()`` runs it alone.
        """
        return self._context.submit(build_body_call(args, kwargs))

    def submit_sleep(self, name: str, duration: Duration) -> StepFuture[None]:
        """Submit a call of `Step.sleep` as a branch."""
        return self._context.submit(SleepCall(name, duration))

    @overload
    def submit_wait_for_event(
        self,
        name: str,
        event_type: str,
        *,
        timeout: Duration = ...,
        schema: type[T],
        schema_error: Literal["refuse", "raise"] = ...,
        ask: str | Mapping[str, Any] | None = ...,
        to: str | None = ...,
    ) -> StepFuture[ReceivedEvent[T]]: ...
    @overload
    def submit_wait_for_event(
        self,
        name: str,
        event_type: str,
        *,
        timeout: Duration = ...,
        ask: str | Mapping[str, Any] | None = ...,
        to: str | None = ...,
    ) -> StepFuture[ReceivedEvent[Any]]: ...
    def submit_wait_for_event(
        self,
        name: str,
        event_type: str,
        *,
        timeout: Duration = DEFAULT_EVENT_TIMEOUT,
        schema: Any = None,
        schema_error: Literal["refuse", "raise"] = "refuse",
        ask: str | Mapping[str, Any] | None = None,
        to: str | None = None,
    ) -> StepFuture[Any]:
        """Submit a call of `Step.wait_for_event` as a branch."""
        question = values.check_question(name, ask, to)
        call = WaitCall(name, event_type, timeout, schema, schema_error=schema_error, ask=question, to=to)
        return self._context.submit(call)

    @overload
    def submit_wait_for_topic(
        self, name: str, topic: str, *, timeout: Duration = ..., schema: type[T]
    ) -> StepFuture[ReceivedEvent[T]]: ...
    @overload
    def submit_wait_for_topic(
        self, name: str, topic: str, *, timeout: Duration = ...
    ) -> StepFuture[ReceivedEvent[Any]]: ...
    def submit_wait_for_topic(
        self, name: str, topic: str, *, timeout: Duration = DEFAULT_EVENT_TIMEOUT, schema: Any = None
    ) -> StepFuture[Any]:
        """Submit a call of `Step.wait_for_topic` as a branch."""
        return self._context.submit(WaitCall(name, topic, timeout, schema, is_topic=True))

    def submit_task(
        self,
        name: str,
        signature: Any,
        *,
        timeout: Duration = DEFAULT_TASK_TIMEOUT,
        retries: Retries | int | None = 0,
        on_lost: OnLost | None = None,
        limits: Sequence[Limit] = (),
    ) -> StepFuture[Any]:
        """Submit a call of `Step.task` as a branch. The task is sent when the branch is gathered."""
        return self._context.submit(
            build_task_call(name, signature, timeout=timeout, retries=retries, on_lost=on_lost, limits=limits)
        )

    @overload
    def submit_map(
        self, name: str, task: TypedWorkflow[W, T], items: Iterable[W], **options: Unpack[MapOptions]
    ) -> StepFuture[list[T]]: ...
    @overload
    def submit_map(
        self,
        name: str,
        task: TypedWorkflow[W, T],
        items: Iterable[W],
        *,
        return_exceptions: Literal[True],
        **options: Unpack[MapOptions],
    ) -> StepFuture[list[T | StepFailed]]: ...
    @overload
    def submit_map(
        self,
        name: str,
        task: Any,
        items: Iterable[Any],
        *,
        on_lost: OnLost | None = ...,
        return_exceptions: bool = ...,
        **options: Unpack[MapOptions],
    ) -> StepFuture[list[Any]]: ...
    def submit_map(
        self,
        name: str,
        task: Any,
        items: Iterable[Any],
        *,
        max_concurrency: int | None = None,
        timeout: Duration | None = None,
        retries: Retries | int | None = 0,
        on_lost: OnLost | None = None,
        return_exceptions: bool = False,
        limits: Sequence[Limit] = (),
    ) -> StepFuture[list[Any]]:
        """Submit a call of `Step.map` as a branch. Its tasks are sent when the branch is gathered."""
        call = build_map_call(
            name,
            task,
            items,
            max_concurrency=max_concurrency,
            timeout=timeout,
            retries=retries,
            on_lost=on_lost,
            return_exceptions=return_exceptions,
            limits=limits,
        )
        return self._context.submit(call)

    def submit_child(
        self,
        name: str,
        workflow: TypedWorkflow[W, T],
        params: W | None = None,
        *,
        id: str | None = None,  # the public name
        timeout: Duration | None = None,
        labels: Mapping[str, str] | None = None,
        on_parent_end: OnParentEnd = "terminate",
        limits: Sequence[Limit] = (),
    ) -> StepFuture[T]:
        """Submit a call of `Step.child` as a branch. The child is created when the branch is gathered."""
        call = build_child_call(
            name, workflow, params, id=id, timeout=timeout, labels=labels, on_parent_end=on_parent_end, limits=limits
        )
        return self._context.submit(call)

    @overload
    def gather(self, *futures: StepFuture[T], return_exceptions: Literal[False] = ...) -> list[T]: ...
    @overload
    def gather(self, *futures: StepFuture[T], return_exceptions: Literal[True]) -> list[T | Exception]: ...
    def gather(self, *futures: StepFuture[Any], return_exceptions: bool = False) -> list[Any]:
        """Run branches at the same time and return their results in the order of the arguments.

        No worker is occupied while all open branches sleep, wait, or pause before a retry. A finished branch never runs
        again.

        Args:
            futures: What the methods ``submit`` and ``submit_...`` returned.
            return_exceptions: Put failures into the list instead of raising them.

        Raises:
            StepFailed: A branch failed; the first one in the order of the arguments. Raised after all have ended.
        """
        return self._context.gather(futures, return_exceptions=return_exceptions)

    def first(self, name: str, *futures: StepFuture[T]) -> T:
        """Run branches at the same time, return the result of the one that ends first, and cancel the others.

        A cancelled branch does not start, wait or consume an event any more. A function that is still running is not
        interrupted, but nothing of it is recorded.

        Args:
            name: The name of the race, which is recorded as a step.
            futures: What the methods ``submit`` and ``submit_...`` returned.

        Raises:
            StepFailed: The branch that ended first failed.
            DefinitionInvalid: There are no branches.
        """
        winner: T = self._context.first(name, futures)
        return winner
