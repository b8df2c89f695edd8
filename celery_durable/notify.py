"""Sends signals about what was committed, after the commit and outside any transaction, if a receiver is connected."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import datetime, timedelta
from types import MappingProxyType
from typing import Any

from celery.utils.dispatch import Signal

from celery_durable import signals
from celery_durable.model import (
    Claim,
    ReleaseOutcome,
    RunOutcome,
    RunRef,
    Status,
    StepRow,
    StepStatus,
    StepType,
    StepWrite,
)

_SIGNAL_BY_STATUS = {
    StepStatus.COMPLETED: signals.step_completed,
    StepStatus.ERRORED: signals.step_failed,
    StepStatus.WAITING: signals.step_retrying,
    StepStatus.DONE: signals.step_completed,
    StepStatus.DEAD: signals.step_failed,
    StepStatus.READY: signals.step_retrying,
}


def _send(signal: Signal, ref: RunRef, **more: Any) -> None:
    signals.send(signal, sender=ref.workflow, **_run(ref), **more)


def _run(ref: RunRef) -> dict[str, Any]:
    return {"workflow": ref.workflow, "instance_id": ref.instance_id, "run_number": ref.run_number}


# --- from clients, dispatchers and tasks --------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AcceptedEvent:
    """An event that was accepted."""

    ref: RunRef
    event_type: str
    event_id: str


def send_workflow_created(ref: RunRef, *, run_at: datetime | None = None) -> None:
    """An instance was recorded."""
    if signals.workflow_created.receivers:
        _send(signals.workflow_created, ref, run_at=run_at)


def send_workflow_restarted(ref: RunRef, *, reason: str | None) -> None:
    """A new run was created by a restart: ``ref``."""
    if signals.workflow_restarted.receivers:
        _send(signals.workflow_restarted, ref, reason=reason)


def send_workflow_terminated(ref: RunRef, *, reason: str | None) -> None:
    """A run was terminated."""
    if signals.workflow_terminated.receivers:
        _send(signals.workflow_terminated, ref, reason=reason)


def send_workflow_paused(ref: RunRef) -> None:
    """A run that no worker held was paused."""
    if signals.workflow_suspended.receivers:
        _send(signals.workflow_suspended, ref, status=Status.PAUSED.value, until=None)


def send_step_intervened(ref: RunRef, step: StepRow, *, action: str, by: str, reason: str | None) -> None:
    """A step was completed or skipped by hand; ``step``: its row before that."""
    if signals.step_intervened.receivers:
        about = {
            "step": step.name,
            "step_key": step.step_key,
            "type": step.type.value,
            "attempt": max(1, step.attempts),
        }
        _send(signals.step_intervened, ref, **about, action=action, by=by, reason=reason)


def send_event_received(event: AcceptedEvent) -> None:
    """An event was accepted."""
    if signals.event_received.receivers:
        _send(signals.event_received, event.ref, event_type=event.event_type, event_id=event.event_id)


def send_answer_refused(ref: RunRef) -> None:
    """An answer for this run was refused, because its token is not valid."""
    if signals.answer_refused.receivers:
        _send(signals.answer_refused, ref)


def send_task_lost(ref: RunRef, *, outcome: str) -> None:
    """A task of this run was lost, and was sent again or given up."""
    if signals.task_lost.receivers:
        _send(signals.task_lost, ref, outcome=outcome)


def send_pass_stalled(ref: RunRef, stalled: timedelta) -> None:
    """The claim of a pass was revoked because the pass made no progress."""
    signals.send_from_monitor(signals.pass_stalled, sender=ref.workflow, **_run(ref), stalled=stalled)


def send_consuming_resumed(acknowledgements: int) -> None:
    """A worker that had stopped consuming from Redis consumes again."""
    signals.send_from_monitor(signals.consuming_resumed, sender=None, acknowledgements=acknowledgements)


def send_sweep_done(published: int, duration: timedelta) -> None:
    """A sweep ended."""
    if signals.sweep_done.receivers:
        signals.send(signals.sweep_done, sender=None, published=published, duration=duration)


# --- from a pass --------------------------------------------------------------------------------


def send_pass_started(claim: Claim, *, is_start_recorded: bool) -> None:
    """A pass starts. It is the first of its run if no pass ended normally before, and none with its worker's death."""
    if not is_start_recorded and claim.crash_count == 0:
        if signals.workflow_started.receivers:
            _send(signals.workflow_started, claim.ref, latency=claim.latency)
    elif signals.workflow_resumed.receivers:
        _send(signals.workflow_resumed, claim.ref, latency=claim.latency, crash_count=claim.crash_count)


def send_attempt_started(claim: Claim, *, step: str, step_key: str, attempt: int, type_: StepType) -> None:
    """A body is about to be called."""
    if signals.step_started.receivers:
        _send(signals.step_started, claim.ref, step=step, step_key=step_key, type=type_.value, attempt=attempt)


def send_steps_recorded(
    claim: Claim,
    writes: Iterable[StepWrite],
    exceptions: Mapping[str | None, BaseException | None] = MappingProxyType({}),
) -> None:
    """A commit recorded these rows. Attempts counted in advance and losers of races send no signal."""
    for write in writes:
        is_body = write.type in (StepType.DO, StepType.LINEAR)
        is_lost = write.status is StepStatus.CANCELLED
        if (
            not is_body
            and signals.step_started.receivers
            and ((write.is_new and not is_lost) or _starts_task_attempt(write))
        ):
            _send(signals.step_started, claim.ref, **_step(write))
        signal = _SIGNAL_BY_STATUS.get(write.status)
        if signal is None or not signal.receivers or (signal is signals.step_retrying and not _is_retry(write)):
            continue
        more = {"duration": write.ran_for, **_step(write)}
        if signal is signals.step_retrying:
            more |= {"delay": write.retry_in}
        if signal is not signals.step_completed:
            more |= {"error_name": write.error_name, "error_message": write.error_message}
            more |= {"exception": exceptions.get(write.key)}
        _send(signal, claim.ref, **more)


def _starts_task_attempt(write: StepWrite) -> bool:
    """Whether the write records that an attempt of a Celery task was sent."""
    return write.type is StepType.TASK and write.status is StepStatus.WAITING and write.error_name is None


def _is_retry(write: StepWrite) -> bool:
    """Whether the write records a retry, and not the start of a wait or that a linear step is ready."""
    return write.type is StepType.DO or write.error_name is not None


def _step(write: StepWrite) -> dict[str, Any]:
    # The row of a linear step counts only its failed attempts, so a finished step had one more.
    attempt = write.attempts + 1 if write.status is StepStatus.DONE else max(1, write.attempts)
    return {"step": write.name, "step_key": write.key, "type": write.type.value, "attempt": attempt}


def send_workflow_suspended(claim: Claim, released: ReleaseOutcome, until: datetime | None) -> None:
    """A pass released its run."""
    if signals.workflow_suspended.receivers:
        until = None if released is ReleaseOutcome.DUE else until
        _send(signals.workflow_suspended, claim.ref, status=released.status.value, until=until)


def send_run_ended(claim: Claim, run_outcome: RunOutcome, duration: Callable[[], timedelta]) -> None:
    """A pass ended its run."""
    if run_outcome.status is Status.COMPLETE:
        if signals.workflow_completed.receivers:
            _send(signals.workflow_completed, claim.ref, duration=duration())
    elif run_outcome.status is Status.TERMINATED:
        send_workflow_terminated(claim.ref, reason=run_outcome.reason)
    elif signals.workflow_failed.receivers:
        error: dict[str, Any] = {"error_name": run_outcome.error_name, "error_message": run_outcome.error_message}
        error["exception"] = run_outcome.exception
        _send(signals.workflow_failed, claim.ref, duration=duration(), **error)


# --- context managers ---------------------------------------------------------------------------


def around_pass(claim: Claim) -> AbstractContextManager[None]:
    """The connected context managers of a pass, as one."""
    if not signals.around_pass.managers:
        return nullcontext()
    ref = claim.ref
    return signals.around_pass.around(
        workflow=ref.workflow, instance_id=ref.instance_id, run_number=ref.run_number, latency=claim.latency
    )


def around_body(claim: Claim, step: str, step_key: str, attempt: int) -> AbstractContextManager[None] | None:
    """The connected context managers of a body's call, as one; None if there are none."""
    if not signals.around_step.managers:
        return None
    ref = claim.ref
    return signals.around_step.around(
        workflow=ref.workflow,
        instance_id=ref.instance_id,
        run_number=ref.run_number,
        step=step,
        step_key=step_key,
        attempt=attempt,
    )
