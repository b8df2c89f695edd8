"""The recorder: records the messages that Celery and kombu would send, instead of sending them.

It runs all that `send_task` runs: routes, serializers, signals, and patches of instrumentation libraries, on the
caller's thread, which has the trace context and the current task.
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
    """One message: the arguments of `channel.prepare_message`, its destination, and the entities to declare before."""

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
    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.transport_options: dict[str, Any] = {}
        self.client = self  # the connection of a real channel has this attribute
        # Celery reads these when it retries a publish itself. The recorder never raises such an error.
        self.recoverable_connection_errors = self.recoverable_channel_errors = ()

    _reraise_as_library_errors = staticmethod(contextlib.nullcontext)

    def ensure(self, obj: Any, fun: Callable[..., Any], **_: Any) -> Callable[..., Any]:
        if isinstance(obj, Producer):
            return fun
        # A result backend declares its reply queue.
        return lambda *_, **__: self._recorder.maybe_declare(obj)


class Recorder(Producer):
    """A real producer over a channel that only records messages."""

    def __init__(self) -> None:
        super().__init__(None, auto_declare=False)  # type: ignore[arg-type]  # the recorder is its own channel
        self.messages: list[RecordedMessage] = []
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
        return args

    def basic_publish(self, message: tuple[Any, ...], exchange: str, routing_key: str, **_: Any) -> None:
        self.messages.append(RecordedMessage(message, exchange, routing_key, tuple(self._entities)))
        self._entities = []


def prevent_result_subscription(app: Celery) -> None:
    """Keep the application's result backend from subscribing to the results of recorded messages.

    The Redis backend subscribes when a task is sent, for the life of the process, over a connection of its own: it
    waits for 20 s if it is refused and for minutes if it hangs. An application that reads the result subscribes then.
    The RPC backend declares its reply queue through the producer, so the recorder records that.
    """
    backend: Any = app.backend
    subscribe = backend.on_task_call
    if isinstance(backend, RPCBackend) or isinstance(subscribe, _SubscribeUnlessRecorder):
        return
    backend.on_task_call = _SubscribeUnlessRecorder(subscribe)


class _SubscribeUnlessRecorder:
    """Calls a result backend's ``on_task_call`` for each producer that is not a recorder."""

    def __init__(self, subscribe: Callable[[Any, str], Any]) -> None:
        self._subscribe = subscribe

    def __call__(self, producer: Any, task_id: str) -> Any:
        return {} if isinstance(producer, Recorder) else self._subscribe(producer, task_id)


def is_publish_observed(app: Celery) -> bool:
    """Whether other code observes or changes published messages, as Sentry does by patches; then no templates are used.

    A patch is recognized by the file of its code, as functools.wraps copies the other attributes.
    """
    is_patched = _is_patched(type(app).send_task, "celery/app/base.py")
    is_patched = is_patched or _is_patched(Producer.publish, "kombu/messaging.py")
    watched = (signals.before_task_publish, signals.after_task_publish, signals.task_sent)
    conf: Any = app.conf
    return bool(is_patched or conf.task_send_sent_event or any(each.receivers for each in watched))


def _is_patched(function: object, file: str) -> bool:
    # A wrapt proxy shows all attributes of the wrapped function, its code too; only its type differs.
    return type(function) is not FunctionType or not function.__code__.co_filename.endswith(file)
