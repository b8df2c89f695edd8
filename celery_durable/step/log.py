"""The durable log of a run, as workflows and handlers write it."""

from __future__ import annotations

from typing import Any, Protocol

from celery_durable.model import LogLevel


class LogContext(Protocol):
    """Buffers log lines. They are stored with the next step that is recorded."""

    def log(self, level: LogLevel, message: str, category: str, data: dict[str, Any]) -> None: ...


class StepLog:
    """The durable log of a run. Lines are stored when the next step is recorded.

    Outside of steps a line is logged on every pass; on a replay it is marked as such.
    """

    def __init__(self, context: LogContext) -> None:
        self._context = context

    def debug(self, message: str, /, *, category: str = "workflow", **data: Any) -> None:
        """Log a line at level DEBUG, as `info` does."""
        self._context.log(LogLevel.DEBUG, message, category, data)

    def info(self, message: str, /, *, category: str = "workflow", **data: Any) -> None:
        """Log a line at level INFO.

        Args:
            message: Text; cut to ``durable_max_log_message`` (2048) characters.
            category: 1 to 64 characters to filter by.
            data: JSON data by name.

        Raises:
            NameInvalid: The message is not text, or the category breaks the rules.
            ValueRefused: The category is "system".
            NotSerializable: The data have no JSON form.
            PayloadTooLarge: The data are larger than ``durable_max_payload_bytes``.
        """
        self._context.log(LogLevel.INFO, message, category, data)

    def warning(self, message: str, /, *, category: str = "workflow", **data: Any) -> None:
        """Log a line at level WARNING, as `info` does."""
        self._context.log(LogLevel.WARNING, message, category, data)

    def error(self, message: str, /, *, category: str = "workflow", **data: Any) -> None:
        """Log a line at level ERROR, as `info` does."""
        self._context.log(LogLevel.ERROR, message, category, data)
