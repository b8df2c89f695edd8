"""The commands on instances. One declaration says what a command is called, requires and returns, and what it does.

The HTTP API makes its routes from them. Both programs of the command line send them, to the API or to the operations.
The docstring of a command is its description in the API.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Generic, TypeVar

from celery_durable.errors import ConfigInvalid, InstanceAlreadyExists, InstanceNotFound, ValueRefused
from celery_durable.model import CreateOptions, InstanceStatus, Permission, Status
from celery_durable.wire.requests import (
    Cancel,
    ChangeLimit,
    CreateBatch,
    CreateInstance,
    EmptyRequest,
    Fork,
    Reason,
    RequestModel,
    RestartOrCreate,
    Retry,
    Rewind,
    SendEvent,
    SetResult,
    Skip,
    Terminate,
)
from celery_durable.wire.responses import (
    Done,
    EventSent,
    ExistingInstance,
    InstanceBatch,
    InstanceItem,
    Response,
    Restarted,
    RestartOrCreateResult,
    Resumed,
    Retried,
    StepCompleted,
    Woken,
)

if TYPE_CHECKING:  # a client of the API needs neither the operations nor SQLAlchemy
    from celery_durable.all_operations import Operations

Q = TypeVar("Q", bound=RequestModel)
A = TypeVar("A", bound=Response)

INSTANCES = "/workflows/{workflowName}/instances"
INSTANCE = f"{INSTANCES}/{{instanceId}}"


@dataclass(frozen=True, slots=True)
class Target:
    """The instance that a command changes, or the workflow of which it creates one, with an empty ``instance_id``."""

    workflow: str
    instance_id: str = ""
    if_version: Collection[str] | None = None


@dataclass(frozen=True, slots=True)
class Command(Generic[Q, A]):
    """One command, with its route: the method is POST, and ``codes`` are problem codes that not every route returns."""

    name: str
    path: str
    permission: Permission
    request: type[Q]
    response: type[A]
    codes: tuple[str, ...]
    run: Callable[[Operations, Target, Q], A]

    @property
    def doc(self) -> str:
        """The description: a first line, and details."""
        return self.run.__doc__ or ""

    @property
    def is_conditional(self) -> bool:
        """Whether a request may name the version that it changes (If-Match)."""
        return "PRECONDITION_FAILED" in self.codes

    def words(self, target: Target) -> tuple[str, ...]:
        """Return the parts of the path for this target, without quoting."""
        given = {"{workflowName}": target.workflow, "{instanceId}": target.instance_id}
        return tuple(given.get(word, word) for word in self.path.split("/")[1:])


COMMANDS: dict[str, Command[RequestModel, Response]] = {}
"""The commands by name, in the order of the API's description."""


def command(
    path: str,
    permission: Permission,
    request: type[Q],
    response: type[A],
    codes: tuple[str, ...],
) -> Callable[[Callable[[Operations, Target, Q], A]], Command[Q, A]]:
    """Declare a command. Its name is that of the function, which does it."""

    def declare(run: Callable[[Operations, Target, Q], A]) -> Command[Q, A]:
        made = Command(run.__name__, path, permission, request, response, codes, run)
        COMMANDS[made.name] = made  # type: ignore[assignment]  # a route calls it with the model that it declares
        return made

    return declare


_BODY = ("BODY_TOO_LARGE", "UNSUPPORTED_ENCODING")
_CHANGE = ("INSTANCE_NOT_FOUND", "PRECONDITION_FAILED", *_BODY)
_NEW = (
    "WORKFLOW_NOT_FOUND", "INVALID_INSTANCE_ID", "NOT_SERIALIZABLE", "WORKFLOW_PARAMS_INVALID", "PAYLOAD_TOO_LARGE",
    "OUT_OF_SCOPE", "INVALID_LABEL", "TOO_MANY_LABELS", "CREATE_DISABLED", *_BODY,
)  # fmt: skip
_END = (*_CHANGE, "INSTANCE_TERMINAL", "NAME_INVALID")
_STEP = (*_CHANGE, "STEP_NOT_FOUND", "STEP_NOT_OPEN", "INSTANCE_TERMINAL", "NAME_INVALID", "VALUE_REFUSED")


# --- create ---------------------------------------------------------------------------------------


@command(
    INSTANCES,
    Permission.CREATION,
    CreateInstance,
    InstanceItem,
    (*_NEW, "INSTANCE_ID_ALREADY_EXISTS", "INSTANT_INVALID", "DURATION_INVALID", "VALUE_REFUSED"),
)
def create(operations: Operations, target: Target, body: CreateInstance) -> InstanceItem:
    """Create an instance and start it.

    An id that is in use is refused; `restart` runs an existing instance again. With `ifExists` "return", the
    response is 200 with the existing instance, which also requires the permission to read it. `ifExists` "postpone" and
    `ifRunning` require the permission to manage it, and their response is 200 with its status.
    """
    if body.run_at is not None and body.delay_ms is not None:
        raise ValueRefused("runAt and delayMs exclude each other: send one of them.")
    repeats = body.if_exists == "postpone" or body.if_running is not None
    try:
        made = operations.create.instance(
            target.workflow,
            body.params,
            id=body.id,
            if_exists="postpone" if body.if_exists == "postpone" else "error",
            if_running=body.if_running,
            run_at=_duration(body.delay_ms) if body.run_at is None else body.run_at,
            at_latest=_duration(body.at_latest_ms),
            max_run=_duration(body.max_run_ms),
            labels=body.labels,
        )
    except InstanceAlreadyExists as taken:
        if body.if_exists != "return" or body.id is None:
            raise
        try:
            found = operations.queries.read(target.workflow, body.id)
        except InstanceNotFound:  # out of the caller's scope
            raise taken from None
        return ExistingInstance(id=body.id, details=InstanceStatus(found.status))
    if repeats:
        return ExistingInstance(id=made, details=InstanceStatus(operations.queries.read(target.workflow, made).status))
    return _created(made, Status.ACTIVE if body.run_at is None and body.delay_ms is None else Status.WAITING)


def _duration(milliseconds: int | None) -> timedelta | None:
    return None if milliseconds is None else timedelta(milliseconds=milliseconds)


@command(f"{INSTANCES}/batch", Permission.CREATION, CreateBatch, InstanceBatch, (*_NEW, "BATCH_TOO_LARGE"))
def create_batch(operations: Operations, target: Target, body: CreateBatch) -> InstanceBatch:
    """Create several instances at once.

    Existing and repeated ids are skipped and are not in the response. One invalid item refuses the whole batch.
    """
    batch = [CreateOptions(each.id, each.params, each.labels) for each in body.instances]
    return InstanceBatch(instances=[_created(each) for each in operations.create.batch(target.workflow, batch)])


def _created(instance_id: str, status: Status = Status.ACTIVE) -> InstanceItem:
    return InstanceItem(id=instance_id, details=InstanceStatus(status))


# --- pause, resume, wake, end ---------------------------------------------------------------------


@command(f"{INSTANCE}/pause", Permission.MANAGEMENT, EmptyRequest, Done, (*_CHANGE, "INSTANCE_TERMINAL"))
def pause(operations: Operations, target: Target, _: EmptyRequest) -> Done:
    """Pause an instance at its next step boundary.

    Timers and deadlines continue.
    """
    operations.lifecycle.pause(target.workflow, target.instance_id, if_version=target.if_version)
    return Done(ok=True)


@command(f"{INSTANCE}/resume", Permission.MANAGEMENT, EmptyRequest, Resumed, _CHANGE)
def resume(operations: Operations, target: Target, _: EmptyRequest) -> Resumed:
    """Resume a paused instance.

    A requested pause is cancelled. If `wasPaused` is false, nothing was changed.
    """
    before = operations.lifecycle.resume(target.workflow, target.instance_id, if_version=target.if_version)
    return Resumed(ok=True, was_paused=before.status is Status.PAUSED or before.pause_requested)


@command(f"{INSTANCE}/wake", Permission.MANAGEMENT, EmptyRequest, Woken, (*_CHANGE, "INSTANCE_TERMINAL"))
def wake(operations: Operations, target: Target, _: EmptyRequest) -> Woken:
    """Make a worker check an instance now.

    A scheduled start happens now. A sleep, a retry delay or a wait does not end early. `woken` is false if the
    instance is paused or a worker holds it.
    """
    woken = operations.lifecycle.wake(target.workflow, target.instance_id, if_version=target.if_version)
    return Woken(ok=True, woken=woken)


@command(f"{INSTANCE}/cancel", Permission.MANAGEMENT, Cancel, Done, _END)
def cancel(operations: Operations, target: Target, body: Cancel) -> Done:
    """Ask an instance to stop, so that its workflow can clean up.

    Its next step call raises `Cancelled`, and it ends as terminated after its cleanup. A run that has done nothing yet
    ends at once, and so does an instance that is cancelled again. The name of the person is recorded.
    """
    operations.lifecycle.cancel(
        target.workflow, target.instance_id, reason=body.reason, by=body.by, if_version=target.if_version
    )
    return Done(ok=True)


@command(f"{INSTANCE}/terminate", Permission.MANAGEMENT, Terminate, Done, _END)
def terminate(operations: Operations, target: Target, body: Terminate) -> Done:
    """End an instance permanently, and its open children.

    The result of a step that is running is not recorded. The name of the person is.
    """
    operations.lifecycle.terminate(
        target.workflow,
        target.instance_id,
        reason=body.reason,
        by=body.by,
        children=body.children,
        if_version=target.if_version,
    )
    return Done(ok=True)


# --- run again ------------------------------------------------------------------------------------


@command(f"{INSTANCE}/restart", Permission.MANAGEMENT, Reason, Restarted, _CHANGE)
def restart(operations: Operations, target: Target, body: Reason) -> Restarted:
    """Start a new run of an instance, with the same parameters.

    The instance may be in any status. Prior runs stay readable.
    """
    number = operations.rewind.restart(
        target.workflow, target.instance_id, reason=body.reason, if_version=target.if_version
    )
    return Restarted(ok=True, run_number=number)


@command(
    f"{INSTANCE}/retry", Permission.MANAGEMENT, Retry, Retried, (*_CHANGE, "INSTANCE_NOT_ERRORED", "DURATION_INVALID")
)
def retry(operations: Operations, target: Target, body: Retry) -> Retried:
    """Retry the step that failed an errored instance, in a new run.

    The failed step gets fresh attempts. Steps that finished before the failure are kept. With `delayMs` the run starts
    after that time. With `family`, a failed child is retried too, and its parent waits for it again.
    """
    where, if_version = (target.workflow, target.instance_id), target.if_version
    if body.dry_run:
        found = operations.families.preview_retry(*where, family=body.family, if_version=if_version)
        return Retried(ok=True, instances=found)
    delay = None if body.delay_ms is None else timedelta(milliseconds=body.delay_ms)
    retry = operations.families.retry if body.family else operations.rewind.retry
    return Retried(ok=True, run_number=retry(*where, delay=delay, reason=body.reason, if_version=if_version))


@command(f"{INSTANCE}/rewind", Permission.MANAGEMENT, Rewind, Restarted, (*_CHANGE, "STEP_NOT_FOUND"))
def rewind(operations: Operations, target: Target, body: Rewind) -> Restarted:
    """Start a new run of an instance that continues from a step.

    It keeps the steps that finished before this step was called, and all events. The instance may be in any
    status.
    """
    number = operations.rewind.restart(
        target.workflow,
        target.instance_id,
        from_step=body.step,
        reason=body.reason,
        if_version=target.if_version,
    )
    return Restarted(ok=True, run_number=number)


@command(
    f"{INSTANCE}/fork",
    Permission.MANAGEMENT,
    Fork,
    InstanceItem,
    (
        "INSTANCE_NOT_FOUND", "OUT_OF_SCOPE", "STEP_NOT_FOUND", "INVALID_INSTANCE_ID", "INSTANCE_ID_ALREADY_EXISTS",
        "CREATE_DISABLED",
        *_BODY,
    ),
)  # fmt: skip
def fork(operations: Operations, target: Target, body: Fork) -> InstanceItem:
    """Create an instance that continues from a step of another instance.

    It also requires the permission to create the new instance. The other instance stays unchanged.
    """
    return _created(operations.rewind.fork(target.workflow, target.instance_id, body.step, id=body.id))


# --- complete a step by hand ----------------------------------------------------------------------


@command(
    f"{INSTANCE}/set-result",
    Permission.MANAGEMENT,
    SetResult,
    StepCompleted,
    (*_STEP, "NOT_SERIALIZABLE", "PAYLOAD_TOO_LARGE"),
)
def set_result(operations: Operations, target: Target, body: SetResult) -> StepCompleted:
    """Complete a step by hand, with a result.

    An open step is completed in the same run. A step that failed its instance is completed in a new run. The name
    of the person, the time and the reason are recorded.
    """
    number = operations.interventions.set_result(
        target.workflow,
        target.instance_id,
        body.step,
        body.result,
        by=body.by or "",
        reason=body.reason,
        if_version=target.if_version,
    )
    return StepCompleted(ok=True, run_number=number)


@command(f"{INSTANCE}/skip", Permission.MANAGEMENT, Skip, StepCompleted, _STEP)
def skip(operations: Operations, target: Target, body: Skip) -> StepCompleted:
    """Complete a step by hand, without a result.

    A sleep ends at once. Otherwise like set-result.
    """
    number = operations.interventions.skip(
        target.workflow,
        target.instance_id,
        body.step,
        by=body.by or "",
        reason=body.reason,
        if_version=target.if_version,
    )
    return StepCompleted(ok=True, run_number=number)


# --- start or continue from outside ---------------------------------------------------------------


@command(
    f"{INSTANCE}/restart-or-create",
    Permission.CREATION,
    RestartOrCreate,
    RestartOrCreateResult,
    (*_NEW, "INSTANCE_ID_ALREADY_EXISTS", "PRECONDITION_FAILED"),
)
def restart_or_create(operations: Operations, target: Target, body: RestartOrCreate) -> RestartOrCreateResult:
    """Restart an instance if it is in one of the given statuses, or create it if there is none.

    It requires the permissions to create and to manage the instance. An instance in another status stays
    unchanged.
    """
    started = operations.create.restart_or_create(
        target.workflow,
        body.params,
        id=target.instance_id,
        if_status=body.if_status,
        if_version=target.if_version,
        reason=body.reason,
        labels=body.labels,
    )
    return RestartOrCreateResult(
        outcome=started.outcome,
        id=started.instance_id,
        run_number=started.run_number,
        details=InstanceStatus(started.status),
    )


@command(
    f"{INSTANCE}/events",
    Permission.EVENTS,
    SendEvent,
    EventSent,
    (
        "INSTANCE_TERMINAL", "INVALID_EVENT_TYPE", "EVENT_REFUSED", "ANSWER_TOO_LATE", "ANSWER_UNCHECKED",
        "STEP_NOT_FOUND", "VALUE_REFUSED", "NAME_INVALID", "NOT_SERIALIZABLE", "PAYLOAD_TOO_LARGE", *_CHANGE,
    ),
)  # fmt: skip
def send_event(operations: Operations, target: Target, body: SendEvent) -> EventSent:
    """Send an event to an instance, or answer a question that it asks a person.

    An event is stored until the workflow waits for its type, also while the instance is paused. With `answers`, the
    payload is checked first (422), and the first answer counts (else 409).
    """
    if body.answers is None:
        accepted = operations.events.send(
            target.workflow, target.instance_id, body.type or "", body.payload, id=body.id, if_version=target.if_version
        )
    elif body.type is not None or body.id is not None:
        raise ValueRefused("An answer has neither a type nor an id: leave them out, or leave out `answers`.")
    else:
        accepted = operations.asks.answer(
            target.workflow,
            target.instance_id,
            body.answers,
            body.payload,
            by=body.by or "",
            run=body.run_number,
            if_version=target.if_version,
        )
    # Only the status: a client that may send events may lack the permission to read outputs and errors.
    status = operations.queries.read(target.workflow, target.instance_id).status
    return EventSent(status=InstanceStatus(status), accepted=accepted)


# --- limits, which belong to no instance ----------------------------------------------------------


def change_limit(operations: Operations, name: str, body: ChangeLimit) -> Done:
    """Set or reset the numbers of a limit."""
    numbers = {"at_once": body.at_once, "rate": body.rate}
    given = numbers if body.reset else {key: number for key, number in numbers.items() if number is not None}
    if body.reset is any(number is not None for number in numbers.values()):
        raise ValueRefused("A limit is either set or reset: give a number to hold at once, a rate, or both; or reset.")
    try:
        operations.limits.set(name, by=body.by or "", key=body.key, **given)
    except ConfigInvalid as exc:
        raise ValueRefused(f"A limit's {exc.setting.partition('.')[2]} cannot be {exc.value!r}: {exc.remedy}.") from exc
    return Done()
