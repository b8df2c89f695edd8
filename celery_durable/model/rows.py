"""What the engine reads and writes: references, claims and rows."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any, Literal

from celery_durable.model.states import FINISHED_STEPS, LogLevel, Status, StepStatus, StepType, WakeReason, WorkflowKind


@dataclass(frozen=True, slots=True)
class RunRef:
    """All that a message carries: which run of which instance to look at."""

    workflow: str
    instance_id: str
    run_number: int

    def __str__(self) -> str:
        return f"{self.workflow}/{self.instance_id}#{self.run_number}"


@dataclass(frozen=True, slots=True)
class DueRun:
    """A run that a worker should look at now, and the queue to say so on."""

    ref: RunRef
    queue: str


class OutboxKind(StrEnum):
    """What the outbox holds."""

    TASK = "task"
    EVENT = "event"


@dataclass(frozen=True, slots=True)
class OutboxMessage:
    """What is sent once the transaction that wrote it has committed: a Celery task, or a named outbound event.

    ``id`` is the same however often it is sent. ``body`` is JSON text: a task's args, kwargs and options, an event's
    payload.
    """

    id: str
    kind: OutboxKind
    name: str
    body: str

    @property
    def content(self) -> Any:
        """``body`` as data."""
        return json.loads(self.body)


@dataclass(frozen=True, slots=True)
class Parent:
    """The step of another instance's run that created this one."""

    pk: int
    run_number: int
    step_key: str


@dataclass(frozen=True, slots=True)
class Claim:
    """The right to advance one run, as long as the row still names ``token`` (LAW 2)."""

    pk: int
    ref: RunRef
    token: str
    queue: str
    crash_count: int
    created_at: datetime
    claimed_at: datetime
    run_at: datetime
    """Since when it had been due."""
    parent: Parent | None = None
    sent_at: datetime | None = None
    """When its last dispatch message had been sent; None: no message led to the claim."""

    @property
    def latency(self) -> timedelta:
        """How long it had been due when it was claimed."""
        return max(self.claimed_at - self.run_at, timedelta(0))


@dataclass(frozen=True, slots=True)
class RunningStep:
    """The attempt of a step whose body a worker runs now, and when the body started, by the database's clock."""

    step_key: str
    attempt: int
    since: datetime


@dataclass(frozen=True, slots=True)
class StepRow:
    """One recorded step of a run. ``result`` is JSON text; None while there is none."""

    step_key: str
    seq: int
    name: str
    type: StepType
    status: StepStatus
    attempts: int = 0
    max_attempts: int | None = None
    timeout: timedelta | None = None
    next_retry_at: datetime | None = None
    wake_at: datetime | None = None
    wait_event_type: str | None = None
    result: str | None = None
    error_name: str | None = None
    error_message: str | None = None
    event_seq: int | None = None
    """Of a linear step: the event that its handler is called with."""
    created_at: datetime | None = None
    started_at: datetime | None = None
    finished_at: datetime | None = None
    commit_id: str = ""
    """The boundary that wrote it."""

    @property
    def is_finished(self) -> bool:
        """Whether the step has ended: its row never changes again."""
        return self.status in FINISHED_STEPS

    @property
    def is_timer_step(self) -> bool:
        """Whether the step is a sleep, which is free."""
        return self.type is StepType.SLEEP


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A linear step as it is inserted when a run begins."""

    name: str
    max_attempts: int | None
    timeout: timedelta | None


@dataclass(frozen=True, slots=True)
class RunPlan:
    """How a run begins: its kind, the rows that a linear one follows to its end, and the version that they are of."""

    kind: WorkflowKind = WorkflowKind.REPLAY
    steps: tuple[PlannedStep, ...] = ()
    version: int | None = None


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line on its way to the next boundary; ``data`` is JSON text."""

    level: LogLevel
    category: str
    message: str
    data: str | None
    step_key: str | None
    attempt: int | None
    is_replay: bool


@dataclass(frozen=True, slots=True)
class InstanceRow:
    """The mutex row of an instance, with its scheduling."""

    pk: int
    workflow: str
    instance_id: str
    run_number: int
    status: Status
    claim_token: str | None
    claim_task_id: str | None
    claimed_by: str | None
    """The worker node that holds the claim."""
    lease_until: datetime | None
    run_at: datetime | None
    next_check_at: datetime | None
    wake_reason: WakeReason
    priority: int
    dispatch_count: int
    crash_count: int
    pause_requested: bool
    version: int
    queue: str
    created_at: datetime
    updated_at: datetime
    kind: WorkflowKind = WorkflowKind.REPLAY
    sent_at: datetime | None = None
    """When its last dispatch message was sent; None: no message is on its way."""

    @property
    def ref(self) -> RunRef:
        """The current run."""
        return RunRef(self.workflow, self.instance_id, self.run_number)


@dataclass(frozen=True, slots=True)
class VersionedInstance:
    """An instance at one moment. ``tag``: opaque, another one after every change; no other instance ever has it."""

    instance: InstanceRow
    tag: str


@dataclass(frozen=True, slots=True)
class Origin:
    """The run that another run continues.

    Attributes:
        instance_id: The id of its instance.
        run_number: Its number, from 1.
        step_key: The first step that the new run does not keep. None: it keeps every step that had ended.
    """

    instance_id: str
    run_number: int
    step_key: str | None


@dataclass(frozen=True, slots=True)
class RunRow:
    """One run of an instance; ``params`` and ``output`` are JSON text."""

    run_number: int
    params: str
    output: str | None
    error_name: str | None
    error_message: str | None
    reason: str | None
    created_at: datetime
    started_at: datetime | None
    completed_at: datetime | None
    dropped_logs: int
    origin: Origin | None = None


SUPPORTED_POOLS = frozenset({"prefork", "threads", "solo"})
"""The pools on which leases, timers and commits are tested to hold."""
HEARTBEAT_INTERVAL = timedelta(seconds=10)
"""How often a process that sweeps or works says that it lives."""
SWEEP_TASK = "celery_durable.sweep"
"""The heartbeat of the `sweep` task, wherever it ran last: it belongs to no process."""
MAX_SWEEP_AGE = 3 * HEARTBEAT_INTERVAL
"""How long ago a process may have looked for due work that still does."""


@dataclass(frozen=True, slots=True)
class Outage:
    """What keeps a dispatcher from its work, as it last said: a queue that refuses, or a server that is away.

    ``where``: the queue's name, the broker's URL with the password masked, or "database". ``error``: the last error in
    the server's own words, with its class.
    """

    what: Literal["queue", "broker", "database"]
    where: str
    since: datetime
    error: str
    failures: int


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A process that sweeps or works, as it last said; for people, nothing is decided by it."""

    id: str
    kind: Literal["dispatcher", "worker"]
    node: str
    pid: int
    queues: tuple[str, ...]
    """What it consumes; a dispatcher that is no worker consumes nothing."""
    workflows: tuple[str, ...]
    """What it knows."""
    started_at: datetime
    seen_at: datetime
    swept_at: datetime | None
    """When it last looked for due work; None where that is not its business."""
    next_sweep_at: datetime | None
    """When it expected to find the next; None: nothing in sight."""
    outages: tuple[Outage, ...] = ()
    """What keeps it from its work now."""
    pool: str | None = None
    """A worker's pool; None where that is not known, or the process is no worker."""

    @property
    def runs_workflows(self) -> bool:
        """Whether it is a worker on a pool that runs workflows; others leave what comes to their queues."""
        return self.kind == "worker" and (self.pool is None or self.pool in SUPPORTED_POOLS)

    def is_live(self, now: datetime) -> bool:
        """Whether it has been seen lately: it may miss two heartbeats."""
        return now - self.seen_at <= 3 * HEARTBEAT_INTERVAL

    def sweeps(self, now: datetime) -> bool:
        """Whether it has looked for due work lately."""
        return self.swept_at is not None and now - self.swept_at <= MAX_SWEEP_AGE
