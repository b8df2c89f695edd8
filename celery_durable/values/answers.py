"""What is told a step that others did: what came out, or the error that ended it; JSON text, as an event's payload."""

from __future__ import annotations

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
