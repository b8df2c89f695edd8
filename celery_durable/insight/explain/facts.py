"""The input and the output of `explain`: the facts about an instance, and the diagnosis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

from celery_durable.errors import Cancelled
from celery_durable.insight.explain.codes import Code, find_python_call
from celery_durable.model import (
    AttemptRecord,
    Child,
    Count,
    Heartbeat,
    InstanceHead,
    InstanceRow,
    LimitWait,
    Record,
    RowLocker,
    RunRow,
    Status,
    StepRecord,
)
from celery_durable.redaction import Redaction


@dataclass(frozen=True, slots=True)
class Facts:
    """An instance, and the heartbeats of dispatchers and workers, as one transaction of the database read them."""

    head: InstanceHead
    open_steps: tuple[StepRecord, ...] = ()
    """The open steps of the current run, in call order."""
    last_step: StepRecord | None = None
    cancellation: Cancelled | None = None
    """What a step call has raised because the run was cancelled; None if none has."""
    last_attempt: AttemptRecord | None = None
    """The last attempt of the current run that did not succeed."""
    buffered: tuple[str, ...] = ()
    """The types of events that no wait has consumed, without repetitions."""
    answered: int = 0
    """How many task steps of the run have an answer."""
    limit_waits: tuple[LimitWait, ...] = ()
    """The first steps that wait for limits. A caller with a scope is not told: limits count for all instances."""
    unsent: frozenset[str] = frozenset()
    """The ids of its Celery tasks that are still in the outbox."""
    unsent_items: Mapping[str, Count] = field(default_factory=dict)
    """How many tasks of each map step are still in the outbox, by step key."""
    task_queues: Mapping[str, str] = field(default_factory=dict)
    """The queues to which the tasks of open steps were sent, by step key. Steps whose queue is unknown are missing."""
    is_known_here: bool = False
    max_run_duration: timedelta | None = None
    """How long a run of the workflow may take, if this process knows the workflow and it has such a limit."""
    children: Mapping[Child, Status] = field(default_factory=dict)
    """The statuses of the child instances of its open steps. Deleted children are missing."""
    failed_children: tuple[tuple[Child, Status], ...] = ()
    """The first two children whose failure ended the run, and their statuses now. A retry of the family keeps them."""
    heartbeats: tuple[Heartbeat, ...] = ()
    dispatcher: str = "beat"
    """In which processes dispatchers run: the setting ``durable_dispatcher`` of this process."""
    lease: timedelta = timedelta(seconds=30)
    """For how long a worker claims a run: the setting ``durable_lease_seconds`` of this process."""
    is_execution_enabled: bool = True
    is_read_only: bool = False
    locker: RowLocker | None = None

    @property
    def now(self) -> datetime:
        """The database's time."""
        return self.head.now

    @property
    def instance(self) -> InstanceRow:
        """The instance's row."""
        return self.head.instance

    @property
    def run(self) -> RunRow:
        """The instance's current run."""
        return self.head.run

    @property
    def is_pausing(self) -> bool:
        """Whether it pauses when the running step ends. A worker leaves a run also to be cancelled."""
        return self.instance.pause_requested and self.run.cancel_requested_at is None

    def redacted(self, redaction: Redaction) -> Facts:
        """Return the facts with user data redacted, because the sentence of a diagnosis quotes errors and reasons."""
        if not redaction.has_hook:
            return self
        run, last, attempt = self.run, self.last_step, self.last_attempt
        return replace(
            self,
            head=replace(
                self.head,
                run=replace(
                    run,
                    error_message=redaction.redact_value(run.error_message, "error"),
                    reason=redaction.redact_value(run.reason, "reason"),
                ),
            ),
            open_steps=tuple(redaction.redact_step(step) for step in self.open_steps),
            last_step=None if last is None else redaction.redact_step(last),
            last_attempt=None if attempt is None else redaction.redact_attempt(attempt),
            limit_waits=tuple(replace(each, limit=redaction.redact_limit(each.limit)) for each in self.limit_waits),
        )


@dataclass(frozen=True, slots=True)
class Diagnosis(Record):
    """Why an instance is in its current state.

    Attributes:
        code: The diagnosis as a stable name, for programs.
        sentence: The diagnosis in one or more sentences, for people.
        facts: The data behind the diagnosis, as JSON data.
        actions: Commands to run, the most useful first.
    """

    code: Code
    sentence: str
    facts: Mapping[str, Any]
    actions: tuple[str, ...] = ()

    def __str__(self) -> str:
        """The sentence, and what to do, in Python if a method does it."""
        return "\n".join([self.sentence, *(f"  {find_python_call(each) or each}" for each in self.actions)])
