"""What all passes of a process share, and what one pass has claimed and read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from celery_durable import values
from celery_durable.config import Settings
from celery_durable.definitions import Definition
from celery_durable.errors import ValueRefused
from celery_durable.model import DueRun, OutboxMessage, WorkerProcess
from celery_durable.operations.limit_queue import LimitQueue
from celery_durable.redaction import Redaction
from celery_durable.runner.group_commit import GroupCommit
from celery_durable.runner.lease import Lease
from celery_durable.runner.run_limits import RunLimits
from celery_durable.runtime import Runtime
from celery_durable.store.engine import Store
from celery_durable.store.runs.step_rows import RunState


@dataclass(frozen=True, slots=True)
class Environment:
    """The objects that all passes of a process share. The callables are the arguments of `Runner`."""

    store: Store
    settings: Settings
    runtime: Runtime
    publish_runs: Callable[[list[DueRun]], None]
    send_messages: Callable[[list[OutboxMessage]], None]
    should_stop: Callable[[], bool]
    stops_process: Callable[[BaseException], bool]
    """Whether an exception stops the process, and is not a failure of the code that raised it."""
    make_redaction: Callable[[str, str], Redaction]
    """Makes what applies the application's redaction to an instance of a workflow, given by name and id."""
    limit_queue: LimitQueue
    """Serves the limits that a commit has freed."""
    group_commit: GroupCommit | None = None
    """Commits the steps of several passes together; None if the process runs one pass at a time."""


@dataclass(frozen=True, slots=True)
class ClaimedRun:
    """A run that this process has claimed, as the pass has read it."""

    definition: Definition
    lease: Lease
    state: RunState
    limits: RunLimits
    worker: WorkerProcess | None = None
    """The process that runs the pass. None in a replay check, which runs no body."""


def encode_log_data(settings: Settings, message: str, category: str, data: dict[str, Any]) -> str | None:
    """Encode the data of a log line as JSON text, None if it has none; raises if the line is invalid or too large."""
    values.require_text("Log message", message)
    values.check_text_name("Log category", category, settings.max_log_category)
    if category == "system":
        raise ValueRefused('Log category "system" is reserved for the engine; use another.')
    return values.encode(data, what=f"Data of log line {message[:80]!r}", limits=settings.limits) if data else None
