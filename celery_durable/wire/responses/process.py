"""What the serving process says about itself."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict

from celery_durable.wire.responses.model import ResponseModel


class Ticked(ResponseModel):
    """The number of passes that a tick ran."""

    processed: int

    model_config = ConfigDict(json_schema_extra={"examples": [{"processed": 3}]})


class Healthy(ResponseModel):
    """The check succeeded."""

    status: Literal["ok"] = "ok"

    model_config = ConfigDict(json_schema_extra={"examples": [{"status": "ok"}]})
