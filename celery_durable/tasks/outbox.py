"""The outbox at work: send what a transaction left in it, deliver outbound events to their handlers.

At least once: a process that dies between sending and forgetting has the sweep send again, under the same id, by
which consumers tell it is the same.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from celery_durable import values
from celery_durable.config import Settings
from celery_durable.errors import NonRetryableError
from celery_durable.model import OutboundEvent, OutboxKind, Outgoing
from celery_durable.runtime import Runtime
from celery_durable.store import outbox
from celery_durable.store.engine import Store
from celery_durable.store.outbox import Delivery
from celery_durable.store.sweeps import Redispatch
from celery_durable.values import Retries, StepConfig, StepPolicy

logger = logging.getLogger("celery_durable.outbox")


@dataclass(frozen=True, slots=True)
class Unsent:
    """What did not leave: ``lost`` with a broker that was away, ``refused`` each for a reason of its own."""

    lost: Sequence[Outgoing] = ()
    refused: Sequence[Outgoing] = ()


Send = Callable[[Sequence[Outgoing]], Unsent]
"""Sends, and answers with what did not leave."""

_REST = timedelta(seconds=1)
_PART = 200
_LEASE = timedelta(minutes=5)
_RETRIES = Retries(limit=10, delay=timedelta(seconds=10), backoff="exponential", max_delay=timedelta(minutes=10))


class Outbox:
    """Sends what is in the outbox. ``interruptions``: exceptions that stop the caller, whatever he does."""

    def __init__(
        self, store: Store, settings: Settings, send: Send, interruptions: tuple[type[BaseException], ...] = ()
    ) -> None:
        self._store, self._settings, self._send, self._interruptions = store, settings, send, interruptions
        self._redispatch = Redispatch(
            timedelta(seconds=settings.redispatch_seconds), timedelta(seconds=settings.redispatch_max_seconds)
        )

    def post(self, letters: Sequence[Outgoing]) -> None:
        """Send what a transaction wrote that has committed; what fails is left to the sweep, and nothing is raised."""
        try:
            self._post(letters)
        except Exception as exc:
            if isinstance(exc, self._interruptions):
                raise
            # The step is recorded, and the rows are there.
            logger.warning("The outbox could not be emptied, the sweep tries again: %s", exc)

    def sweep(self) -> int:
        """Send what is due, in batches; answers with how much was sent."""
        sent = 0
        while True:
            take = functools.partial(outbox.take_due, limit=self._settings.sweep_batch, redispatch=self._redispatch)
            letters = self._store.transact(take)
            unsent = self._post(letters) if letters else Unsent()
            sent += len(letters) - len(unsent.lost) - len(unsent.refused)
            if unsent.lost:
                self._store.transact(functools.partial(outbox.put_off, letters=unsent.lost, delay=_REST))
            if unsent.lost or len(letters) < self._settings.sweep_batch:
                return sent

    def _post(self, letters: Sequence[Outgoing]) -> Unsent:
        """Send, and forget what was sent, a part at a time: of many letters a crash repeats only some."""
        lost: list[Outgoing] = []
        refused: list[Outgoing] = []
        for start in range(0, len(letters), _PART):
            unsent = self._post_part(letters[start : start + _PART])
            refused += unsent.refused
            if unsent.lost:
                lost += [*unsent.lost, *letters[start + _PART :]]
                break
        return Unsent(lost, refused)

    def _post_part(self, letters: Sequence[Outgoing]) -> Unsent:
        unsent = self._send(letters)
        kept = {each.id for each in (*unsent.lost, *unsent.refused)}
        done = [each.id for each in letters if each.kind is OutboxKind.TASK and each.id not in kept]
        if done:
            self._store.transact(lambda tx: outbox.remove(tx, done))
        return unsent


@dataclass(frozen=True, slots=True)
class Handler:
    """What is called for outbound events of one name, and how often at most."""

    fn: Callable[[OutboundEvent], object]
    policy: StepPolicy

    @property
    def where(self) -> str:
        """The code's place, for people."""
        return f"{self.fn.__module__}.{self.fn.__qualname__}"

    def is_beyond(self, attempt: int) -> bool:
        """Whether there is no such attempt any more."""
        most = self.policy.max_attempts
        return most is not None and attempt > most

    @classmethod
    def of(cls, fn: Callable[[OutboundEvent], object], retries: Retries | int | None) -> Handler:
        policy = StepPolicy().over(StepConfig(retries=_RETRIES))
        return cls(fn, policy if retries is None else policy.over(StepConfig(retries=retries)))


class Deliveries:
    """Hands outbound events to their handlers; the time between attempts is the database's."""

    def __init__(
        self,
        store: Store,
        settings: Settings,
        runtime: Runtime,
        handlers: Mapping[str, Handler],
        interruptions: tuple[type[BaseException], ...] = (),
    ) -> None:
        self._store, self._settings, self._runtime, self._handlers = store, settings, runtime, handlers
        self._interruptions = interruptions

    def deliver(self, id_: str) -> str:
        """Deliver one event if it is due; superfluous calls change nothing. Answers with a short sentence."""
        token = self._runtime.new_token()
        delivery = self._store.transact(
            lambda tx: outbox.begin(tx, id_, token=token, lease=_LEASE),
            resolve=lambda tx: outbox.find(tx, id_, token=token),
        )
        if delivery is None:
            return "noop: delivered, not due, or another worker is at it"
        handler = self._handlers.get(delivery.name)
        if handler is None:
            return self._leave(delivery)
        if handler.is_beyond(delivery.attempt):  # the workers that had it died with it
            return self._give_up(delivery, "WorkerCrashLoop: the worker that called its handler last ended with it")
        try:
            handler.fn(_event(delivery))
        except Exception as exc:
            if isinstance(exc, self._interruptions):
                self._give_back(delivery, retry_in=timedelta(0), counts=False)
                raise
            return self._failed(delivery, handler, exc)
        except BaseException:
            self._give_back(delivery, retry_in=timedelta(0), counts=False)
            raise
        self._store.transact(lambda tx: outbox.finish(tx, delivery))
        return "delivered"

    def _failed(self, delivery: Delivery, handler: Handler, exc: Exception) -> str:
        name, message = values.storable_error(type(exc).__name__, str(exc))
        error = f"{name}: {message}"
        if isinstance(exc, NonRetryableError) or handler.is_beyond(delivery.attempt + 1):
            return self._give_up(delivery, error)
        self._give_back(delivery, retry_in=handler.policy.delay_after(delivery.attempt), error=error)
        logger.warning("Outbound event %r (%s) is tried again: %s", delivery.name, delivery.id, error)
        return f"tried again: {name}"

    def _give_up(self, delivery: Delivery, error: str) -> str:
        self._give_back(delivery, retry_in=None, error=error)
        logger.error(
            "Outbound event %r (%s) is given up at attempt %d; its row stays in workflow_outbox: %s",
            delivery.name, delivery.id, delivery.attempt, error,
        )  # fmt: skip
        return f"given up: {error.partition(':')[0]}"

    def _leave(self, delivery: Delivery) -> str:
        logger.warning(
            "This worker has no handler for outbound event %r; it is left for one that does. Import the module with "
            "@durable.outbound(%r), or wait for the deploy to end.",
            delivery.name,
            delivery.name,
        )
        delay = timedelta(seconds=self._settings.unknown_workflow_seconds)
        self._give_back(delivery, retry_in=delay, counts=False)
        return f"noop: outbound event {delivery.name!r} has no handler in this worker"

    def _give_back(self, delivery: Delivery, **how: Any) -> None:
        error = how.pop("error", None)
        self._store.transact(lambda tx: outbox.give_back(tx, delivery, error=error, **how))


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
