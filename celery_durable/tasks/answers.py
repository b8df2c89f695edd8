"""Answers: the results and errors of Celery tasks, delivered to the steps that sent the tasks.

A message that cannot be committed goes back to the broker: it is in no database yet.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

from celery.exceptions import Ignore, Reject
from celery.utils.serialization import UnpickleableExceptionWrapper

from celery_durable import values
from celery_durable.config import Settings
from celery_durable.errors import NonRetryableError, ValueRefused
from celery_durable.model import AnswerResult, TaskReference
from celery_durable.operations.answers import AnswerOperations, TaskException
from celery_durable.runtime import Runtime
from celery_durable.tasks.pools import get_node_name

logger = logging.getLogger("celery_durable.tasks")

_RESEND_PAUSE_SECONDS = 1.0
_DIRECT_COMMIT_PAUSE_SECONDS = 5.0
MALFORMED = "noop: malformed message"
_RESULTS = {
    AnswerResult.TAKEN: "taken",
    AnswerResult.NOT_AWAITED: "noop: no step waits for it any more",
    AnswerResult.FORGED: "refused: it does not have the task's token",
}


class AnswerCommitter:
    """Commits answers. ``reference``: a `TaskReference` in its JSON form; a forged message may hold any other value."""

    def __init__(self, operations: Callable[[], AnswerOperations], settings: Settings, runtime: Runtime) -> None:
        self.operations, self._settings, self._runtime = operations, settings, runtime
        self._direct_commits_paused_until = 0.0

    def find_queue(self, reference: Any) -> str:
        """The workflow queue of the application that waits for the answer; it may be another application."""
        found = TaskReference.read(reference)
        return self._settings.queue if found is None or found.queue is None else found.queue

    def pause_before_resend(self) -> None:
        """Sleep before an answer is sent again, so that its message circulates slowly while the database is down."""
        self._runtime.sleep(_RESEND_PAUSE_SECONDS)

    def can_commit_directly(self, reference: TaskReference) -> bool:
        """Whether this process's database waits for this answer and has not just failed to take one."""
        return self._runtime.monotonic() >= self._direct_commits_paused_until and self.is_awaited_here(reference)

    def is_awaited_here(self, reference: TaskReference) -> bool:
        return self.operations().find_database_id() == reference.database_id

    def pause_direct_commits(self) -> None:
        """After a database error: for five seconds, send answers as messages without trying the database."""
        self._direct_commits_paused_until = self._runtime.monotonic() + _DIRECT_COMMIT_PAUSE_SECONDS

    def commit_result(self, result: Any, reference: Any, *, is_direct: bool = False) -> str:
        """Record that a task has returned; returns a short text for the log, and raises the database's error.

        A result that is not JSON or is too large becomes the step's error. ``is_direct``: the caller must not wait
        long.
        """
        try:
            payload = values.encode_answer(
                values.encode(result, what="Result of the task", limits=self._settings.limits)
            )
        except ValueRefused as exc:
            payload = values.encode_error_answer(type(exc).__name__, str(exc), is_non_retryable=True)
        return self._commit(payload, reference, is_direct=is_direct)

    def commit_error(
        self,
        error: Mapping[str, Any],
        reference: Any,
        *,
        is_direct: bool = False,
        exception: TaskException | None = None,
    ) -> str:
        """Record that a task has failed, as `commit_result`; a ``final`` error is not retried."""
        name, message, is_non_retryable = error.get("name"), error.get("message"), error.get("final") is True
        payload = values.encode_error_answer(str(name), str(message), is_non_retryable=is_non_retryable)
        return self._commit(payload, reference, is_direct=is_direct, exception=exception)

    def commit_refusal(self, reference: TaskReference, refusal: Exception) -> str:
        """Record that the application's own code refused to send a task, so that its step fails without a retry."""
        exception = TaskException(refusal, get_node_name(None), os.getpid())
        return self.commit_error(encode_exception(refusal) | {"final": True}, reference.to_json(), exception=exception)

    def _commit(self, payload: str, reference: Any, *, is_direct: bool, exception: TaskException | None = None) -> str:
        found = TaskReference.read(reference)
        if found is None:
            return MALFORMED
        result = self.operations().accept(found, payload, is_direct=is_direct, exception=exception)
        if result is AnswerResult.FORGED:
            logger.warning(
                "An answer to %s (%s) is refused: it does not have the task's token", found.ref, found.event_type
            )
        return _RESULTS[result]


def parse_errback_arguments(source: Any, rest: tuple[Any, ...]) -> tuple[dict[str, Any], Any]:
    """The error and the reference of the waiting step, from the arguments of an errback.

    They are the task's request, its exception and traceback; or the task's id, if its process lacks the internal tasks.
    """
    if isinstance(source, str):
        text = f"Celery task {source} failed; its worker, which does not import celery_durable, has logged why"
        return {"name": "TaskFailed", "message": text}, _single_or_none(rest)
    return encode_exception(rest[0] if rest else None), _single_or_none(rest[2:])


def encode_exception(exception: object) -> dict[str, Any]:
    """The form in which an answer carries this error: a dict with ``name``, ``message`` and perhaps ``final``."""
    match exception:
        case NonRetryableError():
            return {"name": exception.name, "message": str(exception), "final": True}
        case UnpickleableExceptionWrapper():
            return {"name": exception.exc_cls_name, "message": str(exception)}
        case Ignore():
            return {"name": "TaskIgnored", "message": "The Celery task raised Ignore, so it has no result"}
        case Reject():
            return {
                "name": "TaskRejected",
                "message": f"The Celery task raised Reject: {getattr(exception, 'reason', None)}",
            }
    return {"name": type(exception).__name__, "message": str(exception)}


def _single_or_none(rest: tuple[Any, ...]) -> Any:
    return rest[0] if len(rest) == 1 else None
