"""Why a request was refused."""

from __future__ import annotations

from pydantic import ConfigDict

from celery_durable.errors import DurableError, WorkflowNotFound
from celery_durable.wire.codes import ProblemCode
from celery_durable.wire.responses.model import ResponseModel


class InvalidField(ResponseModel):
    """A field of a request that is not valid, without its value."""

    where: str
    message: str


class Problem(ResponseModel):
    """Why a request was refused (RFC 9457). ``code`` is stable; ``message``, for people, is the same as ``detail``."""

    title: str
    status: int
    detail: str
    code: ProblemCode | str
    message: str
    errors: list[InvalidField] | None = None

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "title": "Not Found",
                    "status": 404,
                    "detail": "Workflow 'order' has no instance 'order-42'.",
                    "code": "INSTANCE_NOT_FOUND",
                    "message": "Workflow 'order' has no instance 'order-42'.",
                }
            ]
        }
    )


def describe_refusal(error: DurableError) -> str:
    """Return the message of a refused request."""
    # The error lists the known workflows. A client may lack the permission to list them.
    return f"No workflow is registered as {error.name!r}." if isinstance(error, WorkflowNotFound) else str(error)
