"""What an author holds: Step, in the workflow; StepTx, in a step's body; futures of parallel branches; the log.

Thin: every verb hands its call to the pass that runs the workflow (`StepHost`).
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Concatenate, Generic, Literal, ParamSpec, Protocol, TypeVar, overload

from sqlalchemy.orm import Session

from celery_durable import values
from celery_durable.definitions import Definition
from celery_durable.errors import DefinitionInvalid, StepTxMisuse
from celery_durable.model import LogLevel, Outgoing, ReceivedEvent
from celery_durable.values import Duration, PayloadLimits, StepConfig, outgoing_event, outgoing_task

P = ParamSpec("P")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

DEFAULT_EVENT_TIMEOUT = "24 hours"


class Defined(Protocol):
    """Anything that carries a workflow's definition, such as the handle that `@durable_workflow` makes."""

    @property
    def definition(self) -> Definition: ...


@dataclass(frozen=True, slots=True)
class BodyCall:
    """A call of `do` or `submit`."""

    name: str | None
    config: StepConfig | None
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True, slots=True)
class SleepCall:
    """A call of `sleep`, or of `sleep_until`: then ``until`` counts, and ``span`` says nothing."""

    name: str
    span: Duration
    until: datetime | None = None


@dataclass(frozen=True, slots=True)
class WaitCall:
    """A call of `wait_for_event`, or of `wait_for_topic`: then ``event_type`` is the topic."""

    name: str
    event_type: str
    timeout: Duration
    schema: Any
    is_topic: bool = False


StepCall = BodyCall | SleepCall | WaitCall


class StepHost(Protocol):
    """What a pass does for the Step that it lends to a workflow."""

    def call(self, call: StepCall) -> Any: ...
    def submit(self, call: StepCall) -> StepFuture[Any]: ...
    def gather(self, futures: tuple[StepFuture[Any], ...], *, return_exceptions: bool) -> list[Any]: ...
    def first(self, name: str, futures: tuple[StepFuture[Any], ...]) -> Any: ...
    def log(self, level: LogLevel, message: str, category: str, data: dict[str, Any]) -> None: ...
    def publish(self, key: str, value: Any) -> None: ...
    def now(self) -> datetime: ...
    def chance(self) -> random.Random: ...


class StepFuture(Generic[T_co]):
    """A branch: a step that `gather`, `first` or `result` runs, at the same time as its siblings."""

    def __init__(self, host: StepHost, name: str, key: str, branch: object) -> None:
        self.name, self.key = name, key
        self.branch = branch
        self._host = host

    def result(self) -> T_co:
        """Run this branch alone, or hand out what gather() got; raises StepFailed as `do` would."""
        results: list[T_co] = self._host.gather((self,), return_exceptions=False)
        return results[0]

    def __repr__(self) -> str:
        return f"<StepFuture {self.name!r}>"


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
        self._host.call(SleepCall(name, 0, when))

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


# --- in the body --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NewInstance:
    """A `StepTx.create`, to be carried out at the boundary."""

    definition: Definition
    instance_id: str
    params: Any
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class NewEvent:
    """A `StepTx.send_event`, to be carried out at the boundary."""

    workflow: str
    instance_id: str
    type: str
    payload: Any
    event_id: str


@dataclass(frozen=True, slots=True)
class NewEmission:
    """A `StepTx.emit`, to be carried out at the boundary."""

    topic: str
    payload: Any
    emission_id: str


@dataclass(slots=True)
class TxBuffer:
    """What a body asked to have done with its boundary."""

    mutations: list[Callable[[Session], object]] = field(default_factory=list)
    on_terminal_error: list[Callable[[Session], object]] = field(default_factory=list)
    instances: list[NewInstance] = field(default_factory=list)
    events: list[NewEvent] = field(default_factory=list)
    emissions: list[NewEmission] = field(default_factory=list)
    outgoing: list[Outgoing] = field(default_factory=list)
    labels: dict[str, str | None] = field(default_factory=dict)
    session: Session | None = None


class StepTx:
    """The transaction in which a step is recorded. Injected into a body whose first parameter asks for it."""

    __durable_tx__ = True

    def __init__(
        self,
        *,
        name: str,
        attempt: int,
        idempotency_key: str,
        buffer: TxBuffer,
        open_session: Callable[[], Session],
        limits: PayloadLimits,
    ) -> None:
        self.name, self.attempt, self.idempotency_key = name, attempt, idempotency_key
        self._buffer, self._open_session, self._limits = buffer, open_session, limits

    @property
    def session(self) -> Session:
        """A session in the step's own transaction: its writes commit with the step, or not at all.

        Opened on first touch; touch it last, its locks are held until the step ends. commit, rollback and
        close are ours; begin_nested is allowed.
        """
        if self._buffer.session is None:
            self._buffer.session = _refuse_to_end(self._open_session(), self.name)
        return self._buffer.session

    def mutate(self, fn: Callable[[Session], object]) -> None:
        """Have ``fn(session)`` write when the step commits: the attempt that succeeds; it may run more than once."""
        self._buffer.mutations.append(self._within(fn))

    def on_terminal_error(self, fn: Callable[[Session], object]) -> None:
        """Have ``fn(session)`` write when the step fails for good, in the transaction that records the failure."""
        self._buffer.on_terminal_error.append(self._within(fn))

    def _within(self, fn: Callable[[Session], object]) -> Callable[[Session], object]:
        """``fn``, kept from ending the transaction of a session that the engine made for it and will close."""

        def write(session: Session) -> object:
            if session is self._buffer.session:
                return fn(session)
            _refuse_to_end(session, self.name)
            try:
                return fn(session)
            finally:
                allow_to_end(session)

        return write

    def create(
        self,
        workflow: Defined,
        params: Any = None,
        *,
        id: str | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> str:
        """Start an instance when the step commits; answers with its id, by default one derived from this step."""
        instance_id = f"{self.idempotency_key}-{len(self._buffer.instances)}" if id is None else id
        self._buffer.instances.append(NewInstance(workflow.definition, instance_id, params, values.labels(labels)))
        return instance_id

    def set_labels(self, labels: Mapping[str, str | None]) -> None:
        """Change the labels of this instance when the step commits: those named here; None takes one away.

        Raises InvalidLabel. More than 16 in all fail the step: TooManyLabels.
        """
        self._buffer.labels.update(values.label_changes(labels))

    def send_event(
        self,
        workflow: Defined,
        instance_id: str,
        event_type: str,
        payload: Any = None,
        *,
        id: str | None = None,
    ) -> None:
        """Send an event to an instance when the step commits, exactly once."""
        event_id = f"{self.idempotency_key}-{len(self._buffer.events)}" if id is None else id
        self._buffer.events.append(NewEvent(workflow.definition.name, instance_id, event_type, payload, event_id))

    def emit(self, topic: str, payload: Any = None) -> None:
        """Emit to a topic when the step commits, exactly once; a dispatcher hands it to those who wait then."""
        emission_id = f"{self.idempotency_key}-{len(self._buffer.emissions)}"
        self._buffer.emissions.append(NewEmission(topic, payload, emission_id))

    def send_task(self, task: Any, /, *args: Any, **kwargs: Any) -> str:
        """Send a Celery task once the step has committed, at least once; answers with its id.

        ``send_task(mail.s(7).set(queue="mails"))``, ``send_task(mail, 7)`` or ``send_task("shop.mail", 7)``. The
        arguments become JSON here and now. The id is this step's, so the task can tell a repetition. Raises
        TaskRefused for what could not be kept, such as a countdown; NotSerializable names the path.
        """
        return self._send(outgoing_task(task, args, kwargs, id_=self._next_id(), limits=self._limits))

    def send_outbound(self, name: str, payload: Any = None) -> str:
        """Have the handler of this outbound event called once the step has committed, at least once; the event's id."""
        return self._send(outgoing_event(name, payload, id_=self._next_id(), limits=self._limits))

    def _next_id(self) -> str:
        return str(uuid.uuid5(uuid.UUID(self.idempotency_key), str(len(self._buffer.outgoing))))

    def _send(self, letter: Outgoing) -> str:
        self._buffer.outgoing.append(letter)
        return letter.id


_ENDS = ("commit", "rollback", "close", "reset", "invalidate", "prepare")


def _refuse_to_end(session: Session, step: str) -> Session:
    for verb in _ENDS:
        setattr(session, verb, _refused(step, verb))

    def begin(*, nested: bool = False) -> Any:
        # Leaving `with session.begin():` commits. A savepoint is no end, and begin_nested() passes here.
        return type(session).begin(session, nested=True) if nested else _refused(step, "begin")()

    vars(session)["begin"] = begin
    return session


def allow_to_end(session: Session) -> None:
    """Give a session back the verbs that were refused to the author."""
    for verb in (*_ENDS, "begin"):
        vars(session).pop(verb, None)


def _refused(step: str, what: str) -> Callable[..., None]:
    def refuse(*_: object, **__: object) -> None:
        raise StepTxMisuse(
            f"tx.session.{what}() in step {step!r}: the session commits with the step's record. "
            "Return to commit, raise to roll back, use tx.session.begin_nested() for a savepoint."
        )

    return refuse
