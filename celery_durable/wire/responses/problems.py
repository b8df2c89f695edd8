"""Why a request was refused."""

from __future__ import annotations

from pydantic import ConfigDict

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
