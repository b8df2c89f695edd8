"""The base of response bodies, and what several of them contain."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.alias_generators import to_camel

from celery_durable.model import Status


class StepState(StrEnum):
    """The progress of a step. Only steps of linear workflows are `planned`, `ready`, `running`, `done` or `dead`."""

    PENDING = "pending"
    WAITING = "waiting"
    COMPLETED = "completed"
    ERRORED = "errored"
    CANCELLED = "cancelled"
    PLANNED = "planned"
    READY = "ready"
    RUNNING = "running"
    DONE = "done"
    DEAD = "dead"


class ResponseModel(BaseModel):
    """The base of response bodies."""

    # A command of the CLI reads with two or three of the models: those that it does not use need not be built.
    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, defer_build=True)
    http_status: ClassVar[int] = 200

    @classmethod
    def parse(cls, data: Any) -> Self:
        """Return the model of a decoded body; raises ValueError, which names the first field that is wrong."""
        try:
            return cls.model_validate(data)
        except ValidationError as exc:
            error = exc.errors(include_url=False)[0]
            where = ".".join(map(str, error["loc"])) or "body"
            raise ValueError(f"{where}: {error['msg']}, not {error['input']!r}") from None

    def to_data(self) -> dict[str, Any]:
        """Return the body as JSON data, without the fields that were not set."""
        return self.model_dump(mode="json", by_alias=True, exclude_unset=True)

    def to_json(self) -> bytes:
        """Return the JSON body, without the fields that were not set."""
        return self.__pydantic_serializer__.to_json(self, by_alias=True, exclude_unset=True)


WHEN = "2030-01-01T08:00:00.000000Z"


class ErrorView(ResponseModel):
    """A stored error."""

    name: str
    message: str


class StatusView(ResponseModel):
    """The status of an instance. It has an ``error`` only if errored, and an ``output`` only if complete."""

    status: Status
    error: ErrorView | None = None
    output: Any = None

    model_config = ConfigDict(json_schema_extra={"examples": [{"status": "complete", "output": "shipped"}]})
