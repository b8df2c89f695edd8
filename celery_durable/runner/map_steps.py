"""Maps: one step that runs a Celery task for each of its items.

The items are rows of their own (`store.items`). The process that accepts an answer sends the next item. The instance
stays suspended until all items have answered, or until a pass has to retry or fail one of them.
"""

from __future__ import annotations

import functools
import json
from datetime import datetime
from typing import Any

from celery_durable import values
from celery_durable.model import StepRow, StepStatus, task_type
from celery_durable.replay_state import AwaitAnswer, ReplayStep, RunAttempt, WaitUntil
from celery_durable.runner.branches import StepExecution
from celery_durable.runner.execution import ExecutionContext
from celery_durable.runner.remote_steps import task_name
from celery_durable.runner.step_commit import StepCommit
from celery_durable.runner.waits import WaitSteps
from celery_durable.step import MapCall
from celery_durable.store import items
from celery_durable.store.claims import GuardResult, OpenWait
from celery_durable.store.engine import Tx
from celery_durable.store.items import FailedItem, RemoteStep, RetryDecision
from celery_durable.store.step_rows import StepWrite


class MapSteps:
    """Advances the maps of a pass."""

    def __init__(self, context: ExecutionContext, waits: WaitSteps) -> None:
        self._context, self._waits = context, waits

    def map(self, branch: StepExecution, call: MapCall, *, sole: bool) -> None:
        """Advance a map: start it, or check its items."""
        match self._context.replay_state.decide_remote(branch.entry.row, now=self._context.now):
            case ReplayStep(row):
                branch.row = row
            case RunAttempt() | WaitUntil():
                self._start(branch, call, sole=sole)
            case AwaitAnswer(row):
                self._continue(branch, call, row)

    def answers(self, branch: StepExecution, row: StepRow) -> list[tuple[str, int]]:
        """The answer of each item of a finished map, and its number of attempts."""
        if row.result is not None:  # completed by hand, or read from an exported record
            return [(json.dumps(each), 1) for each in json.loads(row.result) or ()]
        claim = self._context.lease.claim
        where: dict[str, Any] = {"pk": claim.pk, "run_number": claim.ref.run_number, "step_key": branch.key}
        read = self._context.env.store.read
        found: list[tuple[str, int]] = self._context.or_interrupt(lambda: read(lambda tx: items.answers(tx, **where)))
        return found

    def _map(self, branch: StepExecution, call: MapCall) -> RemoteStep:
        claim = self._context.lease.claim
        assert branch.policy.timeout is not None
        timeout = self._waits.wait_duration(branch, branch.policy.timeout, "event")
        where = (claim.ref.workflow, claim.ref.instance_id, claim.pk, claim.ref.run_number)
        on_lost = call.on_lost or self._context.env.settings.task_on_lost
        return RemoteStep(*where, branch.key, timeout, call.max_concurrency, on_lost)

    def _start(self, branch: StepExecution, call: MapCall, *, sole: bool) -> None:
        """Record all items, and send as many as may run at the same time."""
        remote_step, limits = self._map(branch, call), self._context.env.settings.limits
        bodies = [values.encode_map_task(call.task, item, limits=limits) for item in call.items]
        if not bodies:
            self._context.commit_step(branch, self._context.build_write(branch, StepStatus.COMPLETED, attempts=1))
            return
        write = self._context.build_write(
            branch,
            StepStatus.WAITING,
            attempts=1,
            wake_in=remote_step.timeout,
            event_type=task_type(task_name(call.task), remote_step.pk, branch.entry.seq, 0),
        )

        def send(tx: Tx, _: GuardResult) -> list[StepWrite]:
            items.insert(tx, remote_step, bodies)
            step_commit.messages = items.send(tx, remote_step, room=remote_step.max_concurrency)
            return [write]

        def asleep(rows: list[StepRow]) -> list[OpenWait]:
            return [_until(remote_step, row.wake_at) for row in rows if row.wake_at is not None]

        step_commit = StepCommit([write], self._context.drain_logs(), decide=send, sleep=asleep if sole else None)
        if sole:
            self._context.defer_commit(step_commit)
            return
        self._commit(branch, remote_step, step_commit)

    def _continue(self, branch: StepExecution, call: MapCall, row: StepRow) -> None:
        """Retry or fail items, send those that are due, and finish the step if none is open; otherwise keep waiting.

        The unlocked `items.needs_pass` avoids a commit if nothing changed. The suspension checks it again under the
        lock.
        """
        remote_step = self._map(branch, call)
        assert row.wake_at is not None
        if row.wake_at > self._context.now and not self._context.or_interrupt(
            lambda: self._context.env.store.read(lambda tx: items.needs_pass(tx, remote_step, now=self._context.now))
        ):
            branch.wait = _until(remote_step, row.wake_at)
            return
        commit_id = self._context.env.runtime.new_token()
        build_write = functools.partial(
            self._context.build_write, branch, attempts=1, event_type=row.wait_event_type, commit_id=commit_id
        )

        def decide(tx: Tx, guard_result: GuardResult) -> list[StepWrite]:
            failed_items = items.failed_items(tx, remote_step, now=guard_result.now)
            items.apply_decisions(
                tx, remote_step, [self._decide_retry(branch, each, now=guard_result.now) for each in failed_items]
            )
            state = items.map_state(tx, remote_step, now=guard_result.now)
            room = None if remote_step.max_concurrency is None else remote_step.max_concurrency - state.sent
            step_commit.messages = items.send(tx, remote_step, room=room)
            state = items.map_state(tx, remote_step, now=guard_result.now)
            if state.open:
                assert state.next_at is not None
                return [build_write(StepStatus.WAITING, wake_at=state.next_at)]
            failed = None if call.return_exceptions else items.first_error(tx, remote_step)
            end = (
                build_write(StepStatus.COMPLETED)
                if failed is None
                else build_write(StepStatus.ERRORED, **_error_of_first_failure(failed))
            )
            return [end, *self._context.race_writes(branch, commit_id)]

        step_commit = StepCommit(
            [build_write(StepStatus.WAITING, wake_at=row.wake_at)], self._context.drain_logs(), decide=decide
        )
        self._commit(branch, remote_step, step_commit)

    def _decide_retry(self, branch: StepExecution, failed_items: FailedItem, *, now: datetime) -> RetryDecision:
        """Decide about an item whose attempt failed: like a body, it is retried by the policy, or fails."""
        policy, answer = branch.policy, failed_items.answer
        if answer is None:
            answer = values.answer_of_error("StepTimeout", f"no answer within {policy.timeout}")
        error = values.error_in(answer)
        is_used_up = policy.max_attempts is not None and failed_items.attempts >= policy.max_attempts
        if is_used_up or error is None or error.is_non_retryable:
            return RetryDecision(failed_items, answer, None)
        pause = self._waits.wait_duration(branch, policy.delay_after(failed_items.attempts), "retry")
        return RetryDecision(failed_items, answer, now + pause)

    def _commit(self, branch: StepExecution, remote_step: RemoteStep, step_commit: StepCommit) -> None:
        self._context.apply_to(branch, self._context.or_interrupt(lambda: self._context.committer.commit(step_commit)))
        if branch.wait is not None:
            branch.wait = _until(remote_step, branch.wait.due_at)


def _error_of_first_failure(failed: tuple[int, str, int]) -> dict[str, Any]:
    """The error and the attempts that the step's row records for the first failed item."""
    place, answer, attempts = failed
    error = values.error_in(answer)
    assert error is not None
    return {"error": values.storable_error(error.name, f"item {place}: {error.message}"), "attempts": attempts}


def _until(remote_step: RemoteStep, due_at: datetime) -> OpenWait:
    return OpenWait(due_at, is_satisfied=lambda tx, now: items.needs_pass(tx, remote_step, now=now))
