"""Sentry: one event for each failed run, grouped by workflow, step and error, with tags to search by.

The engine logs the end of a failed run at ERROR with its exception. The SDK's logging integration makes an event of it,
and `before_send` adds the fingerprint and the tags. It needs nothing but the SDK that your application has.
"""

from __future__ import annotations

from typing import Any

from celery_durable.model import LOG_FIELDS

__all__ = ["before_send"]


def before_send(event: dict[str, Any], hint: dict[str, Any]) -> dict[str, Any]:
    """Group and tag the event of a failed run. Pass it as ``sentry_sdk.init(before_send=...)``, or call it from yours.

    Args:
        event: The event.
        hint: What the SDK knows of it.

    Returns:
        The event. Events of anything else are not changed.
    """
    record = hint.get("log_record")
    if record is None or record.name != "celery_durable.runner" or not hasattr(record, "error_name"):
        return event
    found = {name: getattr(record, name) for name in LOG_FIELDS}
    tags = event.setdefault("tags", {})
    tags.update({f"durable.{name}": str(value) for name, value in found.items() if value is not None})
    event["fingerprint"] = ["celery_durable", record.workflow, record.step or "", record.error_name]
    return event
