"""What is told a step that others did: what came out, or the error that ended it; JSON text, as an event's payload."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from celery_durable.errors import NonRetryableError
from celery_durable.values.names import sanitize_error
from celery_durable.values.payloads import ALREADY_CHECKED_LIMITS, encode


def encode_answer(output: str | None) -> str:
    """An answer with this output, JSON text; None is null."""
    return f'{{"output":{output or "null"}}}'


def encode_error_answer(name: str, message: str, *, is_non_retryable: bool = False) -> str:
    """An answer that tells of an error; ``is_final``: another attempt would come to the same."""
    name, message = sanitize_error(name, message)
    final = {"final": True} if is_non_retryable else {}
    return encode({"error": {"name": name, "message": message, **final}}, what="Answer", limits=ALREADY_CHECKED_LIMITS)


def encode_termination_answer(workflow: str, instance_id: str, reason: str | None) -> str:
    """The answer of a child that was terminated."""
    why = "" if reason is None else f": {reason}"
    return encode_error_answer(
        "ChildTerminated", f"Instance {instance_id!r} of workflow {workflow!r} was terminated{why}"
    )


@dataclass(frozen=True, slots=True)
class AnswerError:
    """The error that an answer tells of."""

    name: str
    message: str
    is_non_retryable: bool = False


def read_answer_error(answer: str) -> AnswerError | None:
    """The error that an answer tells of, if it does."""
    error = json.loads(answer).get("error")
    if error is None:
        return None
    is_non_retryable = bool(error.get("final")) or error["name"] == NonRetryableError.__name__
    return AnswerError(error["name"], error["message"], is_non_retryable)


def read_answer_output(answer: str) -> Any:
    """The output in an answer that tells of no error."""
    return json.loads(answer)["output"]
