"""What an author holds: Step, in the workflow; StepTx, in a step's body; futures of parallel branches; the log.

Thin: every verb hands its call to the pass that runs the workflow (`StepHost`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any, Concatenate, Literal, ParamSpec, Protocol, TypeVar, get_args, overload

from celery_durable import values
from celery_durable.definitions import Definition
from celery_durable.errors import DefinitionInvalid, ValueRefused
from celery_durable.model import LogLevel, OnLost, ReceivedEvent
from celery_durable.step.calls import (
    BodyCall,
    ChildCall,
    Defined,
    MapCall,
    SleepCall,
    StepCall,
    StepFuture,
    StepHost,
    TaskCall,
    Typed,
    WaitCall,
)
from celery_durable.step.tx import NewEmission, NewEvent, NewInstance, StepTx, TxBuffer, allow_to_end
from celery_durable.values import Duration, Retries, StepConfig, duration

__all__ = [
    "BodyCall",
    "ChildCall",
    "Defined",
    "LogHost",
    "MapCall",
    "NewEmission",
    "NewEvent",
    "NewInstance",
    "SleepCall",
    "Step",
    "StepCall",
    "StepFuture",
    "StepHost",
    "StepLog",
    "StepTx",
    "TaskCall",
    "TxBuffer",
    "Typed",
    "WaitCall",
    "allow_to_end",
]

P = ParamSpec("P")
T = TypeVar("T")

W = TypeVar("W")

DEFAULT_EVENT_TIMEOUT = "24 hours"
DEFAULT_TASK_TIMEOUT = "24 hours"
MOST_ITEMS = 10_000
_SHORTEST_TIMEOUT = timedelta(seconds=1)


class Step:
    """The verbs of a workflow. Each call is a step: recorded once, handed out on every replay."""

    def __init__(self, host: StepHost) -> None:
        self._host = host
        self.log = StepLog(host)

    @overload
    def do(self, name: str, fn: Callable[Concatenate[StepTx, P], T], /, *args: P.args, **kwargs: P.kwargs) -> T: ...
    @overload
    def do(self, name: str, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T: ...
    @overload
    def do(
        self,
        name: str,
        config: StepConfig,
        fn: Callable[Concatenate[StepTx, P], T],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T: ...
    @overload
    def do(self, name: str, config: StepConfig, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T: ...
    @overload
    def do(self, fn: Callable[Concatenate[StepTx, P], T], /, *args: P.args, **kwargs: P.kwargs) -> T: ...
    @overload
    def do(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T: ...
    def do(self, /, *args: Any, **kwargs: Any) -> Any:
        """Run ``fn(*args, **kwargs)`` as a step and return its result.

        ``do("name", fn, ...)``, ``do("name", StepConfig(...), fn, ...)``, or ``do(fn, ...)``, which takes the
        function's name. The result is stored as JSON and comes back as the function's return annotation says,
        the first time as on every replay. Raises StepFailed when the retries are used up, or at once for a
        NonRetryableError.
        """
        return self._host.call(_body_call(args, kwargs))

    def sleep(self, name: str, duration: Duration) -> None:
        """Hibernate for ``duration`` (timedelta, seconds, or text); no worker is held."""
        self._host.call(SleepCall(name, duration))

    def sleep_until(self, name: str, when: datetime) -> None:
        """Hibernate until ``when``, which carries a time zone; the past ends at once."""
        self._host.call(SleepCall(name, 0, values.aware(when, "sleep_until")))

    @overload
    def wait_for_event(
        self, name: str, event_type: str, *, timeout: Duration = ..., schema: type[T]
    ) -> ReceivedEvent[T]: ...
    @overload
    def wait_for_event(self, name: str, event_type: str, *, timeout: Duration = ...) -> ReceivedEvent[Any]: ...
    def wait_for_event(
        self, name: str, event_type: str, *, timeout: Duration = DEFAULT_EVENT_TIMEOUT, schema: Any = None
    ) -> ReceivedEvent[Any]:
        """Hibernate until an event of this type is sent; the oldest one that nobody consumed, if there is one already.

        ``timeout``: 1 second to 365 days; then EventTimeout is raised. ``schema``: what the payload must be;
        one that is not is consumed and raises EventPayloadInvalid.
        """
        event: ReceivedEvent[Any] = self._host.call(WaitCall(name, event_type, timeout, schema))
        return event

    @overload
    def wait_for_topic(
        self, name: str, topic: str, *, timeout: Duration = ..., schema: type[T]
    ) -> ReceivedEvent[T]: ...
    @overload
    def wait_for_topic(self, name: str, topic: str, *, timeout: Duration = ...) -> ReceivedEvent[Any]: ...
    def wait_for_topic(
        self, name: str, topic: str, *, timeout: Duration = DEFAULT_EVENT_TIMEOUT, schema: Any = None
    ) -> ReceivedEvent[Any]:
        """Hibernate until something is emitted to this topic, from now on: nothing is kept for waits to come.

        ``timeout`` and ``schema``: as for `wait_for_event`. The ``type`` of what is returned is the topic.
        """
        event: ReceivedEvent[Any] = self._host.call(WaitCall(name, topic, timeout, schema, is_topic=True))
        return event

    def task(
        self,
        name: str,
        signature: Any,
        *,
        timeout: Duration = DEFAULT_TASK_TIMEOUT,
        retries: Retries | int | None = 0,
        on_lost: OnLost | None = None,
    ) -> Any:
        """Have a Celery task of yours do this step, on its own queue and worker, and return its result as JSON data.

        ``signature``: ``resize.s(7).set(queue="media")``, a task, or a task's name; no countdown, and no canvas. The
        workflow hibernates meanwhile, no worker is held. The message leaves once the step is recorded, at least once;
        the task tells by its id that it is the same. Celery's own retries go on within an attempt.

        ``timeout``: 1 second to 365 days for each attempt; one without an answer has failed then. ``retries``: how
        often, and how soon, it is sent again when it has failed; by default not at all. ``on_lost``: what becomes of it
        when its worker dies, or its queue is emptied. ``"resend"`` sends it again with the same id, and ends it as
        TaskLost at the third loss; ``"fail"`` ends it as TaskLost at once; ``"wait"`` leaves it to its timeout. The
        default is ``durable_task_on_lost``, "resend".

        Then StepFailed is raised, with the name of the task's error, StepTimeout or TaskLost. Raises TaskRefused for
        what cannot be kept, NotSerializable.
        """
        return self._host.call(_task_call(name, signature, timeout, retries, on_lost))

    def map(
        self,
        name: str,
        task: Any,
        items: Iterable[Any],
        *,
        max_concurrency: int | None = None,
        timeout: Duration = DEFAULT_TASK_TIMEOUT,
        retries: Retries | int | None = 0,
        on_lost: OnLost | None = None,
        return_exceptions: bool = False,
    ) -> list[Any]:
        """Have one Celery task do each item, and return their results in order; one step, however many there are.

        ``task``: as in `task`; each gets its item before the arguments of its signature. ``max_concurrency``: how many
        are out at a time, by default all. ``timeout``, ``retries`` and ``on_lost``: of each item, as in `task`. The
        workflow hibernates until all have answered. Then StepFailed is raised for the first item that failed, or with
        ``return_exceptions`` put into the list. Up to 10,000 items; raises ValueRefused beyond, and as `task` does.
        """
        config = _task_config(timeout, retries)
        call = _map_call(
            name,
            task,
            items,
            config,
            most=max_concurrency,
            on_lost=on_lost,
            return_exceptions=return_exceptions,
        )
        results: list[Any] = self._host.call(call)
        return results

    def child(
        self,
        name: str,
        workflow: Typed[W, T],
        params: W | None = None,
        *,
        id: str | None = None,  # the public name
        timeout: Duration | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> T:
        """Have an instance of another workflow do this step, and return its output; hibernate meanwhile.

        The instance is created in the commit that records the step. ``id``: its id, by default one derived from this
        run and step. It lives on its own: whatever happens to this run, it goes on, and a restart of this run creates
        another. ``timeout``: 1 second to 365 days, by default as long as a sleep may be; then StepTimeout is raised,
        and the child goes on. Raises StepFailed: with the name of the error that ended it; ``ChildTerminated``, when
        somebody terminated it; ``InstanceAlreadyExists``, when the id is taken; ``WorkflowParamsInvalid``.
        """
        output: T = self._host.call(_child_call(name, workflow, params, id=id, timeout=timeout, labels=labels))
        return output

    @overload
    def submit(
        self, name: str, fn: Callable[Concatenate[StepTx, P], T], /, *args: P.args, **kwargs: P.kwargs
    ) -> StepFuture[T]: ...
    @overload
    def submit(self, name: str, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> StepFuture[T]: ...
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
        self, name: str, config: StepConfig, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> StepFuture[T]: ...
    @overload
    def submit(
        self, fn: Callable[Concatenate[StepTx, P], T], /, *args: P.args, **kwargs: P.kwargs
    ) -> StepFuture[T]: ...
    @overload
    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> StepFuture[T]: ...
    def submit(self, /, *args: Any, **kwargs: Any) -> StepFuture[Any]:
        """As `do`, but as a branch: it starts when it is gathered, on a thread of its own."""
        return self._host.submit(_body_call(args, kwargs))

    def submit_sleep(self, name: str, duration: Duration) -> StepFuture[None]:
        """As `sleep`, but as a branch."""
        return self._host.submit(SleepCall(name, duration))

    @overload
    def submit_wait_for_event(
        self, name: str, event_type: str, *, timeout: Duration = ..., schema: type[T]
    ) -> StepFuture[ReceivedEvent[T]]: ...
    @overload
    def submit_wait_for_event(
        self, name: str, event_type: str, *, timeout: Duration = ...
    ) -> StepFuture[ReceivedEvent[Any]]: ...
    def submit_wait_for_event(
        self, name: str, event_type: str, *, timeout: Duration = DEFAULT_EVENT_TIMEOUT, schema: Any = None
    ) -> StepFuture[Any]:
        """As `wait_for_event`, but as a branch."""
        return self._host.submit(WaitCall(name, event_type, timeout, schema))

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
        """As `wait_for_topic`, but as a branch."""
        return self._host.submit(WaitCall(name, topic, timeout, schema, is_topic=True))

    def submit_task(
        self,
        name: str,
        signature: Any,
        *,
        timeout: Duration = DEFAULT_TASK_TIMEOUT,
        retries: Retries | int | None = 0,
        on_lost: OnLost | None = None,
    ) -> StepFuture[Any]:
        """As `task`, but as a branch; it is sent when it is gathered."""
        return self._host.submit(_task_call(name, signature, timeout, retries, on_lost))

    def submit_map(
        self,
        name: str,
        task: Any,
        items: Iterable[Any],
        *,
        max_concurrency: int | None = None,
        timeout: Duration = DEFAULT_TASK_TIMEOUT,
        retries: Retries | int | None = 0,
        on_lost: OnLost | None = None,
        return_exceptions: bool = False,
    ) -> StepFuture[list[Any]]:
        """As `map`, but as a branch; its tasks are sent when it is gathered."""
        config = _task_config(timeout, retries)
        call = _map_call(
            name,
            task,
            items,
            config,
            most=max_concurrency,
            on_lost=on_lost,
            return_exceptions=return_exceptions,
        )
        return self._host.submit(call)

    def submit_child(
        self,
        name: str,
        workflow: Typed[W, T],
        params: W | None = None,
        *,
        id: str | None = None,  # the public name
        timeout: Duration | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> StepFuture[T]:
        """As `child`, but as a branch; it is created when it is gathered."""
        return self._host.submit(_child_call(name, workflow, params, id=id, timeout=timeout, labels=labels))

    @overload
    def gather(self, *futures: StepFuture[T], return_exceptions: Literal[False] = ...) -> list[T]: ...
    @overload
    def gather(self, *futures: StepFuture[T], return_exceptions: Literal[True]) -> list[T | Exception]: ...
    def gather(self, *futures: StepFuture[Any], return_exceptions: bool = False) -> list[Any]:
        """Run branches at the same time and return their results in order.

        While one is still to come (it sleeps, waits or is to be tried again) the workflow hibernates. When all have
        ended, raises the first failure in the order of the arguments, or with ``return_exceptions`` puts failures into
        the list. A branch that has ended never runs again.
        """
        return self._host.gather(futures, return_exceptions=return_exceptions)

    def first(self, name: str, *futures: StepFuture[T]) -> T:
        """Run branches at the same time and return the result of the one that ends first; record which it was.

        The others are cancelled in the same commit: they never start, wait or consume any more. A body that is
        running then is left to end by itself; nothing of it is recorded.
        """
        winner: T = self._host.first(name, futures)
        return winner

    def publish(self, key: str, value: Any) -> None:
        """Show ``value`` under ``key`` to whoever looks at the instance, at once; also in a step's function.

        The newest value counts. Nothing is done on replay, and a value that cannot be written now, or that comes within
        a second of the one before, is written with the next step. ``key``: text of up to 64 characters. Raises
        NameInvalid, NotSerializable, PayloadTooLarge.
        """
        self._host.publish(key, value)

    def now(self) -> datetime:
        """The time, the same on every pass: when the step that returned last had ended."""
        return self._host.now()

    def random(self) -> float:
        """A random number from 0 to 1, the same on every pass."""
        return self._host.chance().random()

    def uuid(self) -> str:
        """A random UUID, the same on every pass."""
        bits = self._host.chance().getrandbits(128)
        text = f"{bits & ~(0xF << 76) & ~(0x3 << 62) | (0x4 << 76) | (0x2 << 62):032x}"
        return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


class LogHost(Protocol):
    """What keeps log lines for the next boundary."""

    def log(self, level: LogLevel, message: str, category: str, data: dict[str, Any]) -> None: ...


class StepLog:
    """The durable log of a run. Lines are stored with the next step boundary."""

    def __init__(self, host: LogHost) -> None:
        self._host = host

    def debug(self, message: str, /, *, category: str = "workflow", **data: Any) -> None:
        self._host.log(LogLevel.DEBUG, message, category, data)

    def info(self, message: str, /, *, category: str = "workflow", **data: Any) -> None:
        """Log a line with JSON data. Outside steps a line is logged on every pass; replays are marked as such."""
        self._host.log(LogLevel.INFO, message, category, data)

    def warning(self, message: str, /, *, category: str = "workflow", **data: Any) -> None:
        self._host.log(LogLevel.WARNING, message, category, data)

    def error(self, message: str, /, *, category: str = "workflow", **data: Any) -> None:
        self._host.log(LogLevel.ERROR, message, category, data)


def _body_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> BodyCall:
    """Sort the arguments of `do`: [name,] [config,] fn, then the function's own."""
    rest = list(args)
    name = rest.pop(0) if rest and isinstance(rest[0], str) else None
    config = rest.pop(0) if rest and isinstance(rest[0], StepConfig) else None
    if not rest or not callable(rest[0]):
        raise DefinitionInvalid(
            "step.do() needs a function: step.do('name', fn, *args) or step.do('name', StepConfig(...), fn, *args); "
            f"it got {args!r}."
        )
    return BodyCall(name, config, rest[0], tuple(rest[1:]), kwargs)


def _task_call(
    name: str, signature: Any, timeout: Duration, retries: Retries | int | None, on_lost: OnLost | None
) -> TaskCall:
    return TaskCall(name, signature, _task_config(timeout, retries), _on_lost(on_lost))


def _on_lost(on_lost: OnLost | None) -> OnLost | None:
    if on_lost is not None and on_lost not in get_args(OnLost):
        raise ValueRefused(f"on_lost={on_lost!r} must be one of {', '.join(get_args(OnLost))}.")
    return on_lost


def _task_config(timeout: Duration, retries: Retries | int | None) -> StepConfig:
    return StepConfig(retries=retries, timeout=duration(timeout, minimum=_SHORTEST_TIMEOUT))


def _map_call(
    name: str,
    task: Any,
    items: Iterable[Any],
    config: StepConfig,
    *,
    most: Any,
    on_lost: OnLost | None,
    return_exceptions: bool,
) -> MapCall:
    if most is not None and (isinstance(most, bool) or not isinstance(most, int) or most < 1):
        raise ValueRefused(f"max_concurrency={most!r} of step {name!r} must be at least 1, or None for all at once.")
    given = tuple(items)
    if len(given) > MOST_ITEMS:
        raise ValueRefused(
            f"step.map({name!r}) got {len(given)} items, and {MOST_ITEMS} is the most: map chunks of them, or have "
            "child workflows map a part each."
        )
    return MapCall(name, task, given, config, most, return_exceptions, _on_lost(on_lost))


def _child_call(
    name: str,
    workflow: Defined,
    params: Any,
    *,
    id: str | None,  # the public name
    timeout: Duration | None,
    labels: Mapping[str, str] | None,
) -> ChildCall:
    definition = getattr(workflow, "definition", None)
    if not isinstance(definition, Definition):
        raise DefinitionInvalid(
            f"step.child({name!r}) needs a workflow, and got {workflow!r}: pass what @durable_workflow made."
        )
    return ChildCall(name, definition, params, id, timeout, values.labels(labels))
