"""Eager tasks: with `task_always_eager` the tasks run in this process, one after another, instead of being sent."""

from __future__ import annotations

import functools
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence

from celery import Celery

from celery_durable.model import DueRun, OutboxKind, OutboxMessage
from celery_durable.store.engine.time_limits import restore_own_timeouts
from celery_durable.tasks.publishing.message_builder import MessageBuilder

logger = logging.getLogger("celery_durable.tasks")


class EagerTasks:
    def __init__(
        self, app: Celery, message_builder: MessageBuilder, *, advance: str, deliver: str, on_error: str
    ) -> None:
        self._app, self._message_builder = app, message_builder
        self._advance, self._deliver, self._on_error = advance, deliver, on_error
        self._local = threading.local()

    def run(self, due_runs: Sequence[DueRun]) -> None:
        self._run_in_order([functools.partial(self._run_due, due) for due in due_runs])

    def send(self, messages: Sequence[OutboxMessage]) -> None:
        self._run_in_order([functools.partial(self._run_outbox_message, message) for message in messages])

    def _run_in_order(self, jobs: Sequence[Callable[[], object]]) -> None:
        """Run jobs one after another; jobs that a job adds run after it, not inside it."""
        waiting: deque[Callable[[], object]] | None = getattr(self._local, "waiting", None)
        if waiting is not None:
            waiting.extend(jobs)
            return
        waiting = self._local.waiting = deque(jobs)
        try:
            with restore_own_timeouts():  # an HTTP request limits only its own operations, not the tasks that it starts
                while waiting:
                    waiting.popleft()()
        finally:
            del self._local.waiting

    def _run_due(self, due: DueRun) -> None:
        ref = due.ref
        self._app.tasks[self._advance].apply(args=(ref.workflow, ref.instance_id, ref.run_number))

    def _run_outbox_message(self, message: OutboxMessage) -> None:
        if message.kind is OutboxKind.EVENT:
            self._app.tasks[self._deliver].apply(args=(message.id,))
            return
        body = message.content
        callbacks = self._message_builder.build_answer_options(body)
        if message.name not in self._app.tasks:
            text = f"Task {message.name!r} is not known to this process, which runs its tasks itself"
            logger.error(text)
            if callbacks:
                self._app.tasks[self._on_error].apply(({"name": "NotRegistered", "message": text}, body["reference"]))
            return
        # A failure of the task must not reach the caller: the step that sent the task is committed.
        self._app.tasks[message.name].apply(body["args"], body["kwargs"], task_id=message.id, throw=False, **callbacks)
