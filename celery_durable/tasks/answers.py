"""What Celery tasks answer to the steps that have them do their work: taken from their callbacks.

The answer travels in its message, so a message that could not be taken goes back to the broker. One that gets lost is
found out by the step, when its timeout ends.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from celery.utils.serialization import UnpickleableExceptionWrapper

from celery_durable import values
from celery_durable.config import Settings
from celery_durable.errors import NonRetryableError, ValueRefused
from celery_durable.model import Ref
from celery_durable.operations import Operations
from celery_durable.runtime import Runtime

logger = logging.getLogger("celery_durable.tasks")

_REST_SECONDS = 1.0
_QUEUE = 4
"""Where the queue stands in what is asked."""
MALFORMED = "noop: malformed message"


class Answers:
    """Takes them.

    ``asked``: workflow, instance id, run number and event type, as the step's letter named them, and the queue to which
    the answer goes.
    """

    def __init__(self, operations: Callable[[], Operations], settings: Settings, runtime: Runtime) -> None:
        self._operations, self._settings, self._runtime = operations, settings, runtime

    def queue(self, asked: tuple[Any, ...]) -> str:
        """Where an answer is taken: where its step is, which may be another application's."""
        return asked[_QUEUE] if len(asked) > _QUEUE and isinstance(asked[_QUEUE], str) else self._settings.queue

    def rest(self) -> None:
        """Let what is in the way pass by."""
        self._runtime.sleep(_REST_SECONDS)

    def done(self, result: Any, asked: Any) -> str:
        """A task has returned; what is no JSON, or too large, is the step's error."""
        try:
            payload = values.answer_of(values.encode(result, what="Result of the task", limits=self._settings.limits))
        except ValueRefused as exc:
            payload = values.answer_of_error(type(exc).__name__, str(exc), is_final=True)
        return self._take(payload, asked)

    def failed(self, error: Mapping[str, Any], asked: Any) -> str:
        """A task has failed, with this error's ``name`` and ``message``; ``final``: it need not be tried again."""
        name, message, is_final = error.get("name"), error.get("message"), error.get("final") is True
        return self._take(values.answer_of_error(str(name), str(message), is_final=is_final), asked)

    def _take(self, payload: str, asked: Any) -> str:
        match asked:
            case (str(workflow), str(instance_id), int(run_number), str(event_type), *_):
                ref = Ref(workflow, instance_id, run_number)
            case _:
                return MALFORMED
        is_taken = self._operations().answer(ref, event_type, payload)
        return "taken" if is_taken else "noop: nothing waits for it any more, or has it already"


def error_of(source: Any, rest: tuple[Any, ...]) -> tuple[dict[str, Any], tuple[Any, ...]]:
    """An error and who is asked, from what Celery calls an errback with.

    ``source`` is the task's request, followed by the exception and its traceback, where the errback is called in the
    process of the task; where that does not know our tasks it sends a message instead, with the task's id alone.
    """
    if isinstance(source, str):
        text = f"Celery task {source} failed; its worker, which does not import celery_durable, has logged why"
        return {"name": "TaskFailed", "message": text}, rest
    exception = rest[0] if rest else None
    asked = rest[2:]
    match exception:
        case NonRetryableError():
            return {"name": exception.name, "message": str(exception), "final": True}, asked
        case UnpickleableExceptionWrapper():
            return {"name": exception.exc_cls_name, "message": str(exception)}, asked
    return {"name": type(exception).__name__, "message": str(exception)}, asked


def revoked(request: Any, *, errback: str, why: str) -> list[tuple[dict[str, str], tuple[Any, ...]]]:
    """What is to be told of a task that Celery will not run, which calls no errback then: errors, and who is asked.

    ``request``: the task's; ``errback``: the name of ours.
    """
    text = f"Celery task {request.task!r} ({request.id}) was {why}"
    asked = [each["args"] for each in request.errbacks or () if each.get("task") == errback]
    return [({"name": "TaskRevoked", "message": text}, tuple(each)) for each in asked]
