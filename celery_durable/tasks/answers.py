"""What Celery tasks answer to the steps that have them do their work: taken where they end, or from messages.

An answer in a message is in no database yet, so a message that could not be taken goes back to the broker.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from celery.exceptions import Ignore, Reject
from celery.utils.serialization import UnpickleableExceptionWrapper

from celery_durable import values
from celery_durable.config import Settings
from celery_durable.errors import NonRetryableError, ValueRefused
from celery_durable.model import AnswerResult, TaskReference
from celery_durable.operations import Operations
from celery_durable.runtime import Runtime

logger = logging.getLogger("celery_durable.tasks")

_REST_SECONDS = 1.0
_DATABASE_REST_SECONDS = 5.0
MALFORMED = "noop: malformed message"
_RESULTS = {
    AnswerResult.TAKEN: "taken",
    AnswerResult.NOT_AWAITED: "noop: nothing waits for it any more, or has it already",
    AnswerResult.FORGED: "refused: its token is not that of the task",
}


class Answers:
    """Takes them. ``reference``: a `TaskReference` as it travels, or whatever else a message holds."""

    def __init__(self, operations: Callable[[], Operations], settings: Settings, runtime: Runtime) -> None:
        self._operations, self._settings, self._runtime = operations, settings, runtime
        self._rest_until = 0.0

    def queue(self, reference: Any) -> str:
        """Where an answer is taken: where its step is, which may be another application's."""
        found = TaskReference.read(reference)
        return self._settings.queue if found is None or found.queue is None else found.queue

    def rest(self) -> None:
        """Pause before an answer is sent back, so that its message does not circle while the database is away."""
        self._runtime.sleep(_REST_SECONDS)

    def takes_directly(self, reference: TaskReference) -> bool:
        """Whether this process's database waits for this answer, and did not fail a moment ago."""
        return self._runtime.monotonic() >= self._rest_until and self.is_ours(reference)

    def is_ours(self, reference: TaskReference) -> bool:
        """Whether this process's database waits for this answer."""
        return self._operations().store_id() == reference.store_id

    def rest_from_database(self) -> None:
        """It has not answered: let the next answers go as messages at once, for a while."""
        self._rest_until = self._runtime.monotonic() + _DATABASE_REST_SECONDS

    def done(self, result: Any, reference: Any, *, is_direct: bool = False) -> str:
        """A task has returned; what is no JSON, or too large, is the step's error.

        ``is_direct``: in the process of the task, which is not to wait for long. Raises where it cannot be committed.
        """
        try:
            payload = values.answer_of(values.encode(result, what="Result of the task", limits=self._settings.limits))
        except ValueRefused as exc:
            payload = values.answer_of_error(type(exc).__name__, str(exc), is_non_retryable=True)
        return self._take(payload, reference, is_direct=is_direct)

    def failed(self, error: Mapping[str, Any], reference: Any, *, is_direct: bool = False) -> str:
        """A task has failed, with this error's ``name`` and ``message``; ``final``: it need not be tried again."""
        name, message, is_non_retryable = error.get("name"), error.get("message"), error.get("final") is True
        payload = values.answer_of_error(str(name), str(message), is_non_retryable=is_non_retryable)
        return self._take(payload, reference, is_direct=is_direct)

    def _take(self, payload: str, reference: Any, *, is_direct: bool) -> str:
        found = TaskReference.read(reference)
        if found is None:
            return MALFORMED
        result = self._operations().answer(found, payload, is_patient=not is_direct)
        if result is AnswerResult.FORGED:
            logger.warning(
                "An answer to %s (%s) is refused: its token is not that of the task", found.ref, found.event_type
            )
        return _RESULTS[result]


def error_of(source: Any, rest: tuple[Any, ...]) -> tuple[dict[str, Any], Any]:
    """An error and the reference of who waits for it, from what Celery calls an errback with.

    ``source`` is the task's request, followed by the exception and its traceback, where the errback is called in the
    process of the task; where that does not know our tasks it sends a message instead, with the task's id alone.
    """
    if isinstance(source, str):
        text = f"Celery task {source} failed; its worker, which does not import celery_durable, has logged why"
        return {"name": "TaskFailed", "message": text}, _only(rest)
    return error_of_exception(rest[0] if rest else None), _only(rest[2:])


def error_of_exception(exception: object) -> dict[str, Any]:
    """An error as it is answered."""
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


def _only(rest: tuple[Any, ...]) -> Any:
    return rest[0] if len(rest) == 1 else None
