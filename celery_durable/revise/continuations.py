"""Continuations: what a run starts with if it continues another run. Pure functions on the rows of that run.

The code of a replay run finds its position from copies of finished steps. A linear run gets all its rows: finished
steps as copies, the others as planned when the first run started.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from datetime import datetime

from celery_durable import ancestry, values
from celery_durable.errors import StepNotFound, ValueRefused
from celery_durable.model import (
    InstanceRow,
    Origin,
    RunPlan,
    Status,
    StepRow,
    StepStatus,
    StepType,
    WorkflowKind,
)
from celery_durable.store.runs.runs import Continuation, SourceRun, StepChild


def find_step(row: InstanceRow, steps: Sequence[StepRow], key: str) -> StepRow:
    """Return a step of the current run by its key, or of a linear run by its name."""
    values.require_text("Step", key)
    is_linear = row.kind is WorkflowKind.LINEAR
    for found in (lambda step: step.step_key == key, lambda step: is_linear and step.name == key):
        if step := next(filter(found, steps), None):
            return step
    names = [step.name if is_linear else step.step_key for step in steps]
    raise StepNotFound(row.workflow, row.instance_id, row.run_number, key, ancestry.find_closest_names(key, names))


def build_continuation_before(row: InstanceRow, source: SourceRun, key: str) -> Continuation:
    """Return the continuation for a run that continues before this step."""
    step = find_step(row, source.steps, key)
    if row.kind is WorkflowKind.LINEAR:
        return _build_linear_before(row, source, step)
    kept = ancestry.select_rows_before(source.steps, step)
    return _build_continuation(
        row, source, kept, step.step_key, source.ancestry.for_continuation(ancestry.find_last_seq(kept))
    )


def build_continuation_from_failure(row: InstanceRow, source: SourceRun) -> Continuation:
    """Return the continuation for a run that retries the failed steps. They keep their step keys."""
    if row.kind is WorkflowKind.LINEAR:
        return _build_linear_from_failure(row, source)
    kept = ancestry.select_rows_for_retry(source.steps, source.failure)
    if source.failure is None:
        return _build_continuation(
            row, source, kept, None, source.ancestry.for_continuation(ancestry.find_last_seq(kept))
        )
    keys = source.failure.keys
    continuation = _build_continuation(
        row, source, kept, keys[0], source.ancestry.for_continuation(source.failure.seq, retried=keys)
    )
    return dataclasses.replace(continuation, retried=tuple(keys))


def await_children(continuation: Continuation, children: Iterable[StepChild], now: datetime) -> Continuation:
    """Return the continuation in which these steps wait for their children again, with their whole timeout.

    A terminated child cannot be retried, so its step or its item creates another one.
    """
    awaited = [each for each in children if each.instance.status is not Status.TERMINATED]
    return dataclasses.replace(
        continuation, awaited=tuple(each._replace(step=_wait_again(each.step, now)) for each in awaited)
    )


def _wait_again(step: StepRow, now: datetime) -> StepRow:
    timeout, event_type = step.timeout, step.wait_event_type
    if step.type is StepType.CHILD:
        assert step.wake_at is not None
        assert step.created_at is not None
        timeout = step.wake_at - step.created_at
    assert timeout is not None
    wake_at = now + timeout
    waiting = _reset_step(step, StepStatus.WAITING)
    return dataclasses.replace(waiting, attempts=1, wake_at=wake_at, wait_event_type=event_type)


def build_continuation_after(row: InstanceRow, source: SourceRun, step: StepRow) -> Continuation:
    """Return the continuation for a run in which an operator completes the failed ``step``."""
    continuation = build_continuation_from_failure(row, source)
    if row.kind is not WorkflowKind.LINEAR:
        return dataclasses.replace(
            continuation, retried=tuple(each for each in continuation.retried if each != step.step_key)
        )
    return dataclasses.replace(
        continuation, keys=(*continuation.keys, step.step_key), reopened=(), planned=_plan_steps(source, step.seq + 1)
    )


def has_ended_run(row: InstanceRow, source: SourceRun, step: StepRow) -> bool:
    """Whether the failure of this step ended its run as errored."""
    if row.kind is WorkflowKind.LINEAR:
        return step.status is StepStatus.DEAD
    return step.status is StepStatus.ERRORED and source.failure is not None and step.step_key in source.failure.keys


def find_current_step(steps: Iterable[StepRow]) -> StepRow | None:
    """Return the current step of a linear run: the first that is not done. None means that all are done."""
    return next((step for step in steps if step.status is not StepStatus.DONE), None)


def _build_continuation(
    row: InstanceRow, source: SourceRun, kept: Sequence[StepRow], key: str | None, ancestors: ancestry.Ancestry
) -> Continuation:
    origin, keys = Origin(row.instance_id, row.run_number, key), tuple(step.step_key for step in kept)
    cancelled_at = source.cancel_requested_us if any(step.is_cancelled for step in kept) else None
    return Continuation(row.pk, origin, keys, ancestors, row.version, cancel_requested_us=cancelled_at)


# --- linear runs --------------------------------------------------------------------------------


def _build_linear_before(row: InstanceRow, source: SourceRun, step: StepRow) -> Continuation:
    """Return the continuation in which the step and all later steps start from the beginning."""
    current = find_current_step(source.steps)
    if current is not None and current.seq < step.seq:
        raise ValueRefused(
            f"Step {step.name!r} of run {row.run_number} of instance {row.instance_id!r} of workflow {row.workflow!r} "
            f"has not been reached: the current step is {current.name!r}. Choose that step or an earlier one."
        )
    continuation = _build_linear(row, source, step.seq, key=step.step_key)
    return dataclasses.replace(continuation, planned=_plan_steps(source, step.seq))


def _build_linear_from_failure(row: InstanceRow, source: SourceRun) -> Continuation:
    """Return the continuation in which the failed step continues as last called, with fresh attempts.

    Its committed effects and its deadline are kept. If that has passed, its handler is called with the timeout again.
    """
    step = find_current_step(source.steps)
    if step is None:
        return _build_linear(row, source, len(source.steps), key=None)
    continuation = _build_linear(row, source, step.seq, key=step.step_key, retried=[step.step_key])
    reopened = dataclasses.replace(
        _reset_step(step, StepStatus.READY if step.wait_event_type is None else StepStatus.LINEAR_WAITING),
        wake_at=step.wake_at,
        wait_event_type=step.wait_event_type,
        event_seq=step.event_seq,
    )
    return dataclasses.replace(
        continuation, reopened=(reopened,), planned=_plan_steps(source, step.seq + 1, is_first_ready=False)
    )


def _build_linear(
    row: InstanceRow, source: SourceRun, seq: int, *, key: str | None, retried: Sequence[str] = ()
) -> Continuation:
    kept = [step for step in source.steps if step.seq < seq]
    continuation = _build_continuation(row, source, kept, key, source.ancestry.for_continuation(0, retried=retried))
    return dataclasses.replace(continuation, plan=RunPlan(WorkflowKind.LINEAR, version=source.definition_version))


def _plan_steps(source: SourceRun, seq: int, *, is_first_ready: bool = True) -> tuple[StepRow, ...]:
    """Return the rows from position ``seq`` on, as they were when their run started."""
    first = StepStatus.READY if is_first_ready else StepStatus.LINEAR_PENDING
    return tuple(
        _reset_step(step, first if step.seq == seq else StepStatus.LINEAR_PENDING)
        for step in source.steps
        if step.seq >= seq
    )


def _reset_step(step: StepRow, status: StepStatus) -> StepRow:
    return StepRow(
        step.step_key, step.seq, step.name, step.type, status, max_attempts=step.max_attempts, timeout=step.timeout
    )
