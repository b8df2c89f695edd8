"""What the verbs work on, whoever gives it: the store of an app, or its HTTP API.

The verbs that both `celery -A proj durable` and `celery-durable` have know nothing else: not SQL, not HTTP. Refusals
are DurableErrors, or Refusals where the way to the instances is what fails.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

from celery_durable.explain import Diagnosis
from celery_durable.model import (
    History,
    InstanceSummary,
    LogLevel,
    LogRecord,
    Page,
    Published,
    RestartOrCreateResult,
    Status,
)

POLL_SECONDS = 0.1
"""Between two looks at an instance that is followed; a look is one small read."""
LONG_POLL_SECONDS = 20.0
"""How long one look at an instance that is followed may take where nothing changes."""


@dataclass(frozen=True, slots=True)
class InstanceSnapshot:
    """An instance at one moment. ``version``: opaque; another one means that something has changed."""

    status: Status
    run_number: int
    is_pausing: bool
    version: object
    created_at: datetime


@dataclass(frozen=True, slots=True)
class WorkflowInfo:
    """A workflow. What is not known is empty: over HTTP the name is all there is."""

    name: str
    queue: str = ""
    code: str = ""
    """Module and name of its function."""


class LogTail(Protocol):
    """The log lines of a run, read on and on."""

    def read_new_lines(self) -> Iterator[LogRecord]:
        """The lines since the last call, oldest first."""


class Backend(Protocol):
    """Instances, by workflow and id."""

    def now(self) -> datetime:
        """The time by which everything shown was written."""

    def monotonic(self) -> float:
        """Seconds on a steady clock."""

    def sleep(self, seconds: float) -> None:
        """Wait."""

    def workflows(self) -> list[WorkflowInfo]:
        """Those that the app knows, by name."""

    def list(
        self,
        workflow: str | None,
        *,
        status: Status | None,
        cursor: str | None,
        limit: int,
        labels: Mapping[str, str] | None = None,
    ) -> Page[InstanceSummary]:
        """Instances that have all these labels, newest first; raises CursorInvalid, InvalidLabel."""

    def read_snapshot(
        self, workflow: str, instance_id: str, *, known_version: object = None, wait_seconds: float = 0.0
    ) -> InstanceSnapshot | None:
        """An instance now; None while it is at the version ``known``, after ``patience`` seconds at most."""

    def history(self, workflow: str, instance_id: str, *, run: int | None = None) -> History:
        """All steps and events of a run, by default the current one; raises RunNotFound."""

    def tail(
        self, workflow: str, instance_id: str, *, run: int, level: LogLevel | None = None, category: str | None = None
    ) -> LogTail:
        """The log lines of a run from this level on."""

    def published(self, workflow: str, instance_id: str, *, run: int) -> dict[str, Published]:
        """What a run has published, by key."""

    def explain(self, workflow: str, instance_id: str) -> Diagnosis | None:
        """Why it stands where it stands; None where that cannot be asked."""

    def create(self, workflow: str, params: Any, *, id: str | None, labels: Mapping[str, str] | None = None) -> str:
        """Have an instance started; answers with its id."""

    def restart_or_create(
        self, workflow: str, params: Any, *, id: str, labels: Mapping[str, str]
    ) -> RestartOrCreateResult:
        """Begin a new run of the instance where it has ended, create it where there is none; tells which."""

    def send_event(self, workflow: str, instance_id: str, type_: str, payload: Any, *, id: str | None) -> bool:
        """Send an event; False where one of this id had come before."""

    def pause(self, workflow: str, instance_id: str) -> None:
        """Stop it at its next step boundary."""

    def resume(self, workflow: str, instance_id: str) -> None:
        """Let it go on."""

    def terminate(self, workflow: str, instance_id: str, *, reason: str | None) -> None:
        """End it for good."""

    def restart(self, workflow: str, instance_id: str, *, reason: str | None) -> int:
        """Begin a new run; answers with its number."""

    def retry(self, workflow: str, instance_id: str, *, reason: str | None) -> int:
        """Try again what ended it errored, in a new run; answers with its number."""

    def rewind(self, workflow: str, instance_id: str, step: str, *, reason: str | None) -> int:
        """Begin a new run that goes on from a step; answers with its number."""

    def set_result(self, workflow: str, instance_id: str, step: str, value: Any, *, by: str, reason: str | None) -> int:
        """Complete a step by hand; answers with the number of the run that goes on with it."""

    def skip(self, workflow: str, instance_id: str, step: str, *, by: str, reason: str | None) -> int:
        """Complete a step by hand, without a result."""

    def fork(self, workflow: str, instance_id: str, step: str, *, id: str | None) -> str:
        """Make an instance that goes on from a step of this one; answers with its id."""
