"""Map steps: one step that runs a Celery task for each item of a list.

Each item is a row of its own (`store.runs.items`). The process that accepts the answer of one item sends the next item.
The instance stays suspended until all items have answered, or until a pass must retry or fail one of them.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from celery_durable import values
from celery_durable.errors import PayloadTooLarge, RetryDelayInvalid
from celery_durable.errors.base import format_limit
from celery_durable.model import (
    FailedItem,
    ItemRef,
    OpenWait,
    Release,
    RetryDecision,
    StepRow,
    StepStatus,
    TaskSendingStep,
    task_event_type,
    task_id,
)
from celery_durable.replay_state import AwaitAnswer, ReplayStep, RunAttempt, WaitUntil
from celery_durable.runner.execution_context import ExecutionContext
from celery_durable.runner.failed_attempts import FailedAttempt, record_task_timeout
from celery_durable.runner.remote_steps import find_task_name
from celery_durable.runner.step_commit import Decision, StepCommit
from celery_durable.runner.step_execution import OtherSteps, StepExecution
from celery_durable.runner.waits import WaitSteps
from celery_durable.step import MapCall
from celery_durable.store.engine import Tx
from celery_durable.store.runs import items
from celery_durable.store.runs.claims import GuardResult


@dataclass(frozen=True, slots=True)
class _ItemOutcome:
    """What becomes of a failed item: it is retried after ``pause``, or given up if that is None."""

    answer: str
    pause: timedelta | None
    failures: Sequence[FailedAttempt]

    def build_decision(self, item: FailedItem, now: datetime) -> RetryDecision:
        return RetryDecision(item, self.answer, None if self.pause is None else now + self.pause)


class MapSteps:
    """Advances the map steps of a pass."""

    def __init__(self, context: ExecutionContext, waits: WaitSteps) -> None:
        self._context, self._waits = context, waits

    def advance(self, execution: StepExecution, call: MapCall, other_steps: OtherSteps) -> None:
        """Advance a map step: send its items, or check them."""
        match self._context.replay_state.decide_remote(execution.entry.row, now=self._context.now):
            case ReplayStep(row):
                execution.finished_row = row
            case RunAttempt() | WaitUntil():
                self._start(execution, call, other_steps)
            case AwaitAnswer(row):
                self._check_items(execution, call, row)

    def read_item_answers(self, execution: StepExecution, row: StepRow) -> list[tuple[str, int]]:
        """Return the answer of each item of a finished map step, and the number of its attempts."""
        if row.result is not None:  # completed with set-result, or read from an export
            return [(json.dumps(each), 1) for each in json.loads(row.result) or ()]
        claim = self._context.claim
        step_fields: dict[str, Any] = {"pk": claim.pk, "run_number": claim.ref.run_number, "step_key": execution.key}
        read = self._context.env.store.read
        answers: list[tuple[str, int]] = self._context.run_or_interrupt(
            lambda: read(lambda tx: items.read_answers(tx, **step_fields))
        )
        return answers

    def _build_map_step(self, execution: StepExecution, call: MapCall) -> TaskSendingStep:
        claim = self._context.claim
        assert execution.policy.timeout is not None
        timeout = self._waits.wait_duration(execution, execution.policy.timeout, "event")
        instance_fields = (claim.ref.workflow, claim.ref.instance_id, claim.pk, claim.ref.run_number)
        on_lost = call.on_lost or self._context.env.settings.task_on_lost
        return TaskSendingStep(*instance_fields, execution.key, timeout, call.max_concurrency, on_lost)

    def _start(self, execution: StepExecution, call: MapCall, other_steps: OtherSteps) -> None:
        """Record all items, and send the first ones, up to ``max_concurrency``."""
        map_step, limits = self._build_map_step(execution, call), self._context.limits
        bodies = [values.encode_map_task(call.task, item, limits=limits) for item in call.items]
        if not bodies:
            self._context.commit_step(execution, self._context.build_write(execution, StepStatus.COMPLETED, attempts=1))
            return
        write = self._context.build_write(
            execution,
            StepStatus.WAITING,
            attempts=1,
            wake_in=map_step.timeout,
            event_type=task_event_type(find_task_name(call.task), map_step.pk, execution.entry.seq, 0),
        )

        def send(tx: Tx, guard_result: GuardResult) -> Decision:
            return Decision([write], items.start_map(tx, map_step, bodies, now=guard_result.now))

        def find_ending(rows: Sequence[StepRow]) -> Release:
            return Release([_wait_for_items(map_step, row.wake_at) for row in rows if row.wake_at is not None])

        step_commit = StepCommit(write.commit_id, decide=send)
        if other_steps is OtherSteps.NONE:
            step_commit.ending = find_ending
            self._context.suspend_with(step_commit)
        else:
            self._commit(execution, map_step, step_commit)

    def _check_items(self, execution: StepExecution, call: MapCall, row: StepRow) -> None:
        """Retry or fail items, and send those that are due. Finish the step if no item is open, else keep waiting.

        `MapState.needs_pass` first checks without a lock, which avoids a commit if nothing has changed. The commit that
        suspends the instance checks it again under the lock.
        """
        map_step = self._build_map_step(execution, call)
        assert row.wake_at is not None
        if row.wake_at > self._context.now and not self._context.run_or_interrupt(
            lambda: self._context.env.store.read(lambda tx: items.read_map_state(tx, map_step, now=self._context.now))
        ).needs_pass(map_step.max_concurrency):
            execution.wait = _wait_for_items(map_step, row.wake_at)
            return
        outcomes = self._prepare_outcomes(map_step, execution)
        commit_id = next(self._context.lease.commit_ids)
        build_write = functools.partial(
            self._context.build_write, execution, attempts=1, event_type=row.wait_event_type, commit_id=commit_id
        )

        def decide(tx: Tx, guard_result: GuardResult) -> Decision:
            locked_items = items.lock_failed_items(tx, map_step, now=guard_result.now)
            known = [(each, outcomes[each]) for each in locked_items if each in outcomes]
            items.apply_decisions(
                tx, map_step, [outcome.build_decision(each, guard_result.now) for each, outcome in known]
            )
            failures = [failed for _, outcome in known for failed in outcome.failures]
            state = items.read_map_state(tx, map_step, now=guard_result.now)
            messages = items.mark_ready_as_sent(tx, map_step, limit=state.room(map_step.max_concurrency))
            state = items.read_map_state(tx, map_step, now=guard_result.now)
            if not state.is_finished:
                # An item that has failed since it was read above is left to the next pass, which is due at once.
                next_at = state.next_at if len(known) == len(locked_items) else guard_result.now
                assert next_at is not None
                return Decision([build_write(StepStatus.WAITING, wake_at=next_at)], messages, failures)
            failure = self._find_failure(tx, call, map_step)
            end = build_write(StepStatus.COMPLETED) if failure is None else build_write(StepStatus.ERRORED, **failure)
            return Decision([end, *self._context.build_race_writes(execution, end)], messages, failures)

        self._commit(execution, map_step, StepCommit(commit_id, decide=decide))

    def _find_failure(self, tx: Tx, call: MapCall, map_step: TaskSendingStep) -> dict[str, Any] | None:
        """Return why a map has failed whose items have ended, as arguments of `build_write`; None if it has not."""
        first_error = None if call.return_exceptions else items.find_first_error(tx, map_step)
        if first_error is not None:
            return _error_of_first_failure(first_error)
        # Each pass of the run reads all results into memory.
        size, limit = items.measure_answers(tx, map_step), self._context.env.settings.max_map_result_bytes
        if size <= limit:
            return None
        error = PayloadTooLarge(
            f"The list of results of map {call.name!r}", size, limit, "durable_max_map_result_bytes"
        )
        return {"error": values.sanitize_error(type(error).__name__, str(error)), "attempts": 1}

    def _prepare_outcomes(self, map_step: TaskSendingStep, execution: StepExecution) -> dict[FailedItem, _ItemOutcome]:
        """Decide about the items that have failed. User code runs here, before the commit, which locks the instance."""
        read, now = self._context.env.store.read, self._context.now
        failed_items: list[FailedItem] = self._context.run_or_interrupt(
            lambda: read(lambda tx: items.read_failed_items(tx, map_step, now=now))
        )
        outcomes = {}
        for item in failed_items:
            with self._context.lease.user_code():
                answer, pause = self._choose_retry(execution, item)
                # The process that takes the answer of a failed item records that attempt.
                failures = [self._record_timeout(map_step, execution, item, answer)] if item.is_late else []
            outcomes[item] = _ItemOutcome(answer, pause, failures)
        return outcomes

    def _choose_retry(self, execution: StepExecution, item: FailedItem) -> tuple[str, timedelta | None]:
        """Return the answer of an item whose attempt failed, and the delay of its retry; None if it is not retried.

        The step's policy decides, as for the body of `step.do`: the item is retried, or it fails.
        """
        policy, answer = execution.policy, item.answer
        if answer is None:
            timeout = format_limit(policy.timeout or self._context.env.settings.max_sleep)
            answer = values.encode_error_answer("StepTimeout", f"no answer within {timeout}")
        error = values.read_answer_error(answer)
        is_used_up = policy.max_attempts is not None and item.attempts >= policy.max_attempts
        if is_used_up or error is None or error.is_non_retryable:
            return answer, None
        try:
            return answer, self._waits.retry_delay(execution, item.attempts, (error.name, error.message))
        except RetryDelayInvalid as exc:
            return values.encode_error_answer(*values.describe_error(exc)), None

    def _record_timeout(
        self, map_step: TaskSendingStep, execution: StepExecution, item: FailedItem, answer: str
    ) -> FailedAttempt:
        """Build the record of an item's attempt that has timed out."""
        error = values.read_answer_error(answer)
        assert error is not None
        ref = ItemRef(map_step.pk, map_step.step_key, item.position, item.attempts)
        return record_task_timeout(
            self._context.env,
            self._context.run,
            (error.name, error.message),
            step=execution.name,
            step_key=execution.key,
            number=item.attempts,
            task_id=task_id(ref.type, map_step.pk, map_step.run_number),
            item=item.position,
        )

    def _commit(self, execution: StepExecution, map_step: TaskSendingStep, step_commit: StepCommit) -> None:
        self._context.commit(step_commit, execution)
        if execution.wait is not None:
            execution.wait = _wait_for_items(map_step, execution.wait.due_at)


def _error_of_first_failure(first_error: tuple[int, str, int]) -> dict[str, Any]:
    """The error and the number of attempts of the first failed item, as arguments of `build_write`."""
    position, answer, attempts = first_error
    error = values.read_answer_error(answer)
    assert error is not None
    return {"error": values.sanitize_error(error.name, f"item {position}: {error.message}"), "attempts": attempts}


def _wait_for_items(map_step: TaskSendingStep, due_at: datetime) -> OpenWait:
    return OpenWait(due_at, map_step=map_step)
