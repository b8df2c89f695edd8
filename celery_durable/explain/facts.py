"""The input and the output of `explain`: the facts about an instance, and the diagnosis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any

from celery_durable.model import Child, Heartbeat, InstanceRow, ParentStep, RunRow, Status, StepRecord

YOUR_APP = "<your app>"
"""The app in the commands of a diagnosis: ``celery -A <your app> ...``. A caller that knows the app replaces it."""


class Code(StrEnum):
    """The codes of all diagnoses."""

    SLEEPING = "SLEEPING"
    WAITING_EVENT = "WAITING_EVENT"
    WAITING_TASKS = "WAITING_TASKS"
    WAITING_CHILD = "WAITING_CHILD"
    RETRY_SCHEDULED = "RETRY_SCHEDULED"
    SCHEDULED = "SCHEDULED"
    PAUSED = "PAUSED"
    RUNNING = "RUNNING"
    DUE = "DUE"
    DUE_NOT_DISPATCHED = "DUE_NOT_DISPATCHED"
    QUEUE_REFUSED = "QUEUE_REFUSED"
    DISPATCHED_NOT_CLAIMED = "DISPATCHED_NOT_CLAIMED"
    NOT_REGISTERED = "NOT_REGISTERED"
    POOL_UNSUPPORTED = "POOL_UNSUPPORTED"
    LEASE_EXPIRED = "LEASE_EXPIRED"
    CRASHING = "CRASHING"
    STEP_LIMIT = "STEP_LIMIT"
    NONDETERMINISTIC = "NONDETERMINISTIC"
    FAILED = "FAILED"
    TERMINATED = "TERMINATED"
    DONE = "DONE"


@dataclass(frozen=True, slots=True)
class Facts:
    """An instance and the heartbeats of dispatchers and workers, as one transaction read them.

    ``now`` is the time of the database.
    """

    now: datetime
    instance: InstanceRow
    run: RunRow
    open_steps: tuple[StepRecord, ...] = ()
    """The open steps of the current run, in call order."""
    last_step: StepRecord | None = None
    """The last finished step of the current run."""
    buffered: tuple[str, ...] = ()
    """The types of events that no wait has consumed, without repetitions."""
    answered: int = 0
    """How many task steps of the run have an answer."""
    unsent: frozenset[str] = frozenset()
    """The ids of its Celery tasks that are still in the outbox."""
    unsent_items: Mapping[str, int] = field(default_factory=dict)
    """How many tasks of each map step are still in the outbox, by step key."""
    children: Mapping[Child, Status] = field(default_factory=dict)
    """The statuses of the child instances of its open steps. Deleted children are missing."""
    heartbeats: tuple[Heartbeat, ...] = ()
    parent: ParentStep | None = None
    """The step that created this instance as a child; None if no step did."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
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
