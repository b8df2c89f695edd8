"""What is known of an instance when somebody asks why it is not moving, and what he is told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any

from celery_durable.model import Child, Heartbeat, InstanceRow, ParentStep, RunRow, Status, StepRecord

YOUR_APP = "<your app>"
"""Where an action names the app after ``-A``: whoever shows it may know the name."""


class Code(StrEnum):
    """The answers there are."""

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
    """What is known of an instance and of the processes around it, at one moment of the database's time."""

    now: datetime
    instance: InstanceRow
    run: RunRow
    open_steps: tuple[StepRecord, ...] = ()
    """Of the current run, in call order."""
    last_step: StepRecord | None = None
    """The last of the current run that has ended."""
    buffered: tuple[str, ...] = ()
    """Types of events that nobody has consumed, each once."""
    answered: int = 0
    """How many of the run's Celery tasks have answered."""
    unsent: frozenset[str] = frozenset()
    """Ids of those of its Celery tasks that have not left the outbox."""
    unsent_items: Mapping[str, int] = field(default_factory=dict)
    """How many tasks of its maps have not left the outbox, by step key."""
    children: Mapping[Child, Status] = field(default_factory=dict)
    """How the instances stand that do its open steps; without those that are not there any more."""
    heartbeats: tuple[Heartbeat, ...] = ()
    parent: ParentStep | None = None
    """The step whose child it is."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Why an instance is where it is.

    Attributes:
        code: A stable name for programs.
        sentence: The same for people.
        facts: What the answer rests on, as JSON data.
        actions: Commands to run, the most useful first.
    """

    code: Code
    sentence: str
    facts: Mapping[str, Any]
    actions: tuple[str, ...] = ()
