"""`Step`, which a workflow calls; every method hands its call to the pass that runs the workflow (`StepContext`)."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, Unpack, overload

from celery_durable import values
from celery_durable.errors import StepFailed
from celery_durable.model import OnLost, OnParentEnd, ReceivedEvent
from celery_durable.step.branches import Branches
from celery_durable.step.calls import (
    DEFAULT_EVENT_TIMEOUT,
    SleepCall,
    StepCall,
    StepContext,
    WaitCall,
    build_body_call,
)
from celery_durable.step.log import StepLog
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


class Step(Branches):
    """The second parameter of a workflow's function. Each call of a method with a name is a step.

    The result of a step is recorded when it ends. On later passes the same call returns the recorded result, so the
    code between steps must be deterministic. A name is text of 1 to 256 characters, unique within the run.

    Every method but `publish` raises StepMisuse in a step's function, on another thread, and after the workflow's
    function has ended. Methods that take a name raise StepNameReused, StepTypeMismatch, StepLimitExceeded and
    NameInvalid; uncaught, these fail the instance.

    Attributes:
        log: The durable log of the run, a `StepLog`.
    """

    def __init__(self, context: StepContext) -> None:
        super().__init__(context)
        self.log = StepLog(context)

    @overload
    def do(
        self,
        name: str,
        fn: Callable[Concatenate[StepTx, P], Coroutine[Any, Any, T]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T: ...
    @overload
    def do(self, name: str, fn: Callable[Concatenate[StepTx, P], T], /, *args: P.args, **kwargs: P.kwargs) -> T: ...
    @overload
    def do(self, name: str, fn: Callable[P, Coroutine[Any, Any, T]], /, *args: P.args, **kwargs: P.kwargs) -> T: ...
    @overload
    def do(self, name: str, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T: ...
    @overload
    def do(
        self,
        name: str,
        config: StepConfig,
        fn: Callable[Concatenate[StepTx, P], Coroutine[Any, Any, T]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T: ...
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
    def do(
        self,
        name: str,
        config: StepConfig,
        fn: Callable[P, Coroutine[Any, Any, T]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T: ...
    @overload
    def do(self, name: str, config: StepConfig, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T: ...
    @overload
    def do(
        self, fn: Callable[Concatenate[StepTx, P], Coroutine[Any, Any, T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> T: ...
    @overload
    def do(self, fn: Callable[Concatenate[StepTx, P], T], /, *args: P.args, **kwargs: P.kwargs) -> T: ...
    @overload
    def do(self, fn: Callable[P, Coroutine[Any, Any, T]], /, *args: P.args, **kwargs: P.kwargs) -> T: ...
    @overload
    def do(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T: ...
    def do(self, /, *args: Any, **kwargs: Any) -> Any:
        """Run ``fn(*args, **kwargs)`` as a step and return its result.

        Written as ``do("name", fn, ...)``, as ``do("name", StepConfig(...), fn, ...)``, or as ``do(fn, ...)``, which
        uses the function's name. If the first parameter of ``fn`` is annotated with `StepTx`, it gets one.

        Args:
            args: The name and the `StepConfig` if given, the function, and its positional arguments.
            kwargs: The function's keyword arguments.

        Returns:
            The result, stored as JSON and converted to the return annotation of ``fn``; the same on every pass.

        Raises:
            StepFailed: The retries are used up, or ``fn`` raised a NonRetryableError.
            StepTimeout: The last attempt took longer than the timeout.
            StepMaxAttemptsExceeded: Workers died in every attempt.
            DefinitionInvalid: The arguments contain no function.
        """
        return self._context.call(build_body_call(args, kwargs))

    def call(self, call: StepCall) -> Any:
        """Call a step of a kind that another package has registered (`celery_durable.runner.step_kinds`)."""
        return self._context.call(call)

    def sleep(self, name: str, duration: Duration) -> None:
        """Sleep without occupying a worker.

        Args:
            name: The step's name.
            duration: Up to ``durable_max_sleep_seconds`` (a year): a timedelta, seconds, or text such as "3 days".

        Raises:
            DurationInvalid: The duration cannot be read or is out of range.
        """
        self._context.call(SleepCall(name, duration))

    def sleep_until(self, name: str, when: datetime) -> None:
        """Sleep until a point in time without occupying a worker. A time in the past ends the sleep at once.

        Args:
            name: The step's name.
            when: An aware datetime, up to ``durable_max_sleep_seconds`` (a year) ahead.

        Raises:
            InstantInvalid: ``when`` has no time zone.
            SleepTooFar: ``when`` is too far ahead.
        """
        self._context.call(SleepCall(name, 0, values.to_utc(when, "sleep_until")))

    @overload
    def wait_for_event(
        self,
        name: str,
        event_type: str,
        *,
        timeout: Duration = ...,
        schema: type[T],
        schema_error: Literal["refuse", "raise"] = ...,
        ask: str | Mapping[str, Any] | None = ...,
        to: str | None = ...,
    ) -> ReceivedEvent[T]: ...
    @overload
    def wait_for_event(
        self,
        name: str,
        event_type: str,
        *,
        timeout: Duration = ...,
        ask: str | Mapping[str, Any] | None = ...,
        to: str | None = ...,
    ) -> ReceivedEvent[Any]: ...
    def wait_for_event(
        self,
        name: str,
        event_type: str,
        *,
        timeout: Duration = DEFAULT_EVENT_TIMEOUT,
        schema: Any = None,
        schema_error: Literal["refuse", "raise"] = "refuse",
        ask: str | Mapping[str, Any] | None = None,
        to: str | None = None,
    ) -> ReceivedEvent[Any]:
        """Wait for an event of this type, without occupying a worker.

        Takes the oldest event of this type that no other wait has consumed, also one that was sent earlier.

        Args:
            name: The step's name.
            event_type: 1 to 100 of the characters ``a-z A-Z 0-9 _ -``.
            timeout: 1 second to ``durable_max_sleep_seconds`` (a year).
            schema: The type of the payload, such as a pydantic model. None: JSON data as it is.
            schema_error: What becomes of an event that does not fit the schema. "refuse": `send_event` raises
                `EventRefused` and stores nothing, if the run waits and the sender has imported the schema, a class.
                "raise": the event is stored. Each event that is stored and does not fit is consumed, and raises
                EventPayloadInvalid here.
            ask: A question to a person, as one sentence or as a dict of facts, such as ``{"cents": 1999}``. Lists of
                waits show it, and `WorkflowInstance.answer` answers it.
            to: Whom it asks, such as a team, to filter these lists.

        Returns:
            The event. Its ``by`` is the name of the person who answered.

        Raises:
            EventTimeout: No event came in time.
            EventPayloadInvalid: The payload of a stored event does not fit the schema. The event is consumed.
            InvalidEventType: The type breaks the rules.
            DurationInvalid: The timeout cannot be read or is out of range.
            ValueRefused: ``ask`` or ``to`` cannot be used.
        """
        question = values.check_question(name, ask, to)
        call = WaitCall(name, event_type, timeout, schema, schema_error=schema_error, ask=question, to=to)
        event: ReceivedEvent[Any] = self._context.call(call)
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
        """Wait for an emission to this topic, without occupying a worker.

        Emissions from before the wait are not kept for it.

        Args:
            name: The step's name.
            topic: 1 to 100 of the characters ``a-z A-Z 0-9 _ - . : /``.
            timeout: As in `wait_for_event`.
            schema: As in `wait_for_event`.

        Returns:
            An event whose ``type`` is the topic.

        Raises:
            EventTimeout: Nothing was emitted in time.
            EventPayloadInvalid: The payload does not fit the schema.
            InvalidTopic: The topic breaks the rules.
            DurationInvalid: The timeout cannot be read or is out of range.
        """
        event: ReceivedEvent[Any] = self._context.call(WaitCall(name, topic, timeout, schema, is_topic=True))
        return event

    def task(
        self,
        name: str,
        signature: Any,
        *,
        timeout: Duration = DEFAULT_TASK_TIMEOUT,
        retries: Retries | int | None = 0,
        on_lost: OnLost | None = None,
        limits: Sequence[Limit] = (),
    ) -> Any:
        """Run one of your Celery tasks as a step, on its own queue and worker, and return its result.

        The workflow waits without occupying a worker. The message is sent after the step is recorded, at least once; a
        repeated message has the same task id. Retries of Celery itself happen within one attempt.

        Args:
            name: The step's name.
            signature: ``resize.s(7).set(queue="media")``, a task, or a task's name. No countdown, no ETA and no canvas.
            timeout: Time limit of each attempt, 1 second to a year. An attempt without an answer then fails.
            retries: How often and how soon a failed task is sent again.
            on_lost: What happens if the task's worker dies or its queue is emptied. "resend": the task is sent again
                with the same id; it fails as ``TaskLost`` when it is lost for the third time. "fail": it fails as
                ``TaskLost`` at once. "wait": it waits for its timeout, unless its worker survives and saw its process
                die: then as "resend". None: ``durable_task_on_lost`` decides.
            limits: The limits that an attempt holds from when it is sent until it answers.

        Returns:
            The task's result as JSON data.

        Raises:
            StepFailed: The task failed; ``error_name`` is the name of its error, or "TaskLost".
            StepTimeout: It did not answer in time.
            TaskRefused: The task or an option of it cannot be sent by a step.
            NotSerializable: Its arguments have no JSON form.
            PayloadTooLarge: Its arguments are larger than ``durable_max_payload_bytes``.
        """
        return self._context.call(
            build_task_call(name, signature, timeout=timeout, retries=retries, on_lost=on_lost, limits=limits)
        )

    @overload
    def map(
        self, name: str, task: TypedWorkflow[W, T], items: Iterable[W], **options: Unpack[MapOptions]
    ) -> list[T]: ...
    @overload
    def map(
        self,
        name: str,
        task: TypedWorkflow[W, T],
        items: Iterable[W],
        *,
        return_exceptions: Literal[True],
        **options: Unpack[MapOptions],
    ) -> list[T | StepFailed]: ...
    @overload
    def map(
        self,
        name: str,
        task: Any,
        items: Iterable[Any],
        *,
        on_lost: OnLost | None = ...,
        return_exceptions: bool = ...,
        **options: Unpack[MapOptions],
    ) -> list[Any]: ...
    def map(
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
    ) -> list[Any]:
        """Run a task, or an instance of a workflow, for each item, as one step, and return the results in their order.

        The workflow waits without occupying a worker until all have ended.

        Args:
            name: The step's name.
            task: As ``signature`` in `task`; it gets the item before the arguments of its signature. Or a `Workflow`;
                the item is the parameters of its instance, a child.
            items: Up to 10,000 JSON values.
            max_concurrency: How many tasks or children may be in progress at the same time. None: all.
            timeout: Time limit of each attempt at an item, as in `task` or `child`. None: 24 hours for a task,
                ``durable_max_sleep_seconds`` for a child.
            retries: Retries of each item, as in `task`. A retry creates another child.
            on_lost: What happens if the task of an item is lost, as in `task`. Not for workflows.
            return_exceptions: Put the failure of an item into the list instead of raising it.
            limits: The limits that each item holds from when it is sent until it answers.

        Returns:
            A result for each item, or a StepFailed if ``return_exceptions`` is true.

        Raises:
            StepFailed: An item failed; the first one in the order of the items. Or ``error_name`` is
                "WorkflowParamsInvalid", and no child was created.
            ValueRefused: There are too many items, ``items`` is text, ``max_concurrency`` is less than 1, or
                ``on_lost`` is given for a workflow.
            TaskRefused: As in `task`.
            NotSerializable: As in `task`.
        """
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
        results: list[Any] = self._context.call(call)
        return results

    def child(
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
    ) -> T:
        """Run another workflow as a step and return its output.

        The child is created when the step is recorded. It continues if this run completes or fails, and a restart of
        this run creates another child.

        Args:
            name: The step's name.
            workflow: The `Workflow`.
            params: As in `Workflow.create`.
            id: The child's id. None: one derived from this run and step.
            timeout: 1 second to a year; the child continues after it. None: ``durable_max_sleep_seconds``.
            labels: As in `Workflow.create`.
            on_parent_end: If this run is terminated: "terminate" the child too, or let it "continue".
            limits: The limits that the step holds from when it creates the child until the child ends.

        Returns:
            The child's output.

        Raises:
            StepFailed: ``error_name`` is the name of the error that ended the child, "ChildTerminated" if it was
                terminated, "InstanceAlreadyExists" if the id is taken, or "WorkflowParamsInvalid".
            StepTimeout: It did not end in time.
            DefinitionInvalid: ``workflow`` is not a workflow.
            ValueRefused: ``on_parent_end`` is neither.
        """
        call = build_child_call(
            name, workflow, params, id=id, timeout=timeout, labels=labels, on_parent_end=on_parent_end, limits=limits
        )
        output: T = self._context.call(call)
        return output

    def publish(self, key: str, value: Any) -> None:
        """Publish a value, such as progress, that readers of the instance see at once.

        You may also call it in a step's function. On replay it does nothing. A value that cannot be written now, or
        that follows the previous one within a second, is written with the next step.

        Args:
            key: 1 to 64 characters. A later value replaces an earlier one.
            value: JSON data of up to 1 MiB.

        Raises:
            NameInvalid: The key breaks the rules.
            NotSerializable: The value has no JSON form.
            PayloadTooLarge: The value is larger than ``durable_max_payload_bytes``.
        """
        self._context.publish(key, value)

    def now(self) -> datetime:
        """Return the UTC time at which the last returned step ended; before the first step, when the run was created.

        The value is the same on every pass.
        """
        return self._context.now()

    def random(self) -> float:
        """Return a random number of at least 0 and less than 1, the same on every pass."""
        return self._context.random_source().random()

    def uuid(self) -> str:
        """Return a random UUID as text, the same on every pass."""
        bits = self._context.random_source().getrandbits(128)
        text = f"{bits & ~(0xF << 76) & ~(0x3 << 62) | (0x4 << 76) | (0x2 << 62):032x}"
        return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"
