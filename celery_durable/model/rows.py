"""The rows that the engine reads and writes, and the claims, plans and messages made from them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any, Literal

from celery_durable.model.record import Record
from celery_durable.model.states import ItemRef, LogLevel, Status, StepStatus, StepType, WakeReason, WorkflowKind
from celery_durable.model.steps import StepRow


@dataclass(frozen=True, slots=True)
class RunRef:
    """Identifies a run of an instance. It is the whole content of a dispatch message."""

    workflow: str
    instance_id: str
    run_number: int

    def __str__(self) -> str:
        return f"{self.workflow}/{self.instance_id}#{self.run_number}"


LOG_FIELDS = ("workflow", "instance_id", "run_number", "step", "attempt")
"""The fields by which log records name a run, a step and an attempt."""


def build_log_fields(ref: RunRef | None, step: str | None = None, attempt: int | None = None) -> dict[str, Any]:
    """Return the `LOG_FIELDS` of a record. Those that are not known are None."""
    run = (None, None, None) if ref is None else (ref.workflow, ref.instance_id, ref.run_number)
    return dict(zip(LOG_FIELDS, (*run, step, attempt), strict=True))


@dataclass(frozen=True, slots=True)
class DueRun:
    """A run that is due, and the queue for its dispatch message."""

    ref: RunRef
    queue: str


class OutboxKind(StrEnum):
    """The kinds of message in the outbox."""

    TASK = "task"
    EVENT = "event"


@dataclass(frozen=True, slots=True)
class OutboxMessage:
    """A Celery task or a named outbound event, to be sent after the transaction that wrote it has committed.

    ``id`` stays the same if the message is sent again. ``body`` is JSON text: the args, kwargs and options of a task,
    or the payload of an event.
    """

    id: str
    kind: OutboxKind
    name: str
    body: str

    @property
    def content(self) -> Any:
        """The parsed ``body``."""
        return json.loads(self.body)


@dataclass(frozen=True, slots=True)
class Parent:
    """The step that created a child instance. ``pk`` is the key of the parent instance's row.

    ``item``: the attempt of the map's item that the child does; None if the child does the whole step.
    """

    pk: int
    run_number: int
    step_key: str
    item: ItemRef | None = None

    @property
    def column(self) -> str:
        """The step's key, with the item, as the child's row has it."""
        item = self.item
        return self.step_key if item is None else f"{self.step_key}{_ITEM_SEPARATOR}{item.position}:{item.attempt}"

    @classmethod
    def read(cls, pk: int, run_number: int, column: str) -> Parent:
        """Read what `column` returns."""
        step_key, _, item = column.partition(_ITEM_SEPARATOR)
        position, _, attempt = item.partition(":")
        ref = ItemRef(pk, step_key, int(position), int(attempt)) if item else None
        return cls(pk, run_number, step_key, ref)


_ITEM_SEPARATOR = "\x1e"
"""No step's key contains it."""


@dataclass(frozen=True, slots=True)
class NewRun:
    """What there is to know of a run that no pass has started, and that continues no other run. It has no steps."""

    params: str
    created_at: datetime


@dataclass(frozen=True, slots=True)
class Claim:
    """The right of one worker to advance one run. It holds while the instance's row has this ``token`` (LAW 2)."""

    pk: int
    ref: RunRef
    token: str
    queue: str
    crash_count: int
    created_at: datetime
    claimed_at: datetime
    run_at: datetime
    parent: Parent | None = None
    sent_at: datetime | None = None
    """When the run's last dispatch message was sent. None if no message led to the claim."""
    new_run: NewRun | None = None
    """The run, if this claim is the first of a new one. Otherwise it has to be loaded."""
    max_run: timedelta | None = None
    """How long each run of this instance may take. None: as long as its workflow says."""

    @property
    def latency(self) -> timedelta:
        """How long the run was due before the worker claimed it."""
        return max(self.claimed_at - self.run_at, timedelta(0))


REPEAT_SEPARATOR = "\x1f"
"""Stands in the key of a repeated step between its name and the number of the repetition. No step name contains it, so
that the key of a repeated step never equals the name of another step."""


@dataclass(frozen=True, slots=True)
class RunningStep(Record):
    """The attempt of a step that a worker runs now.

    The worker records it when it renews its lease, at least every third of the lease's length.

    Attributes:
        step_key: The step's key.
        attempt: The number of the attempt, from 1.
        since: When the attempt started, by the database's clock.
    """

    step_key: str
    attempt: int
    since: datetime

    @property
    def name(self) -> str:
        """The step's name. A linear step's key is only its position."""
        return self.step_key.partition(REPEAT_SEPARATOR)[0]


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A step of a linear workflow, as it is inserted when a run is created."""

    name: str
    max_attempts: int | None
    timeout: timedelta | None


@dataclass(frozen=True, slots=True)
class RunPlan:
    """How to create a run: its kind and, if it is linear, all its steps and the version of their definition."""

    kind: WorkflowKind = WorkflowKind.REPLAY
    steps: tuple[PlannedStep, ...] = ()
    version: int | None = None

    def step_rows(self) -> list[StepRow]:
        """Return the rows of a new run's steps. The first step is ready; the others wait for their turn."""
        return [
            StepRow(
                str(seq),
                seq,
                step.name,
                StepType.LINEAR,
                StepStatus.LINEAR_PENDING if seq else StepStatus.READY,
                max_attempts=step.max_attempts,
                timeout=step.timeout,
            )
            for seq, step in enumerate(self.steps)
        ]


@dataclass(frozen=True, slots=True)
class LogLine:
    """A log line that the next step commit stores. ``data`` is JSON text."""

    level: LogLevel
    category: str
    message: str
    data: str | None
    step_key: str | None
    attempt: int | None
    is_replay: bool


@dataclass(frozen=True, slots=True)
class InstanceRow:
    """The row of an instance: its mutex, its claim, and when it is due."""

    pk: int
    workflow: str
    instance_id: str
    run_number: int
    status: Status
    claim_token: str | None
    claim_task_id: str | None
    claimed_by: str | None
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
    """When the last dispatch message was sent. None if no message is under way."""
    running: RunningStep | None = None
    """The step that the worker with the claim ran at its last renewal of the lease."""
    max_run: timedelta | None = None
    """How long each run may take; None: as long as the workflow says."""

    @property
    def ref(self) -> RunRef:
        """The current run."""
        return RunRef(self.workflow, self.instance_id, self.run_number)

    @property
    def is_suspended(self) -> bool:
        """Whether only a time or an event makes it due. A worker that holds a claim checks for events itself."""
        return self.status is Status.WAITING and self.claim_token is None


@dataclass(frozen=True, slots=True)
class VersionedInstance:
    """An instance's row and its version tag: opaque, unique text that every change of the instance replaces."""

    instance: InstanceRow
    tag: str


@dataclass(frozen=True, slots=True)
class Origin(Record):
    """The run that another run continues.

    Attributes:
        instance_id: The id of the earlier run's instance.
        run_number: The number of the earlier run, from 1.
        step_key: The first step that the new run does not keep. None if it keeps all finished steps.
    """

    instance_id: str
    run_number: int
    step_key: str | None = None


@dataclass(frozen=True, slots=True)
class RunRow:
    """The row of one run of an instance. ``params`` and ``output`` are JSON text."""

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
    cancel_requested_at: datetime | None = None
    """When the run was asked to stop."""


SUPPORTED_POOLS = frozenset({"prefork", "threads", "solo"})
"""The worker pools that may run workflows. Leases, timers and commits are tested only on these."""
HEARTBEAT_INTERVAL = timedelta(seconds=10)
"""How often a dispatcher or a worker writes its heartbeat."""
SILENT_AFTER = 2 * HEARTBEAT_INTERVAL
"""A process whose last heartbeat is older than this is silent."""
SWEEP_TASK = "celery_durable.sweep"
"""The id of the heartbeat that the `sweep` task writes. It belongs to no process."""
MAX_SWEEP_AGE = 3 * HEARTBEAT_INTERVAL
"""A process whose last sweep is older than this no longer counts as sweeping."""


@dataclass(frozen=True, slots=True)
class Outage:
    """What stops a dispatcher from working: a queue rejects messages or is full, or a server is unreachable.

    ``where``: the queue's name, the broker's URL without its password, or "database". ``failures``: how many tries
    failed.
    """

    what: Literal["queue", "full", "broker", "database"]
    where: str
    since: datetime
    error: str
    failures: int


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The last heartbeat of a dispatcher or of a worker."""

    id: str
    kind: Literal["dispatcher", "worker"]
    node: str
    pid: int
    queues: tuple[str, ...]
    """The queues that a worker consumes. Empty for a dispatcher that is not part of a worker."""
    workflows: tuple[str, ...]
    """The names of the workflows that are registered in the process."""
    started_at: datetime
    seen_at: datetime
    swept_at: datetime | None
    """When the process last swept. None if it has not."""
    next_sweep_at: datetime | None
    """When the process plans its next sweep. None if it plans none."""
    outages: tuple[Outage, ...] = ()
    """The failures that stop the process from working now."""
    pool: str | None = None
    """The worker's pool. None if it is unknown or the process is not a worker."""

    @property
    def runs_workflows(self) -> bool:
        """Whether the process is a worker whose pool may run workflows. A worker on another pool runs none."""
        return self.kind == "worker" and (self.pool is None or self.pool in SUPPORTED_POOLS)

    def is_silent(self, now: datetime) -> bool:
        """Whether the process has missed a heartbeat: it is frozen or dead, or cannot reach the database."""
        return now - self.seen_at >= SILENT_AFTER

    def sweeps(self, now: datetime) -> bool:
        """Whether the process swept recently."""
        return self.swept_at is not None and now - self.swept_at <= MAX_SWEEP_AGE
