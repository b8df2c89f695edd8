"""What a run begins with that continues another: rows of that one in, a seed out. Pure, but for the errors it raises.

A function's run keeps copies of steps that settled, and its code finds the way. A linear run has no code that could:
all its rows are inserted, those that are done as copies, the others as they were planned when the first run began.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from celery_durable import lineage
from celery_durable.errors import StepNotFound, ValueRefused
from celery_durable.model import InstanceRow, Kind, Origin, Plan, StepRow, StepStatus
from celery_durable.store.runs import Seed, Source


def find_step(row: InstanceRow, steps: Sequence[StepRow], key: str) -> StepRow:
    """A step of the current run; raises StepNotFound with the nearest that there are.

    A step of a linear run is also found by its name, which no other step of the run has.
    """
    is_linear = row.kind is Kind.LINEAR
    for found in (lambda step: step.step_key == key, lambda step: is_linear and step.name == key):
        if step := next(filter(found, steps), None):
            return step
    names = [step.name if is_linear else step.step_key for step in steps]
    raise StepNotFound(row.workflow, row.instance_id, row.run_number, key, lineage.nearest(key, names))


def seed_before(row: InstanceRow, source: Source, key: str) -> Seed:
    """What a run begins with that goes on before this step; raises StepNotFound, ValueRefused."""
    step = find_step(row, source.steps, key)
    if row.kind is Kind.LINEAR:
        return _linear_before(row, source, step)
    kept = lineage.before(source.steps, step)
    return _seed(row, kept, step.step_key, source.lineage.until(lineage.last_place(kept)))


def seed_without_failure(row: InstanceRow, source: Source) -> Seed:
    """What a run begins with that tries again what ended this one. The retried steps go on under their old keys."""
    if row.kind is Kind.LINEAR:
        return _linear_from_failure(row, source)
    kept = lineage.without(source.steps, source.failure)
    if source.failure is None:
        return _seed(row, kept, None, source.lineage.until(lineage.last_place(kept)))
    keys = source.failure.keys
    seed = _seed(row, kept, keys[0], source.lineage.until(source.failure.place, carry=keys))
    return dataclasses.replace(seed, retried=tuple(keys))


def seed_after(row: InstanceRow, source: Source, step: StepRow) -> Seed:
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


def _seed(row: InstanceRow, kept: Sequence[StepRow], key: str | None, ancestors: lineage.Lineage) -> Seed:
    origin = Origin(row.instance_id, row.run_number, key)
    return Seed(row.pk, origin, tuple(step.step_key for step in kept), ancestors, row.version)


# --- linear runs --------------------------------------------------------------------------------


def _linear_before(row: InstanceRow, source: Source, step: StepRow) -> Seed:
    """The step and those behind it begin as if never called."""
    standing = stands_at(source.steps)
    if standing is not None and standing.seq < step.seq:
        raise ValueRefused(
            f"Step {step.name!r} of run {row.run_number} of instance {row.instance_id!r} of workflow {row.workflow!r} "
            f"has not had its turn: the run stands at step {standing.name!r}. Name that one, or one before it."
        )
    seed = _linear(row, source, step.seq, key=step.step_key)
    return dataclasses.replace(seed, planned=_planned(source, step.seq))


def _linear_from_failure(row: InstanceRow, source: Source) -> Seed:
    """The step that failed goes on as it was last called, with fresh attempts: what it has committed is not repeated.

    A step that waited goes on waiting until its deadline. If that has passed, its handler is told so again.
    """
    step = stands_at(source.steps)
    if step is None:
        return _linear(row, source, len(source.steps), key=None)
    seed = _linear(row, source, step.seq, key=step.step_key, carry=[step.step_key])
    resumed = dataclasses.replace(
        _as_planned(step, StepStatus.READY if step.wait_event_type is None else StepStatus.LINEAR_WAITING),
        wake_at=step.wake_at,
        wait_event_type=step.wait_event_type,
        event_seq=step.event_seq,
    )
    return dataclasses.replace(seed, resumed=(resumed,), planned=_planned(source, step.seq + 1, is_turn=False))


def _linear(row: InstanceRow, source: Source, seq: int, *, key: str | None, carry: Sequence[str] = ()) -> Seed:
    kept = [step for step in source.steps if step.seq < seq]
    seed = _seed(row, kept, key, source.lineage.until(0, carry=carry))
    return dataclasses.replace(seed, plan=Plan(Kind.LINEAR, version=source.version))


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
