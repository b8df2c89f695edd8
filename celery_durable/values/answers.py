"""The answer to a remote step, as JSON text: the output of its task or child workflow, or the error that ended it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from celery_durable.errors import NonRetryableError
from celery_durable.model import RunOutcome, RunRef, Status
from celery_durable.values.names import sanitize_error
from celery_durable.values.payloads import ALREADY_CHECKED_LIMITS, encode


def encode_answer(output: str | None) -> str:
    """Return an answer with this output, which is JSON text; None means null."""
    return f'{{"output":{output or "null"}}}'


def encode_error_answer(name: str, message: str, *, is_non_retryable: bool = False) -> str:
    """Return an answer with an error. ``is_non_retryable`` means that the step makes no further attempt."""
    name, message = sanitize_error(name, message)
    final = {"final": True} if is_non_retryable else {}
    return encode({"error": {"name": name, "message": message, **final}}, what="Answer", limits=ALREADY_CHECKED_LIMITS)


def encode_termination_answer(workflow: str, instance_id: str, reason: str | None) -> str:
    """Return the answer of a child instance that was terminated. A map does not create another one for its item."""
    why = "" if reason is None else f": {reason}"
    text = f"Instance {instance_id!r} of workflow {workflow!r} was terminated{why}"
    return encode_error_answer("ChildTerminated", text, is_non_retryable=True)


def encode_child_answer(ref: RunRef, outcome: RunOutcome) -> str:
    """Return the answer of an ended child instance to the step that waits for it."""
    match outcome.status:
        case Status.COMPLETE:
            return encode_answer(outcome.output)
        case Status.TERMINATED:
            return encode_termination_answer(ref.workflow, ref.instance_id, outcome.reason)
    return encode_error_answer(outcome.error_name or "Error", outcome.error_message or "")


@dataclass(frozen=True, slots=True)
class AnswerError:
    """The error in an answer."""

    name: str
    message: str
    is_non_retryable: bool = False


def read_answer_error(answer: str) -> AnswerError | None:
    """Return the error in an answer, or None if the answer has an output."""
    error = json.loads(answer).get("error")
    if error is None:
        return None
    is_non_retryable = bool(error.get("final")) or error["name"] == NonRetryableError.__name__
    return AnswerError(error["name"], error["message"], is_non_retryable)


def read_answer_output(answer: str) -> Any:
    """Return the output in an answer without an error, as JSON data."""
    return json.loads(answer)["output"]
