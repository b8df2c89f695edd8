"""The JSON of a complete run: what `export` prints, and what a golden history is."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from celery_durable.model.details import EXPORT_VERSION, History
from celery_durable.model.records import LogRecord


def export_run(
    history: History, *, instance_created_at: datetime, logs: Sequence[LogRecord] | None = None
) -> dict[str, Any]:
    """Build the document of a run. Encode it with `encode_json`. ``logs`` None: without log lines."""
    head = {"version": EXPORT_VERSION, "instance_created_at": instance_created_at}
    document: dict[str, Any] = {**head, **dataclasses.asdict(history)}
    if logs is not None:
        document["logs"] = [dataclasses.asdict(line) for line in logs]
    return document


def encode_json(value: Any) -> Any:
    """Encode datetimes as ISO 8601 and timedeltas as seconds: the ``default`` of `json.dumps`."""
    match value:
        case datetime():
            return value.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        case timedelta():
            return value.total_seconds()
    raise TypeError(f"{type(value).__name__} cannot be exported")
