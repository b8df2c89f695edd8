"""The outbox: sends the messages that transactions wrote, and delivers outbound events to their handlers.

Messages are sent at least once, under the same id, so consumers can recognize a copy.
"""

from __future__ import annotations

import functools
import json
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from celery_durable import values
from celery_durable.config import Settings
from celery_durable.errors.base import name_error
from celery_durable.event_loop import event_loop
from celery_durable.model import OutboundEvent, OutboxKind, OutboxMessage, TaskReference
from celery_durable.redispatch import Redispatch
from celery_durable.runtime import Runtime, is_ctrl_c
from celery_durable.store.engine import Store
from celery_durable.store.engine.faults import describe_fault
from celery_durable.store.runs import outbox
from celery_durable.store.runs.outbox import Delivery
from celery_durable.tasks.publishing import PublishReport, SendState
from celery_durable.values import Retries, StepConfig, StepPolicy

logger = logging.getLogger("celery_durable.outbox")


Send = Callable[[Sequence[OutboxMessage]], PublishReport]
FailTask = Callable[[TaskReference, Exception], object]

_RETRY_DELAY = timedelta(seconds=1)
_LEASE = timedelta(minutes=5)
_RETRIES = Retries(limit=10, delay=timedelta(seconds=10), backoff="exponential", max_delay=timedelta(minutes=10))


@dataclass(frozen=True, slots=True)
class BatchResult:
    """The result of one batch. ``is_broker_down``: messages were not sent, because the broker is down."""

    sent: int
    has_more: bool
    is_broker_down: bool


class Outbox:
    """Sends the messages in the outbox. ``fail_task`` answers the step of a task whose message could not be made."""

    def __init__(
        self,
        store: Store,
        settings: Settings,
        send: Send,
        stops_process: Callable[[BaseException], bool] = is_ctrl_c,
        fail_task: FailTask | None = None,
    ) -> None:
        self._store, self._settings, self._send, self._stops_process = store, settings, send, stops_process
        self._fail_task, self._local = fail_task, threading.local()
        self._redispatch = Redispatch(
            timedelta(seconds=settings.redispatch_seconds), timedelta(seconds=settings.redispatch_max_seconds)
        )

    def send_committed(self, messages: Sequence[OutboxMessage]) -> None:
        """Send messages of a committed transaction; the sweep sends those that fail. Raises only a process stop."""
        # An item of a map that fails here sends the next one. A loop instead of a recursion: all items may fail.
        waiting: deque[Sequence[OutboxMessage]] | None = getattr(self._local, "waiting", None)
        if waiting is not None:
            waiting.append(messages)
            return
        waiting = self._local.waiting = deque([messages])
        try:
            while waiting:
                self._send_in_parts(self._divide_and_keep(waiting.popleft()))
        except Exception as exc:
            if self._stops_process(exc):
                raise
            # The step is committed, and the rows are still in the outbox.
            logger.warning("Messages of the outbox were not sent; the sweep will retry: %s", describe_fault(exc))
        finally:
            del self._local.waiting

    def sweep(self) -> int:
        """Send all due messages in batches; returns the number of sent messages."""
        sent, has_more = 0, True
        while has_more:
            batch = self.send_batch(self._settings.sweep_batch)
            sent, has_more = sent + batch.sent, batch.has_more
        return sent

    def send_batch(self, limit: int) -> BatchResult:
        take = functools.partial(outbox.lock_due, limit=limit, redispatch=self._redispatch)
        messages = self._store.transact(take)
        self._local.waiting = (
            deque()
        )  # what `_refuse` causes to be sent is left to later batches: other work is due too
        try:
            states = self._send_in_parts(_divide(messages))
        finally:
            del self._local.waiting
        report = PublishReport(states + [SendState.UNSENT] * (len(messages) - len(states)))
        unsent = report.with_state(messages, SendState.UNSENT)
        # `lock_due` has postponed all rows: a message that was refused or is in doubt is sent again after that delay.
        sent = len(report.with_state(messages, SendState.SENT, SendState.UNKNOWN))
        if unsent:
            self._store.transact(functools.partial(outbox.postpone, messages=unsent, delay=_RETRY_DELAY))
        return BatchResult(sent, has_more=len(messages) >= limit and not unsent, is_broker_down=bool(unsent))

    def _divide_and_keep(self, messages: Sequence[OutboxMessage]) -> Iterator[Sequence[OutboxMessage]]:
        """Divide messages into parts. A part that a sweep would send soon is kept first, or left to that sweep."""
        monotonic, grace = self._store.runtime.monotonic, self._settings.grace
        began = monotonic()
        for number, part in enumerate(_divide(messages)):
            left = grace + number * outbox.PART_GRACE - timedelta(seconds=monotonic() - began)
            is_late = number > 0 and left < grace / 2
            yield self._keep(part) if is_late else part

    def _keep(self, part: Sequence[OutboxMessage]) -> Sequence[OutboxMessage]:
        return self._store.transact(functools.partial(outbox.keep, messages=part, grace=self._settings.grace))

    def _send_in_parts(self, parts: Iterable[Sequence[OutboxMessage]]) -> list[SendState]:
        """Send messages a part at a time, until one is unsent. So a crash repeats only one part."""
        states: list[SendState] = []
        for part in parts:
            states += self._send_part(part).states if part else []
            if SendState.UNSENT in states:
                break
        return states

    def _send_part(self, messages: Sequence[OutboxMessage]) -> PublishReport:
        report = self._send(messages)
        sent = report.with_state(messages, SendState.SENT)
        done = [each.id for each in sent if each.kind is OutboxKind.TASK]
        if done:
            self._store.transact(lambda tx: outbox.delete(tx, done))
        for index, error in report.errors.items():
            self._refuse(messages[index], error)
        return report

    def _refuse(self, message: OutboxMessage, error: Exception) -> None:
        """End a task that can never be sent. Its step or item fails; without one, the row is kept for an operator."""
        reference = TaskReference.read(message.content.get("reference"))
        if reference is not None and self._fail_task is not None:
            self._fail_task(reference, error)  # before the row is deleted: a sweep repeats both
            self._store.transact(lambda tx: outbox.delete(tx, [message.id]))
            return
        name, text = values.sanitize_error(*values.describe_error(error))
        self._store.transact(lambda tx: outbox.give_up(tx, message.id, error=name_error(name, text)))
        logger.error(
            "Task %r (%s) cannot be sent; its row stays in workflow_outbox: %s",
            message.name, message.id, name_error(name, text), exc_info=error,
        )  # fmt: skip


def _divide(messages: Sequence[OutboxMessage]) -> Iterator[Sequence[OutboxMessage]]:
    for start in range(0, len(messages), outbox.PART_SIZE):
        yield messages[start : start + outbox.PART_SIZE]


@dataclass(frozen=True, slots=True)
class Handler:
    """The function for outbound events of one name, with its retry policy."""

    fn: Callable[[OutboundEvent], Any]
    policy: StepPolicy

    @property
    def qualified_name(self) -> str:
        return f"{self.fn.__module__}.{self.fn.__qualname__}"

    def call(self, event: OutboundEvent) -> None:
        if values.is_async_function(self.fn):
            event_loop.run(lambda: self.fn(event), name=f"The handler of outbound event {event.name!r}")
        else:
            self.fn(event)

    def exceeds_max_attempts(self, attempt: int) -> bool:
        max_attempts = self.policy.max_attempts
        return max_attempts is not None and attempt > max_attempts

    @classmethod
    def of(cls, fn: Callable[[OutboundEvent], object], retries: Retries | int | None) -> Handler:
        policy = StepPolicy().override_with(StepConfig(retries=_RETRIES))
        return cls(fn, policy if retries is None else policy.override_with(StepConfig(retries=retries)))


class OutboundDeliverer:
    """Delivers outbound events to their handlers; the database's clock decides when an attempt is due."""

    def __init__(
        self,
        store: Store,
        settings: Settings,
        runtime: Runtime,
        handlers: Mapping[str, Handler],
        stops_process: Callable[[BaseException], bool] = is_ctrl_c,
    ) -> None:
        self._store, self._settings, self._runtime, self._handlers = store, settings, runtime, handlers
        self._stops_process = stops_process

    def deliver(self, id_: str) -> str:
        """Deliver one event if it is due, and return a short text for the log; a superfluous call changes nothing."""
        # Two workers race for an event: one UPDATE under the row's lock gives it to the first. `finish_delivery` and
        # `release_delivery` have the token in their WHERE clauses (the fence). So a worker that lost the event to
        # another one changes nothing.
        token = self._runtime.new_token()
        delivery = self._store.transact(
            lambda tx: outbox.begin_delivery(tx, id_, token=token, lease=_LEASE),
            find_committed=lambda tx: outbox.find_delivery(tx, id_, token=token),
        )
        if delivery is None:
            return "noop: delivered, not due, or claimed by another worker"
        handler = self._handlers.get(delivery.name)
        if handler is None:
            return self._postpone_unhandled(delivery)
        if handler.exceeds_max_attempts(delivery.attempt):  # the worker of the last allowed attempt died
            return self._give_up(
                delivery, "WorkerCrashLoop: the worker process died during the last call of the handler"
            )
        try:
            handler.call(_event(delivery))
        except BaseException as exc:
            if self._stops_process(exc):
                self._release(delivery, retry_in=timedelta(0), counts_as_attempt=False)
                raise
            return self._record_failure(delivery, handler, exc)
        self._store.transact(lambda tx: outbox.finish_delivery(tx, delivery))
        return "delivered"

    def _record_failure(self, delivery: Delivery, handler: Handler, exc: BaseException) -> str:
        name, message = values.sanitize_error(*values.describe_error(exc))
        error = name_error(name, message)
        if values.forbids_retry(exc) or handler.exceeds_max_attempts(delivery.attempt + 1):
            return self._give_up(delivery, error)
        try:
            delay = handler.policy.delay_after(delivery.attempt, exc, draw=self._store.runtime.random_fraction)
        except Exception as delay_error:  # noqa: BLE001  # from the author's function
            return self._give_up(delivery, f"{error} (its delay function failed: {delay_error!r})")
        self._release(delivery, retry_in=delay, error=error)
        logger.warning(
            "The handler of outbound event %r (%s) failed and will be called again: %s",
            delivery.name,
            delivery.id,
            error,
        )
        return f"tried again: {name}"

    def _give_up(self, delivery: Delivery, error: str) -> str:
        self._release(delivery, retry_in=None, error=error)
        logger.error(
            "Outbound event %r (%s) failed for good at attempt %d; its row stays in workflow_outbox: %s",
            delivery.name, delivery.id, delivery.attempt, error,
        )  # fmt: skip
        return f"given up: {error.partition(':')[0]}"

    def _postpone_unhandled(self, delivery: Delivery) -> str:
        logger.warning(
            "This worker has no handler for outbound event %r and leaves it to other workers. Import the module with "
            "@durable.outbound(%r), or wait for the deploy to end.",
            delivery.name,
            delivery.name,
        )
        delay = timedelta(seconds=self._settings.unknown_workflow_seconds)
        is_first = delivery.attempt == 1  # else the error of the last attempt says more
        error = f"No handler: the last worker has no @durable.outbound({delivery.name!r})" if is_first else None
        self._release(delivery, retry_in=delay, error=error, counts_as_attempt=False)
        return f"noop: outbound event {delivery.name!r} has no handler in this worker"

    def _release(
        self,
        delivery: Delivery,
        *,
        retry_in: timedelta | None,
        error: str | None = None,
        counts_as_attempt: bool = True,
    ) -> None:
        self._store.transact(
            lambda tx: outbox.release_delivery(
                tx, delivery, retry_in=retry_in, error=error, counts_as_attempt=counts_as_attempt
            )
        )


def _event(delivery: Delivery) -> OutboundEvent:
    return OutboundEvent(
        name=delivery.name,
        payload=json.loads(delivery.payload),
        id=delivery.id,
        workflow=delivery.workflow,
        instance_id=delivery.instance_id,
        run_number=delivery.run_number,
        attempt=delivery.attempt,
    )
