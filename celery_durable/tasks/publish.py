"""Telling workers what is due: one small message each, after the commit, at best effort.

A publish that fails delays an instance until the next sweep and fails nobody. A broker that is away
is left alone for a few seconds, so that callers do not each wait for it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import uuid
from collections import deque
from collections.abc import Sequence
from typing import Any

from celery import Celery
from celery.app.routes import Router
from celery.exceptions import QueueNotFound, SoftTimeLimitExceeded
from kombu.exceptions import OperationalError

from celery_durable.model import Due
from celery_durable.runtime import Runtime

logger = logging.getLogger("celery_durable.tasks")

_REST_SECONDS = 2.0
_LONGEST_NAME = 240


class Publisher:
    """Publishes `advance` messages for one app."""

    def __init__(self, app: Celery, task: str, runtime: Runtime) -> None:
        self._app, self._task, self._runtime = app, task, runtime
        self._rest_until = 0.0
        self._eager = threading.local()
        self.failures = 0

    def wake(self, dues: Sequence[Due]) -> None:
        """Publish; what fails is left to the sweep."""
        if dues:
            self.publish(dues)

    def publish(self, dues: Sequence[Due]) -> list[Due]:
        """Publish; answers with those that the broker did not take."""
        if self._app.conf.task_always_eager:
            self._run_eagerly(dues)
            return []
        if self._runtime.monotonic() < self._rest_until:
            self.failures += len(dues)
            return list(dues)
        self._runtime.checkpoint("before-publish")
        try:
            self._send_all(dues)
        except SoftTimeLimitExceeded:
            raise  # the caller's own task, which is out of time
        except Exception as exc:  # noqa: BLE001  # each transport has its own errors, and none may reach the caller
            self._rest_until = self._runtime.monotonic() + _REST_SECONDS
            self.failures += len(dues)
            logger.warning("The broker did not take %s, the sweep tries again: %r", _messages(len(dues)), exc)
            return list(dues)
        self._runtime.checkpoint("after-publish")
        return []

    def _send_all(self, dues: Sequence[Due]) -> None:
        """Send over a pooled connection; over a new one where that had died while it lay in the pool.

        Connections die there by a broker's restart, and by each fork: the child shuts down what it inherited.
        """
        while True:
            with self._app.producer_or_acquire() as producer:
                connection = producer.connection
                was_open = connection.connected
                try:
                    with _batch(producer, len(dues)):
                        for due in dues:
                            self._send_if_possible(due, producer)
                except (OperationalError, *connection.connection_errors):
                    if not was_open:
                        raise
                    connection.collect()
                else:
                    return

    def _send_if_possible(self, due: Due, producer: Any) -> None:
        """Send; a queue that the app does not have concerns its own instances, and must not hold up the others."""
        try:
            self._send(due, producer)
        except QueueNotFound as exc:
            self.failures += 1
            logger.error("%s cannot be published, and is tried again later: %s", due.ref, exc)  # noqa: TRY400

    def _send(self, due: Due, producer: Any) -> None:
        ref = due.ref
        # Flower and logs show these; the nonce keeps a revoke of one message from blocking the next.
        nonce = uuid.UUID(self._runtime.new_token()).hex[:8]
        self._app.send_task(
            self._task,
            args=(ref.workflow, ref.instance_id, ref.run_number),
            # Travels as a short string of AMQP, 255 bytes.
            task_id=f"{f'{ref.workflow}:{ref.instance_id}:{ref.run_number}'[:_LONGEST_NAME]}:{nonce}",
            queue=due.queue,
            # The application's routes and default priority are for its own tasks.
            router=Router(queues=self._app.amqp.queues, app=self._app),
            priority=0,
            producer=producer,
            serializer="json",
            ignore_result=True,
            shadow=f"durable:{ref.workflow}",
            argsrepr=repr((ref.workflow, ref.instance_id, ref.run_number)),
            kwargsrepr="{}",
            # retry=False is not fail-fast: it may take seconds to connect.
            retry=True,
            retry_policy={"max_retries": 0},
        )

    def _run_eagerly(self, dues: Sequence[Due]) -> None:
        """Under task_always_eager: run here, one after the other; what a run wakes comes after it, not inside it."""
        waiting: deque[Due] | None = getattr(self._eager, "queue", None)
        if waiting is not None:
            waiting.extend(dues)
            return
        waiting = self._eager.queue = deque(dues)
        try:
            while waiting:
                ref = waiting.popleft().ref
                self._app.tasks[self._task].apply(args=(ref.workflow, ref.instance_id, ref.run_number))
        finally:
            del self._eager.queue


def _messages(count: int) -> str:
    return "1 message" if count == 1 else f"{count} messages"


def _batch(producer: Any, size: int) -> contextlib.AbstractContextManager[Any]:
    """Many messages in one round trip, where kombu (from 5.7) and the transport can."""
    if size > 1 and hasattr(producer, "batch"):
        batch: contextlib.AbstractContextManager[Any] = producer.batch(size)
        return batch
    return contextlib.nullcontext()
