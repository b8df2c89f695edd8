"""What queries return about an instance: its status, a summary for lists, its details and its history."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import Field

from celery_durable.model.attempts import AttemptRecord
from celery_durable.model.record import Milliseconds, Record, WorkflowName
from celery_durable.model.records import AuditRecord, ErrorInfo, EventRecord, LogRecord, StepRecord
from celery_durable.model.rows import InstanceRow, Origin, RunningStep, RunRow
from celery_durable.model.states import Status

T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, slots=True)
class InstanceStatus(Record):
    """The status of an instance.

    Attributes:
        status: The `Status`.
        error: Why it failed; None unless it is errored.
        output: What the workflow returned, as JSON data; None unless it is complete.
    """

    status: Status
    error: ErrorInfo | None = None
    output: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceSummary(Record):
    """An instance in a list.

    Attributes:
        id: The instance's id.
        workflow: The workflow's name.
        run_number: The number of the current run, from 1.
        details: The `Status`, and why it failed if it is errored.
        run_at: When it is due to start or to continue; None if no time is set.
        created_at: When it was created.
        updated_at: When it last changed.
        labels: Its labels.
        current_step: The open step that is due first, without its result; None if no step is open.
        running: The step that a worker runs; None if no worker runs one.
        worker: The name of the worker that executes the run; None if none does.
        failed_step: The key of the step whose failure ended the run; None unless a step did.
    """

    id: str
    workflow: WorkflowName
    run_number: int
    details: InstanceStatus
    run_at: datetime | None = None
    created_at: datetime
    updated_at: datetime
    labels: Mapping[str, str] = field(default_factory=dict, hash=False)
    current_step: StepRecord | None = None
    running: RunningStep | None = None
    worker: str | None = None
    failed_step: str | None = None

    @property
    def status(self) -> Status:
        """The `Status`."""
        return self.details.status

    @property
    def error(self) -> ErrorInfo | None:
        """Why it failed; None unless it is errored."""
        return self.details.error


@dataclass(frozen=True, slots=True)
class Page(Generic[T_co]):
    """Some items of a list.

    Attributes:
        items: The items.
        cursor: Pass it to get the next page. None on the last page.
    """

    items: tuple[T_co, ...]
    cursor: str | None


@dataclass(frozen=True, slots=True)
class ParentStep(Record):
    """The step of another instance that created an instance, with `Step.child` or `Step.map`.

    Attributes:
        workflow: The name of the other instance's workflow.
        instance_id: The other instance's id.
        run_number: The number of its run, from 1.
        step_key: The step's key.
        item: The position of the item in a map, from 0; None for `Step.child`.
    """

    workflow: WorkflowName
    instance_id: str
    run_number: int
    step_key: str
    item: int | None = None


@dataclass(frozen=True, slots=True)
class InstanceHead:
    """An instance and one of its runs at the database's time ``now``, without the lists of the run."""

    now: datetime
    instance: InstanceRow
    run: RunRow
    labels: Mapping[str, str] = field(default_factory=dict)
    parent: ParentStep | None = None
    """The step that created the instance. None if no step did, or if the caller may not see it."""
    failed_steps: tuple[str, ...] = ()
    """The keys of the steps whose failure ended the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord(Record):
    """A run, without what happened in it.

    Attributes:
        status: The status of the instance during this run, with error or output.
        params: The parameters as JSON data.
        labels: The instance's labels now.
        instance_created_at: When the instance was created, before its first run.
        created_at: When the run was created.
        started_at: When a worker first executed it; None if none has.
        completed_at: When it ended; None if it has not.
        cancel_requested_at: When the run was asked to stop, by `cancel`; None if it was not.
        reason: Why the run was started, cancelled or terminated; None if no reason was given.
        origin: The run that this one continues; None if it started from the beginning.
        parent: The step that created the instance; None if no step did.
        max_run: How long each run of the instance may take; None: as long as the workflow says.
        audit: What people did: changes to steps by hand, and each `cancel` and `terminate` with a name.
    """

    status: Annotated[InstanceStatus, Field(alias="details")]
    params: Any = None
    labels: Mapping[str, str] = field(default_factory=dict)
    instance_created_at: datetime
    created_at: datetime
    started_at: datetime | None = None
    completed_at: datetime | None = None
    cancel_requested_at: datetime | None = None
    reason: str | None = None
    origin: Origin | None = None
    parent: ParentStep | None = None
    max_run: Annotated[Milliseconds | None, Field(alias="maxRunMs")] = None
    audit: tuple[AuditRecord, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class History(RunRecord):
    """What happened in one run. It has the attributes of `RunRecord`, too.

    Attributes:
        workflow: The workflow's name.
        instance_id: The instance's id.
        run_number: The number of the run, from 1.
        steps: In the order in which the workflow called them.
        events: In the order of arrival.
        attempts: The attempts that did not succeed, in the order of their ends. Of each step, the newest 50 are kept.
    """

    workflow: str
    instance_id: str
    run_number: int
    steps: tuple[StepRecord, ...]
    events: tuple[EventRecord, ...]
    attempts: tuple[AttemptRecord, ...] = ()


@dataclass(frozen=True, slots=True)
class RestartOrCreateResult:
    """What `Workflow.restart_or_create` did.

    Attributes:
        outcome: "created", "restarted" or "unchanged".
        instance_id: The instance's id.
        run_number: The number of its current run, from 1.
        status: Its status.
    """

    outcome: Literal["created", "restarted", "unchanged"]
    instance_id: str
    run_number: int
    status: Status


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceMeta(Record):
    """More about an instance and its current run.

    Attributes:
        workflow: The workflow's name.
        run_number: The number of the current run, from 1.
        params: The parameters of the current run.
        labels: The instance's labels.
        created_at: When it was created.
        updated_at: When it last changed.
        started_at: When a worker first executed the run; None if none has.
        completed_at: When the run ended; None if it has not.
        cancel_requested_at: When the run was asked to stop, by `cancel`; None if it was not.
        reason: Why the run was started, cancelled or terminated; None if no reason was given.
        pause_requested: Whether it pauses at the next step boundary.
        max_run: How long each run may take; None: as long as the workflow says.
        current_step: The open step that is due first. If no step is open, the last finished step, or else a planned
            step. It comes without its result.
        running: The step that a worker runs; None if no worker runs one.
        worker: The name of the worker that executes the run; None if none does.
    """

    workflow: WorkflowName
    run_number: int
    params: Any = None
    labels: Mapping[str, str] = field(default_factory=dict)
    created_at: datetime
    updated_at: datetime
    started_at: datetime | None = None
    completed_at: datetime | None = None
    cancel_requested_at: datetime | None = None
    reason: str | None = None
    pause_requested: bool
    max_run: Annotated[Milliseconds | None, Field(alias="maxRunMs")] = None
    current_step: StepRecord | None = None
    running: RunningStep | None = None
    worker: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceDetails(Record):
    """An instance and its current run, without steps and events."""

    id: str
    details: InstanceStatus
    meta: InstanceMeta


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryPage(RunRecord):
    """A run with one page of its steps, of its events, of its log lines and of its failed attempts.

    If the query did not ask for them, ``logs`` and ``attempts`` are None, and ``audit`` is empty.
    """

    run_number: int
    steps: Page[StepRecord]
    events: Page[EventRecord]
    logs: Page[LogRecord] | None = None
    attempts: Page[AttemptRecord] | None = None


@dataclass(frozen=True, slots=True)
class Published(Record):
    """A value that a run published.

    Attributes:
        value: JSON data.
        updated_at: When it was published.
    """

    value: Any = None
    updated_at: datetime = field(kw_only=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiter(Record):
    """An open wait for a topic. It times out at ``deadline``."""

    workflow: WorkflowName
    instance_id: str
    run_number: int
    step: Annotated[str, Field(alias="stepName")]
    topic: str
    opened_at: datetime
    deadline: datetime
