"""Telling workers what is due, and sending what steps left in the outbox: after the commit, at best effort.

A publish that fails delays an instance until the next sweep and fails nobody. A broker that is away
is left alone for a few seconds, so that callers do not each wait for it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from celery import Celery
from celery.app.routes import Router
from celery.exceptions import QueueNotFound, SoftTimeLimitExceeded
from kombu.exceptions import OperationalError

from celery_durable.model import Due, OutboxKind, Outgoing
from celery_durable.runtime import Runtime
from celery_durable.tasks.outbox import Unsent

T = TypeVar("T")

logger = logging.getLogger("celery_durable.tasks")

_REST_SECONDS = 2.0
_LONGEST_NAME = 240
_FAIL_FAST: dict[str, Any] = {"retry": True, "retry_policy": {"max_retries": 0}}
"""retry=False is not fail-fast: it may take seconds to connect."""


class Publisher:
    """Publishes messages for one app: `advance`, `deliver` for outbound events, and the tasks that steps send.

    ``answers``: the tasks that are called with the result and with the error of a task that a step waits for.
    """

    def __init__(
        self,
        app: Celery,
        task: str,
        runtime: Runtime,
        *,
        deliver: str,
        answers: tuple[str, str],
        queue: Callable[[], str],
    ) -> None:
        self._app, self._task, self._runtime = app, task, runtime
        self._deliver, self._answers, self._queue = deliver, answers, queue
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
            self.run_eagerly(dues)
            return []
        return [] if self._reaches_broker(dues, self._send_if_possible) else list(dues)

    def send(self, letters: Sequence[Outgoing]) -> Unsent:
        """Send what was in the outbox; answers with what did not leave."""
        if self._app.conf.task_always_eager:
            self.send_eagerly(letters)
            return Unsent()
        refused: dict[str, Outgoing] = {}  # over a new connection all are sent anew

        def send_one(letter: Outgoing, producer: Any) -> None:
            connection = producer.connection
            try:
                self._send_letter(letter, producer)
            except (OperationalError, SoftTimeLimitExceeded, *connection.connection_errors):
                raise
            except Exception as exc:  # noqa: BLE001  # no such queue, arguments that do not fit: it concerns this one
                refused[letter.id] = letter
                self.failures += 1
                logger.error("Task %r (%s) cannot be sent, and is tried again later: %r", letter.name, letter.id, exc)  # noqa: TRY400

        if self._reaches_broker(letters, send_one):
            return Unsent(refused=list(refused.values()))
        return Unsent(lost=letters)

    def _reaches_broker(self, items: Sequence[T], send_one: Callable[[T, Any], None]) -> bool:
        """Send all, or answer False; a broker that is away is left alone for a while."""
        if self._runtime.monotonic() < self._rest_until:
            self.failures += len(items)
            return False
        self._runtime.checkpoint("before-publish")
        try:
            self._send_all(items, send_one)
        except SoftTimeLimitExceeded:
            raise  # the caller's own task, which is out of time
        except Exception as exc:  # noqa: BLE001  # each transport has its own errors, and none may reach the caller
            self._rest_until = self._runtime.monotonic() + _REST_SECONDS
            self.failures += len(items)
            logger.warning("The broker did not take %s, the sweep tries again: %r", _messages(len(items)), exc)
            return False
        self._runtime.checkpoint("after-publish")
        return True

    def _send_all(self, items: Sequence[T], send_one: Callable[[T, Any], None]) -> None:
        """Send over a pooled connection; over a new one where that had died while it lay in the pool.

        Connections die there by a broker's restart, and by each fork: the child shuts down what it inherited.
        """
        while True:
            with self._app.producer_or_acquire() as producer:
                connection = producer.connection
                was_open = connection.connected
                try:
                    with _batch(producer, len(items)):
                        for item in items:
                            send_one(item, producer)
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
            shadow=f"durable:{ref.workflow}",
            argsrepr=repr((ref.workflow, ref.instance_id, ref.run_number)),
            kwargsrepr="{}",
            producer=producer,
            **self._ours(),
        )

    def _ours(self) -> dict[str, Any]:
        """Options of messages to our own tasks: the application's routes and default priority are for its own."""
        router = Router(queues=self._app.amqp.queues, app=self._app)
        return {"router": router, "priority": 0, "serializer": "json", "ignore_result": True, **_FAIL_FAST}

    def _send_letter(self, letter: Outgoing, producer: Any) -> None:
        if letter.kind is OutboxKind.EVENT:
            nonce = uuid.UUID(self._runtime.new_token()).hex[:8]
            self._app.send_task(
                self._deliver,
                args=(letter.id,),
                task_id=f"{letter.id}:{nonce}",
                queue=self._queue(),
                shadow=f"durable:{letter.name}"[:_LONGEST_NAME],
                producer=producer,
                **self._ours(),
            )
            return
        body = letter.content
        options = {**body["options"], **self._callbacks(body), "task_id": letter.id, "producer": producer, **_FAIL_FAST}
        task = self._app.tasks.get(letter.name)
        if task is None:  # of another application, or another module
            self._app.send_task(letter.name, args=body["args"], kwargs=body["kwargs"], **options)
        else:  # with the options of its definition
            task.apply_async(body["args"], body["kwargs"], **options)

    def _callbacks(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """What a worker, also of another application, calls when the task has ended, if anybody wants to know."""
        asked = body.get("answers")
        if asked is None:
            return {}
        queue = self._queue()
        options = {"queue": queue, "serializer": "json", "priority": 0, "ignore_result": True}
        args = (*asked, queue)  # a worker with workflows of its own has another queue of its own
        done, failed = (self._app.signature(name, args=args, options=options) for name in self._answers)
        return {"link": done, "link_error": failed}

    def run_eagerly(self, dues: Sequence[Due]) -> None:
        """As `publish`, without broker and worker: what is due runs here."""
        self._do_in_turn([functools.partial(self._advance_now, due) for due in dues])

    def send_eagerly(self, letters: Sequence[Outgoing]) -> None:
        """As `send`, without broker and worker: the tasks run here."""
        self._do_in_turn([functools.partial(self._send_now, letter) for letter in letters])

    def _do_in_turn(self, jobs: Sequence[Callable[[], object]]) -> None:
        """One after the other; what a run wakes comes after it, not inside it."""
        waiting: deque[Callable[[], object]] | None = getattr(self._eager, "queue", None)
        if waiting is not None:
            waiting.extend(jobs)
            return
        waiting = self._eager.queue = deque(jobs)
        try:
            while waiting:
                waiting.popleft()()
        finally:
            del self._eager.queue

    def _advance_now(self, due: Due) -> None:
        ref = due.ref
        self._app.tasks[self._task].apply(args=(ref.workflow, ref.instance_id, ref.run_number))

    def _send_now(self, letter: Outgoing) -> None:
        if letter.kind is OutboxKind.EVENT:
            self._app.tasks[self._deliver].apply(args=(letter.id,))
            return
        body = letter.content
        callbacks = self._callbacks(body)
        if letter.name not in self._app.tasks:
            text = f"Task {letter.name!r} is not known to this process, which runs its tasks itself"
            logger.error(text)
            if callbacks:
                self._app.tasks[self._answers[1]].apply(({"name": "NotRegistered", "message": text}, *body["answers"]))
            return
        # Its failure is its own: the step that sent it is recorded.
        self._app.tasks[letter.name].apply(body["args"], body["kwargs"], task_id=letter.id, throw=False, **callbacks)


def _messages(count: int) -> str:
    return "1 message" if count == 1 else f"{count} messages"


def _batch(producer: Any, size: int) -> contextlib.AbstractContextManager[Any]:
    """Many messages in one round trip, where kombu (from 5.7) and the transport can."""
    if size > 1 and hasattr(producer, "batch"):
        batch: contextlib.AbstractContextManager[Any] = producer.batch(size)
        return batch
    return contextlib.nullcontext()
