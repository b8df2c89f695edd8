"""`Backend`, the interface by which commands reach instances: in the app's database, or over the HTTP API.

Its methods raise DurableError, or CliError if the database or the server cannot be used. `celery -A proj durable` does
not call the HTTP application in its own process: to import FastAPI and to build the routes would take almost as much
CPU as `import celery.bin.celery`, and a history would come in pages, not in one transaction.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Protocol, TypeVar

from celery_durable.insight.explain import Diagnosis
from celery_durable.model import (
    AttemptRecord,
    EventWait,
    History,
    InstanceSummary,
    LimitDetails,
    LimitRecord,
    LogLevel,
    LogRecord,
    Page,
    Published,
    RunRef,
    Stats,
    Status,
    WaitFilter,
)
from celery_durable.runtime import Runtime
from celery_durable.values import Parameter

if TYPE_CHECKING:  # commands that read need no request and no response
    from celery_durable.commands import A, Command, Q, Target
    from celery_durable.wire.requests import ChangeLimit

POLL_SECONDS = 0.1
"""The pause between two reads of an instance that a command follows. A read is one small query."""
LONG_POLL_SECONDS = 20.0
"""The longest time for which one read of a followed instance waits for a change."""


@dataclass(frozen=True, slots=True)
class InstanceSnapshot:
    """The state of an instance at one moment. ``version`` is opaque and differs after every change."""

    status: Status
    run_number: int
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
    """A workflow and its parameters. Over HTTP the other fields are empty."""

    name: str
    parameters: Sequence[Parameter]
    queue: str = ""
    code: str = ""


LogTail = Callable[[], Iterator[LogRecord]]
AttemptTail = Callable[[], Iterator[AttemptRecord]]
"""Returns the log lines of a run that were written since its last call, oldest first, and those written meanwhile."""


class Backend(Protocol):
    """Reads and changes instances. A change does the same as the method of `WorkflowInstance` with its name."""

    def now(self) -> datetime:
        """Return the current time of the clock that wrote the stored times."""

    @property
    def runtime(self) -> Runtime: ...

    def workflows(self) -> list[WorkflowInfo]:
        """Return the workflows that the app knows, ordered by name."""

    def list(self, query: ListQuery) -> Page[InstanceSummary]:
        """Return a page of instances, newest first; raises CursorInvalid, InvalidLabel."""

    def read_snapshot(self, workflow: str, instance_id: str) -> InstanceSnapshot:
        """Return the current state of an instance; raises InstanceNotFound."""

    def wait_for_change(
        self, workflow: str, instance_id: str, version: object | None, *, wait_seconds: float = 0.0
    ) -> InstanceSnapshot | None:
        """Return an instance, or None if it is still at this version after ``wait_seconds``."""

    def history(self, workflow: str, instance_id: str, *, run: int | None = None) -> History:
        """Return all steps and events of a run, by default of the current one; raises RunNotFound."""

    def tail(self, ref: RunRef, *, level: LogLevel | None = None, category: str | None = None) -> LogTail:
        """Return a function that reads the log lines of a run that have this level or a higher one."""

    def tail_attempts(self, ref: RunRef) -> AttemptTail:
        """Return a function that reads the attempts of a run that did not succeed, each once."""

    def published(self, ref: RunRef) -> dict[str, Published]: ...

    def stats(self) -> Stats: ...

    def waits(self, chosen: WaitFilter, *, cursor: str | None, limit: int) -> Page[EventWait]: ...

    def limits(self, *, cursor: str | None, limit: int) -> Page[LimitRecord]: ...

    def limit(self, name: str, key: str) -> LimitDetails:
        """Return one key of a limit; raises LimitNotFound."""

    def change_limit(self, name: str, body: ChangeLimit) -> None:
        """Set or reset the numbers of a limit; raises LimitNotFound, ValueRefused."""

    def explain(self, workflow: str, instance_id: str) -> Diagnosis: ...

    def call(self, command: Command[Q, A], target: Target, body: Q) -> A: ...


class Connection(abc.ABC):
    """Opens the backend of one of the two programs. Commands of `celery-durable` find theirs in ``ctx.obj``."""

    name: str
    list_workflows = "workflows"
    no_color = False

    @abc.abstractmethod
    def open(self, *, needs_database: bool = True) -> Backend:
        """Return the backend; raises CliError. Without a database it has only the app's workflows."""

    @abc.abstractmethod
    def explain(self, exc: Exception) -> None:
        """Raise CliError if the error means that the database or the server cannot be used."""


class Numbered(Protocol):
    """A log line or an attempt."""

    @property
    def id(self) -> int: ...


R = TypeVar("R", bound=Numbered)
C = TypeVar("C")


def make_tail(read_page: Callable[[C | None], tuple[Iterable[R], C | None, bool]]) -> Callable[[], Iterator[R]]:
    """Return a reader of pages: each record once, although a page may grow and be read twice.

    ``read_page``: takes a cursor, None at first. Returns the records behind it, the next cursor, and whether there are
    more now.
    """
    cursor: C | None = None
    last_id = 0

    def read_new() -> Iterator[R]:
        nonlocal cursor, last_id
        has_more = True
        while has_more:
            page, cursor, has_more = read_page(cursor)
            for record in page:
                if record.id > last_id:
                    last_id = record.id
                    yield record

    return read_new
