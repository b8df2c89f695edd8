"""What Celery and kombu would put on the wire, written down instead of sent.

Recording runs everything that `send_task` runs: routes, serializers, the task protocol, signals, patches of
instrumentation. It happens on the caller's thread, where trace contexts and the current task are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from celery import Celery, signals
from celery.backends.rpc import RPCBackend
from kombu import Producer


@dataclass(frozen=True, slots=True, eq=False)
class RecordedMessage:
    """One message: the arguments of `channel.prepare_message`, where it goes, and what is declared before."""

    prepare: tuple[Any, ...]
    exchange: str
    routing_key: str
    declare: tuple[Any, ...]

    @property
    def body(self) -> Any:
        return self.prepare[0]

    @property
    def priority(self) -> int:
        return self.prepare[1] or 0

    @property
    def headers(self) -> Any:
        return self.prepare[4]

    @property
    def properties(self) -> Any:
        return self.prepare[5]


class _NoConnection:
    """What Celery and kombu ask of a producer's connection."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.transport_options: dict[str, Any] = {}
        self.client = self  # as a channel's connection
        # Celery asks for them when it retries a publish by itself. Nothing here ever raises one.
        self.recoverable_connection_errors = self.recoverable_channel_errors = ()

    _reraise_as_library_errors = staticmethod(contextlib.nullcontext)

    def ensure(self, obj: Any, fun: Callable[..., Any], **_: Any) -> Callable[..., Any]:
        if isinstance(obj, Producer):
            return fun
        # A result backend that declares its reply queue.
        return lambda *_, **__: self._recorder.maybe_declare(obj)


class Recorder(Producer):
    """A real producer over a channel that only writes down."""

    def __init__(self) -> None:
        super().__init__(None, auto_declare=False)  # type: ignore[arg-type]  # no channel yet: it is its own
        self.calls: list[RecordedMessage] = []
        self._entities: list[Any] = []
        self._connection = _NoConnection(self)
        self._channel = self

    @property
    def connection(self) -> Any:
        return self._connection

    @property
    def is_open(self) -> bool:
        return True

    def maybe_declare(self, entity: Any, *_: Any, **__: Any) -> bool:
        self._entities.append(entity)
        return True

    def prepare_message(self, *args: Any) -> tuple[Any, ...]:
        """As a channel's: what becomes of it depends on the transport."""
        return args

    def basic_publish(self, message: tuple[Any, ...], exchange: str, routing_key: str, **_: Any) -> None:
        """As a channel's."""
        self.calls.append(RecordedMessage(message, exchange, routing_key, tuple(self._entities)))
        self._entities = []


def keep_off_backend(app: Celery) -> None:
    """Have the application's result backend not subscribe to the result of what is recorded.

    Redis's does when a task is sent, over a connection of its own: it waits for 20 s where that is refused, for minutes
    where it hangs, and keeps the subscription for as long as the process lives. Nothing here reads the result; an
    application that asks for it subscribes then. RPC's declares its reply queue by the producer, so that is recorded.
    """
    backend: Any = app.backend
    subscribe = backend.on_task_call
    if isinstance(backend, RPCBackend) or isinstance(subscribe, _Subscribe):
        return
    backend.on_task_call = _Subscribe(subscribe)


class _Subscribe:
    """A result backend's ``on_task_call`` for all producers but a recorder."""

    def __init__(self, subscribe: Callable[[Any, str], Any]) -> None:
        self._subscribe = subscribe

    def __call__(self, producer: Any, task_id: str) -> Any:
        return {} if isinstance(producer, Recorder) else self._subscribe(producer, task_id)


def is_watched(app: Celery) -> bool:
    """Whether anybody sees or changes what is published: then each message is recorded.

    Sentry patches `Celery.send_task` and `Producer.publish`, OpenTelemetry uses the signals. A patch is seen by its
    file: functools.wraps fakes the rest.
    """
    is_patched = _is_patched(type(app).send_task, "celery/app/base.py")
    is_patched = is_patched or _is_patched(Producer.publish, "kombu/messaging.py")
    watched = (signals.before_task_publish, signals.after_task_publish, signals.task_sent)
    conf: Any = app.conf
    return bool(is_patched or conf.task_send_sent_event or any(each.receivers for each in watched))


def _is_patched(function: object, file: str) -> bool:
    # A proxy of wrapt shows the attributes of what it wraps, its code too.
    return type(function) is not FunctionType or not function.__code__.co_filename.endswith(file)
