"""What a run begins with that continues another: rows of that one in, a seed out. Pure, but for the errors it raises.

A function's run keeps copies of steps that settled, and its code finds the way. A linear run has no code that could:
all its rows are inserted, those that are done as copies, the others as they were planned when the first run began.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from celery_durable import ancestry
from celery_durable.errors import StepNotFound, ValueRefused
from celery_durable.model import InstanceRow, Kind, Origin, RunPlan, StepRow, StepStatus
from celery_durable.store.runs import ForkSpec, Source


def find_step(row: InstanceRow, steps: Sequence[StepRow], key: str) -> StepRow:
    """A step of the current run; raises StepNotFound with the nearest that there are.

    A step of a linear run is also found by its name, which no other step of the run has.
    """
    is_linear = row.kind is Kind.LINEAR
    for found in (lambda step: step.step_key == key, lambda step: is_linear and step.name == key):
        if step := next(filter(found, steps), None):
            return step
    names = [step.name if is_linear else step.step_key for step in steps]
    raise StepNotFound(row.workflow, row.instance_id, row.run_number, key, ancestry.closest_names(key, names))


def seed_before(row: InstanceRow, source: Source, key: str) -> ForkSpec:
    """What a run begins with that goes on before this step; raises StepNotFound, ValueRefused."""
    step = find_step(row, source.steps, key)
    if row.kind is Kind.LINEAR:
        return _linear_before(row, source, step)
    kept = ancestry.kept_before(source.steps, step)
    return _seed(row, kept, step.step_key, source.ancestry.until(ancestry.last_seq(kept)))


def seed_without_failure(row: InstanceRow, source: Source) -> ForkSpec:
    """What a run begins with that tries again what ended this one. The retried steps go on under their old keys."""
    if row.kind is Kind.LINEAR:
        return _linear_from_failure(row, source)
    kept = ancestry.kept_for_retry(source.steps, source.failure)
    if source.failure is None:
        return _seed(row, kept, None, source.ancestry.until(ancestry.last_seq(kept)))
    keys = source.failure.keys
    seed = _seed(row, kept, keys[0], source.ancestry.until(source.failure.seq, retried=keys))
    return dataclasses.replace(seed, retried=tuple(keys))


def seed_after(row: InstanceRow, source: Source, step: StepRow) -> ForkSpec:
    """As `seed_without_failure`, with a copy of ``step``, which failed and is settled by hand in the new run."""
    seed = seed_without_failure(row, source)
    if row.kind is not Kind.LINEAR:
        return dataclasses.replace(seed, retried=tuple(each for each in seed.retried if each != step.step_key))
    return dataclasses.replace(
        seed, keys=(*seed.keys, step.step_key), resumed=(), planned=_planned(source, step.seq + 1)
    )


def ended_by(row: InstanceRow, source: Source, step: StepRow) -> bool:
    """Whether the step is one of those that ended its errored run."""
    if row.kind is Kind.LINEAR:
        return step.status is StepStatus.DEAD
    return step.status is StepStatus.ERRORED and source.failure is not None and step.step_key in source.failure.keys


def stands_at(steps: Iterable[StepRow]) -> StepRow | None:
    """The step that a linear run stands at: the first that is not done. None: all are."""
    return next((step for step in steps if step.status is not StepStatus.DONE), None)


def _seed(row: InstanceRow, kept: Sequence[StepRow], key: str | None, ancestors: ancestry.Ancestry) -> ForkSpec:
    origin = Origin(row.instance_id, row.run_number, key)
    return ForkSpec(row.pk, origin, tuple(step.step_key for step in kept), ancestors, row.version)


# --- linear runs --------------------------------------------------------------------------------


def _linear_before(row: InstanceRow, source: Source, step: StepRow) -> ForkSpec:
    """The step and those behind it begin as if never called."""
    standing = stands_at(source.steps)
    if standing is not None and standing.seq < step.seq:
        raise ValueRefused(
            f"Step {step.name!r} of run {row.run_number} of instance {row.instance_id!r} of workflow {row.workflow!r} "
            f"has not had its turn: the run stands at step {standing.name!r}. Name that one, or one before it."
        )
    seed = _linear(row, source, step.seq, key=step.step_key)
    return dataclasses.replace(seed, planned=_planned(source, step.seq))


def _linear_from_failure(row: InstanceRow, source: Source) -> ForkSpec:
    """The step that failed goes on as it was last called, with fresh attempts: what it has committed is not repeated.

    A step that waited goes on waiting until its deadline. If that has passed, its handler is told so again.
    """
    step = stands_at(source.steps)
    if step is None:
        return _linear(row, source, len(source.steps), key=None)
    seed = _linear(row, source, step.seq, key=step.step_key, retried=[step.step_key])
    resumed = dataclasses.replace(
        _as_planned(step, StepStatus.READY if step.wait_event_type is None else StepStatus.LINEAR_WAITING),
        wake_at=step.wake_at,
        wait_event_type=step.wait_event_type,
        event_seq=step.event_seq,
    )
    return dataclasses.replace(seed, resumed=(resumed,), planned=_planned(source, step.seq + 1, is_turn=False))


def _linear(row: InstanceRow, source: Source, seq: int, *, key: str | None, retried: Sequence[str] = ()) -> ForkSpec:
    kept = [step for step in source.steps if step.seq < seq]
    seed = _seed(row, kept, key, source.ancestry.until(0, retried=retried))
    return dataclasses.replace(seed, plan=RunPlan(Kind.LINEAR, version=source.version))


def _planned(source: Source, seq: int, *, is_turn: bool = True) -> tuple[StepRow, ...]:
    """The rows from ``seq`` on, as they were when their run began; ``is_turn``: the first of them is ready."""
    first = StepStatus.READY if is_turn else StepStatus.LINEAR_PENDING
    return tuple(
        _as_planned(step, first if step.seq == seq else StepStatus.LINEAR_PENDING)
        for step in source.steps
        if step.seq >= seq
    )


def _as_planned(step: StepRow, status: StepStatus) -> StepRow:
    return StepRow(
        step.step_key, step.seq, step.name, step.type, status, max_attempts=step.max_attempts, timeout=step.timeout
    )
