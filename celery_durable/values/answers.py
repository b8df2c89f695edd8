"""What is told a step that others did: what came out, or the error that ended it; JSON text, as an event's payload."""

from __future__ import annotations

import json
from typing import Any

from celery_durable.values.names import storable_error
from celery_durable.values.payloads import PayloadLimits, encode

_ANY = PayloadLimits(2**31, 10)


def answer_of(output: str | None) -> str:
    """An answer with this output, JSON text; None is null."""
    return f'{{"output":{output or "null"}}}'


def answer_of_error(name: str, message: str) -> str:
    """An answer that tells of an error."""
    name, message = storable_error(name, message)
    return encode({"error": {"name": name, "message": message}}, what="Answer", limits=_ANY)


def answer_of_termination(workflow: str, instance_id: str, reason: str | None) -> str:
    """The answer of a child that was terminated."""
    why = "" if reason is None else f": {reason}"
    return answer_of_error("ChildTerminated", f"Instance {instance_id!r} of workflow {workflow!r} was terminated{why}")


def error_in(answer: str) -> tuple[str, str] | None:
    """Name and message of the error that an answer tells of, if it does."""
    error = json.loads(answer).get("error")
    return None if error is None else (error["name"], error["message"])


def output_in(answer: str) -> Any:
    """The output in an answer that tells of no error."""
    return json.loads(answer)["output"]
