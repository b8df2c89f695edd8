"""Interventions: an operator completes a step by hand. Who did it, when and why is recorded."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from celery_durable import notify, values
from celery_durable.errors import InstanceTerminal, StepNotOpen, ValueRefused
from celery_durable.model import DueRun, InstanceRow, RunRef, Status, StepRow, StepStatus, StepType, StoredEvent
from celery_durable.operations.context import OperationContext, Versions
from celery_durable.revise.continuations import (
    build_continuation_after,
    find_current_step,
    find_step,
    has_ended_run,
)
from celery_durable.store.engine import Tx
from celery_durable.store.events import run_events
from celery_durable.store.instances import interventions, lifecycle
from celery_durable.store.runs import items, runs


@dataclasses.dataclass(frozen=True, slots=True)
class _Intervention:
    """A requested intervention. ``result`` is JSON text, or None for no result."""

    action: str
    result: str | None
    actor: str
    reason: str | None
    commit_id: str
    event_id: str


class InterventionOperations:
    """The operations by which an operator completes single steps."""

    def __init__(self, context: OperationContext) -> None:
        self._context = context

    def set_result(
        self,
        workflow: str,
        instance_id: str,
        step: str,
        value: Any,
        *,
        by: str,
        reason: str | None = None,
        if_version: Versions = None,
    ) -> int:
        """Complete a step with a result; a wait gets it as the payload of an event.

        The step is open, in an instance that has not ended: then its worker loses its claim. Or it ended an errored
        instance: then a new run continues, as with `retry`. A linear step gets a result even while it waits.
        """
        text = values.encode(value, what=f"Result of step {step!r}", limits=self._context.settings.limits)
        intervention = self._new_intervention("set_result", text, by, reason)
        return self._intervene(workflow, instance_id, step, intervention, if_version)

    def skip(
        self,
        workflow: str,
        instance_id: str,
        step: str,
        *,
        by: str,
        reason: str | None = None,
        if_version: Versions = None,
    ) -> int:
        """Complete a step with the result None. A sleep ends at once; otherwise as `set_result`."""
        return self._intervene(
            workflow, instance_id, step, self._new_intervention("skip", None, by, reason), if_version
        )

    def _new_intervention(self, action: str, result: str | None, by: str, reason: str | None) -> _Intervention:
        return _Intervention(
            action=action,
            result=result,
            actor=self._context.check_actor(by),
            reason=self._context.clean_reason(reason),
            commit_id=self._context.runtime.new_token(),
            event_id=self._context.runtime.new_id(),
        )

    def _intervene(
        self, workflow: str, instance_id: str, key: str, intervention: _Intervention, if_version: Versions
    ) -> int:
        step_before: StepRow | None = None
        starts_new_run = False

        def work(tx: Tx) -> tuple[int, list[DueRun]]:
            nonlocal step_before, starts_new_run
            row = self._context.lock_row(tx, workflow, instance_id, if_version)
            if row.status in (Status.COMPLETE, Status.TERMINATED):
                raise InstanceTerminal(
                    workflow, instance_id, row.status, f"{_ACTION_PHRASES[intervention.action]} a step of"
                )
            starts_new_run = row.status is Status.ERRORED
            if starts_new_run:
                row, step, due_runs = self._continue_in_new_run(tx, row, key, intervention)
            else:
                row, step, due_runs = self._take_over(tx, row, key)
            step_before = step
            _complete_step(tx, row, step, intervention)
            return row.run_number, due_runs

        def was_applied(tx: Tx) -> tuple[int, list[DueRun]] | None:
            row = self._context.lock_row(tx, workflow, instance_id)
            number = interventions.find_by_commit(tx, row, commit_id=intervention.commit_id)
            return None if number is None else (number, [DueRun(RunRef(workflow, instance_id, number), row.queue)])

        number, due_runs = self._context.store.transact(work, find_committed=was_applied)
        ref = RunRef(workflow, instance_id, number)

        def notify_and_wake() -> None:
            assert step_before is not None
            if starts_new_run:
                notify.send_workflow_restarted(ref, reason=intervention.reason)
            notify.send_step_intervened(
                ref, step_before, action=intervention.action, by=intervention.actor, reason=intervention.reason
            )
            self._context.publish_runs(due_runs)

        self._context.after_commit(notify_and_wake)
        return number

    def _take_over(self, tx: Tx, row: InstanceRow, key: str) -> tuple[InstanceRow, StepRow, list[DueRun]]:
        """Make an open step completable by the operator. A worker that runs the instance loses its claim."""
        steps = runs.read_source(tx, row).steps
        step = find_step(row, steps, key)
        if step.is_finished or step.status is StepStatus.LINEAR_PENDING:
            raise _not_open(row, steps, step)
        if row.claim_token is not None:
            interventions.subtract_started_attempts(tx, row, excluding=step.step_key)
        due = lifecycle.reclaim(tx, row, grace=self._context.grace)
        return row, step, [] if due is None else [due]

    def _continue_in_new_run(
        self, tx: Tx, row: InstanceRow, key: str, intervention: _Intervention
    ) -> tuple[InstanceRow, StepRow, list[DueRun]]:
        """Start a new run at a step that ended its run, because rows of ended runs never change."""
        source = runs.read_source(tx, row)
        step = find_step(row, source.steps, key)
        if not has_ended_run(row, source, step):
            raise _not_open(row, source.steps, step)
        continuation = build_continuation_after(row, source, step)
        due = lifecycle.restart(
            tx,
            row,
            grace=self._context.grace,
            commit_id=intervention.commit_id,
            reason=intervention.reason,
            plan=continuation.plan,
            continuation=continuation,
        )
        if step.step_key not in continuation.keys:
            runs.copy_steps(tx, continuation, [step.step_key], pk=row.pk, run_number=due.ref.run_number)
        return dataclasses.replace(row, run_number=due.ref.run_number), step, [due]


def _not_open(row: InstanceRow, steps: Sequence[StepRow], step: StepRow) -> StepNotOpen:
    current_step = find_current_step(steps) if step.status is StepStatus.LINEAR_PENDING else None
    return StepNotOpen(
        row.workflow,
        row.instance_id,
        row.run_number,
        step.name if step.type is StepType.LINEAR else step.step_key,
        step.status,
        stands_at=None if current_step is None else current_step.name,
    )


_ACTION_PHRASES = {"set_result": "set the result of", "skip": "skip"}


def _complete_step(tx: Tx, row: InstanceRow, step: StepRow, intervention: _Intervention) -> None:
    interventions.insert_audit_record(
        tx,
        row,
        step,
        action=intervention.action,
        actor=intervention.actor,
        reason=intervention.reason,
        commit_id=intervention.commit_id,
    )
    result: str | None = intervention.result or "null"
    event = None
    match step.type:
        case StepType.SLEEP:
            if intervention.result is not None:
                raise ValueRefused(f"Step {step.name!r} is a sleep and has no result. Skip it instead.")
            result = None
        case StepType.MAP:
            result = _encode_map_answers(step, intervention.result)
            items.cancel_open(tx, row.pk, row.run_number, step.step_key)
        case StepType.TASK:
            items.delete_task_item(tx, row.pk, row.run_number, step.step_key)
        case StepType.LINEAR:
            interventions.complete_linear_step(
                tx, row, step, result=intervention.result or "null", commit_id=intervention.commit_id
            )
            return
        case StepType.WAIT:
            type_, payload = step.wait_event_type or "", intervention.result or "null"
            sent = run_events.insert_event(tx, row, type_=type_, payload=payload, event_id=intervention.event_id)
            assert sent is not None
            event = StoredEvent(sent.seq, type_, payload, sent.created_at)
    interventions.complete_step(tx, row, step, event=event, result=result, commit_id=intervention.commit_id)


def _encode_map_answers(step: StepRow, result: str | None) -> str:
    """Return the result of a map as JSON text: one answer for each item. A skipped map has no answers."""
    given = [] if result is None else json.loads(result)
    if not isinstance(given, list):
        raise ValueRefused(f"Step {step.name!r} is a map: its result must be a list with one result for each item.")
    return json.dumps([{"output": each} for each in given])
