"""The publisher: sends messages within a bounded time, keeps failures to one queue, and raises no broker errors.

A caller waits at most 3 s, and not at all while an outage of the broker is on record (LAW 7).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from celery import Celery
from celery.exceptions import QueueNotFound, SoftTimeLimitExceeded
from kombu.exceptions import OperationalError

from celery_durable.housekeeping import reset_in_child
from celery_durable.model import DueRun, OutboxKind, OutboxMessage
from celery_durable.runtime import Runtime
from celery_durable.tasks.publishing.batches import BatchItem, DestinationBatch
from celery_durable.tasks.publishing.circuit_breakers import CircuitBreakers
from celery_durable.tasks.publishing.eager import EagerTasks
from celery_durable.tasks.publishing.message_builder import MessageBuilder
from celery_durable.tasks.publishing.recorder import RecordedMessage
from celery_durable.tasks.publishing.report import BrokerOutage, PublishReport, SendState
from celery_durable.tasks.publishing.sender import Job, Sender
from celery_durable.tasks.publishing.transports import Transport, find_transport_class

T = TypeVar("T")

logger = logging.getLogger("celery_durable.tasks")

MAX_WAIT_SECONDS = 3.0
_JOB_SIZE = 1000
"""How many messages one job sends. If a job of a long list is late, the states of the earlier jobs are known."""


class Publisher:
    """Publishes messages for one app: `advance`, `deliver` for outbound events, and the tasks that steps send."""

    def __init__(
        self,
        app: Celery,
        advance: str,
        runtime: Runtime,
        *,
        deliver: str,
        answer_task_names: tuple[str, str],
        queue: Callable[[], str],
    ) -> None:
        self._app, self._runtime = app, runtime
        self._message_builder = MessageBuilder(
            app, runtime, advance=advance, deliver=deliver, answer_task_names=answer_task_names, queue=queue
        )
        self._eager = EagerTasks(
            app, self._message_builder, advance=advance, deliver=deliver, on_error=answer_task_names[1]
        )
        self._circuit_breakers = CircuitBreakers(runtime, lambda: str(app.connection_for_write().as_uri()))
        reset_in_child(self)

    @functools.cached_property
    def _kind(self) -> type[Transport]:
        return find_transport_class(self._app)

    @functools.cached_property
    def _sender(self) -> Sender:
        make_transport = functools.partial(self._kind, self._app, self._runtime.monotonic)
        return Sender(make_transport, self._circuit_breakers, self._runtime)

    # --- messages -------------------------------------------------------------------------------

    def publish(self, due_runs: Sequence[DueRun]) -> PublishReport:
        """Publish a message for each run; raises only the soft time limit of the calling task."""
        if self._app.conf.task_always_eager:
            self.run_eagerly(due_runs)
            return PublishReport.of(len(due_runs), SendState.SENT)
        return self._send_all(
            due_runs,
            lambda: self._message_builder.make_dispatch_builder(supports_templates=self._kind.supports_templates),
            lambda due: due.queue,
        )

    def send(self, messages: Sequence[OutboxMessage]) -> PublishReport:
        """Send messages of the outbox; raises only the soft time limit of the calling task."""
        if self._app.conf.task_always_eager:
            self.send_eagerly(messages)
            return PublishReport.of(len(messages), SendState.SENT)
        return self._send_all(messages, lambda: self._message_builder.build_outbox_messages, lambda _: None)

    def run_eagerly(self, due_runs: Sequence[DueRun]) -> None:
        self._eager.run(due_runs)

    def send_eagerly(self, messages: Sequence[OutboxMessage]) -> None:
        self._eager.send(messages)

    # --- the state of the broker ----------------------------------------------------------------

    def outages(self) -> Mapping[str | None, BrokerOutage]:
        """The outages that this process knows: of queues by name, and of the broker itself under None."""
        return self._circuit_breakers.outages()

    def queue_length(self, queue: str) -> int | None:
        """How many messages wait in a queue; None if the broker is down or cannot count them."""
        if self._is_broker_down():
            return None
        job = Job(request=lambda transport: transport.queue_length(queue))
        if not self._sender.run(job, MAX_WAIT_SECONDS):
            self._record_timeout(job)
        response: int | None = job.response
        return response

    def close(self) -> None:
        if "_sender" in self.__dict__:
            self._sender.close()

    # --- sending --------------------------------------------------------------------------------

    def _send_all(
        self,
        elements: Sequence[T],
        make_builder: Callable[[], Callable[[T], Sequence[RecordedMessage]]],
        queue_of: Callable[[T], str | None],
    ) -> PublishReport:
        states: list[SendState] = []
        errors: dict[int, Exception] = {}
        end = self._runtime.monotonic() + MAX_WAIT_SECONDS
        while len(states) < len(elements) and not self._is_broker_down():
            part = elements[len(states) : len(states) + _JOB_SIZE]
            left = end - self._runtime.monotonic()
            if left <= 0:
                break
            report = self._send_part(part, make_builder(), queue_of, left)
            errors |= {len(states) + index: error for index, error in report.errors.items()}
            states += report.states
            if states[-1] is SendState.UNSENT:
                break
        return PublishReport(states + [SendState.UNSENT] * (len(elements) - len(states)), errors)

    def _send_part(
        self,
        part: Sequence[T],
        make: Callable[[T], Sequence[RecordedMessage]],
        queue_of: Callable[[T], str | None],
        seconds: float,
    ) -> PublishReport:
        states = [SendState.UNSENT] * len(part)
        errors: dict[int, Exception] = {}
        batches = self._build_batches(part, make, queue_of, states, errors)
        if not batches:
            return PublishReport(states, errors)
        self._runtime.checkpoint("before-publish")
        job = Job(batches, may_run_on_caller=len(part) == 1 and self._kind.has_socket_timeouts)
        if not self._sender.run(job, seconds):
            self._record_timeout(job)
            # The race between the timeout and the thread: `Sender.run` has removed the job, unless the thread had
            # started it.
            if job.is_started:  # the thread may still send these messages
                states = [SendState.UNKNOWN if state is SendState.UNSENT else state for state in states]
            return PublishReport(list(states), dict(errors))
        self._runtime.checkpoint("after-publish")
        return PublishReport(states, errors)

    def _build_batches(
        self,
        part: Sequence[T],
        make: Callable[[T], Sequence[RecordedMessage]],
        queue_of: Callable[[T], str | None],
        states: list[SendState],
        errors: dict[int, Exception],
    ) -> list[DestinationBatch]:
        """Make the messages, each with its index in ``states``; messages to paused queues are refused at once.

        It runs the application's code and uses no broker. So an error here is final for its task, unless
        `_is_broker_error`. Internal messages are tried again in any case.
        """
        batches: dict[tuple[str, str], DestinationBatch] = {}
        refused: list[tuple[T, Exception]] = []
        for index, each in enumerate(part):
            is_task = isinstance(each, OutboxMessage) and each.kind is OutboxKind.TASK
            queue = queue_of(each)
            if queue is not None and self._circuit_breakers.is_paused(queue):
                states[index] = SendState.REFUSED
                continue
            try:
                messages = make(each)
            except SoftTimeLimitExceeded:
                raise  # the calling task has reached its time limit
            except Exception as exc:  # noqa: BLE001  # a queue that the app does not have, a task's own apply_async
                if is_task and not self._is_broker_error(exc):
                    states[index], errors[index] = SendState.UNSENDABLE, exc
                    continue
                states[index] = SendState.REFUSED
                if isinstance(exc, QueueNotFound) and queue is not None:
                    self._circuit_breakers.record_failure(queue, f"{type(exc).__name__}: {exc}")
                else:
                    refused.append((each, exc))
                continue
            if not messages:  # the task's own apply_async has decided to send nothing
                states[index] = SendState.SENT
                continue
            item = _item(messages[0], states, index, errors if is_task else None)
            batch = _batch_for(batches, item, queue)
            if batch.queue is not None and self._circuit_breakers.is_paused(batch.queue):
                states[index] = SendState.REFUSED
                continue
            batch.add(item)
            for event in messages[1:]:  # Celery's events about the message; no caller reads their states
                item = _item(event, [SendState.UNSENT], 0)
                _batch_for(batches, item, None, is_event=True).add(item)
        _log_refused(refused)
        return [batch for batch in batches.values() if batch.items]

    def _is_broker_error(self, exc: Exception) -> bool:
        """Whether the connection to a broker failed, or this process cannot use its broker at all.

        A task's own ``apply_async`` may use a connection. OSError, which transports list too, says nothing about one.
        """
        try:
            listed = self._app.connection_for_write().transport.connection_errors
        except Exception:  # noqa: BLE001  # a broker URL that cannot be used, a missing package
            return True
        lost = tuple(each for each in listed if not issubclass(OSError, each))
        return isinstance(exc, (OperationalError, ConnectionError, TimeoutError, *lost))

    def _record_timeout(self, job: Job) -> None:
        if not job.done.is_set():
            self._circuit_breakers.record_failure(None, f"TimeoutError: no answer within {MAX_WAIT_SECONDS:g} s")

    def _is_broker_down(self) -> bool:
        """Whether the broker is down; starts a probe in the background if one is due."""
        if self._circuit_breakers.should_probe():
            self._sender.submit(Job(request=self._probe))
        return self._circuit_breakers.is_open()

    def _probe(self, transport: Transport) -> None:
        transport.probe()
        self._circuit_breakers.record_probe_answer()

    def reset_in_child(self) -> None:
        self._circuit_breakers.reset_in_child()
        self._message_builder.templates.clear()


def _log_refused(refused: Sequence[tuple[object, Exception]]) -> None:
    """Log one line for a batch: if the application's own code fails, it usually fails for all messages."""
    if refused:
        what, exc = refused[0]
        name = (
            f"{what.name!r} ({what.id})"
            if isinstance(what, OutboxMessage)
            else what.ref
            if isinstance(what, DueRun)
            else ""
        )
        more = f", and {len(refused) - 1} more of the same batch," if len(refused) > 1 else ""
        logger.error("A message for %s%s cannot be sent; a dispatcher will retry: %r", name, more, exc)


def _item(
    message: RecordedMessage, states: list[SendState], index: int, errors: dict[int, Exception] | None = None
) -> BatchItem:
    return BatchItem(states, index, str(message.properties.get("correlation_id")), message, errors)


def _batch_for(
    batches: dict[tuple[str, str], DestinationBatch], item: BatchItem, queue: str | None, *, is_event: bool = False
) -> DestinationBatch:
    recorded = item.recorded
    key = recorded.exchange, recorded.routing_key
    if key not in batches:
        name = None if is_event else queue or _queue_name(recorded)
        batches[key] = DestinationBatch(*key, name)
    return batches[key]


def _queue_name(recorded: RecordedMessage) -> str:
    names = [entity.name for entity in recorded.declare if hasattr(entity, "routing_key")]
    return str(names[0] if names else recorded.routing_key or recorded.exchange)
