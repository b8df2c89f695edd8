"""`Backend`, the interface by which commands reach instances: in the app's database, or over the HTTP API.

The commands that both `celery -A proj durable` and `celery-durable` have use only this interface. Its methods raise
DurableError, or CliError if the database or the server cannot be used.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Protocol

from celery_durable.cli.errors import Program
from celery_durable.explain import Diagnosis
from celery_durable.model import History, InstanceSummary, LogLevel, LogRecord, Page, Published, Status
from celery_durable.runtime import Runtime

if TYPE_CHECKING:  # commands that read need no request and no response
    from celery_durable.commands import A, Command, Q, Target

POLL_SECONDS = 0.1
"""The pause between two reads of an instance that a command follows. A read is one small query."""
LONG_POLL_SECONDS = 20.0
"""The longest time for which one read of a followed instance waits for a change."""


@dataclass(frozen=True, slots=True)
class InstanceSnapshot:
    """The state of an instance at one moment. ``version`` is opaque and differs after every change."""

    status: Status
    run_number: int
    is_pausing: bool
    version: object
    created_at: datetime


@dataclass(frozen=True, slots=True)
class ListQuery:
    """A page of the instances of a workflow, or of all, that have this status and all these labels."""

    workflow: str | None
    limit: int
    status: Status | None = None
    cursor: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WorkflowInfo:
    """A workflow. Over HTTP only the name is known, and the other fields are empty."""

    name: str
    queue: str = ""
    code: str = ""
    """The module and the name of its function."""


class LogTail(Protocol):
    """Reads the log lines of a run, including lines that are written while it reads."""

    def read_new_lines(self) -> Iterator[LogRecord]:
        """Return the lines that were written since the last call, oldest first."""


class Backend(Protocol):
    """Reads and changes instances. A change does the same as the method of `WorkflowInstance` with its name."""

    def now(self) -> datetime:
        """Return the current time of the clock that wrote the stored times."""

    @property
    def runtime(self) -> Runtime:
        """The clock of this process."""

    def workflows(self) -> list[WorkflowInfo]:
        """Return the workflows that the app knows, ordered by name."""

    def list(self, query: ListQuery) -> Page[InstanceSummary]:
        """Return a page of instances, newest first; raises CursorInvalid, InvalidLabel."""

    def read_snapshot(
        self, workflow: str, instance_id: str, *, known_version: object = None, wait_seconds: float = 0.0
    ) -> InstanceSnapshot | None:
        """Return the current state of an instance; raises InstanceNotFound.

        Returns None if the instance is still at ``known_version``. The method may wait up to ``wait_seconds`` for a
        change before it returns None.
        """

    def history(self, workflow: str, instance_id: str, *, run: int | None = None) -> History:
        """Return all steps and events of a run, by default of the current one; raises RunNotFound."""

    def tail(
        self, workflow: str, instance_id: str, *, run: int, level: LogLevel | None = None, category: str | None = None
    ) -> LogTail:
        """Return a reader of the log lines of a run that have this level or a higher one."""

    def published(self, workflow: str, instance_id: str, *, run: int) -> dict[str, Published]:
        """Return the values that a run has published, by key."""

    def explain(self, workflow: str, instance_id: str) -> Diagnosis | None:
        """Return why an instance does not move; None if the server has no diagnosis."""

    def call(self, command: Command[Q, A], target: Target, body: Q) -> A:
        """Do a command, and return its response."""


class Connection(Program, abc.ABC):
    """Opens the backend of one of the two programs. Commands of `celery-durable` find theirs in ``ctx.obj``."""

    @abc.abstractmethod
    def open(self) -> Backend:
        """Return the backend; raises CliError."""

    @abc.abstractmethod
    def explain(self, exc: Exception) -> None:
        """Raise CliError if the error means that the database or the server cannot be used."""
