"""Sleeps and waits: steps that finish at a time or when an event arrives."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from celery_durable import values
from celery_durable.errors.base import format_limit
from celery_durable.model import OpenWait, Release, StepRow, StepStatus, StoredEvent, topic_event_type
from celery_durable.replay_state import FinishTimer, RecordNew, ReplayStep, WaitUntil
from celery_durable.runner.execution_context import ExecutionContext
from celery_durable.runner.failed_attempts import FailedAttempt
from celery_durable.runner.retry_delays import choose_retry_delay
from celery_durable.runner.step_commit import Decision, StepCommit, build_suspension
from celery_durable.runner.step_execution import OtherSteps, StepExecution
from celery_durable.runtime import Purpose
from celery_durable.step import SleepCall, WaitCall
from celery_durable.store.engine import Tx
from celery_durable.store.events import run_events
from celery_durable.store.runs import items, outbox
from celery_durable.store.runs.claims import GuardResult
from celery_durable.values import Codec, ValidationFailed

_NO_DEADLINE = datetime.max.replace(tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class WaitOutcome:
    """What becomes of a step at its event or its timeout.

    ``columns``: the other arguments of `ExecutionContext.build_write`. ``failures``: the attempts that have failed.
    """

    status: StepStatus
    columns: Mapping[str, Any]
    failures: Sequence[FailedAttempt] = ()


@dataclass(frozen=True, slots=True)
class WaitSpec:
    """What a step waits for, and the outcome of its event (``on_event``) or its timeout (``on_timeout``).

    The two functions may call user code: a schema, a function that chooses a delay, the redaction.
    ``timeout``: the length of a wait that has no row yet. A recorded wait keeps the deadline in its row.
    ``has_same_type``: the recorded row waits for this event type, with this ``payload_type``.
    ``message_id_to_cancel``: the outbox message of the task that sends the event; it is deleted at the timeout.
    """

    event_type: str
    on_event: Callable[[StoredEvent], WaitOutcome]
    on_timeout: Callable[[], WaitOutcome]
    timeout: timedelta = timedelta(0)
    has_same_type: bool = True
    message_id_to_cancel: str | None = None
    payload_type: str | None = None


@dataclass(frozen=True, slots=True)
class PreparedOutcome:
    """An outcome that was built without the lock: that of ``event``, or of the timeout if that is None."""

    event: StoredEvent | None
    outcome: WaitOutcome


class WaitSteps:
    """Advances the sleeps and waits of a pass."""

    def __init__(self, context: ExecutionContext) -> None:
        self._context = context

    def advance_sleep(self, execution: StepExecution, call: SleepCall, other_steps: OtherSteps) -> None:
        """Advance a sleep."""
        match self._context.replay_state.decide_timer(execution.entry.row, now=self._context.now):
            case ReplayStep(row):
                execution.finished_row = row
            case WaitUntil(until):
                execution.wait = OpenWait(until)
            case FinishTimer(row):
                self._context.commit_step(
                    execution, self._context.build_write(execution, StepStatus.COMPLETED, wake_at=row.wake_at)
                )
            case RecordNew():
                self._start_sleep(execution, call, other_steps)

    def _start_sleep(self, execution: StepExecution, call: SleepCall, other_steps: OtherSteps) -> None:
        """Record the wake time. If it has passed already, finish the sleep at once."""
        wake_at = None if call.until is None else values.to_utc(call.until, "sleep_until")
        if wake_at is None:
            left = wake_in = self.wait_duration(execution, values.parse_duration(call.duration), "sleep")
        else:
            left = self.wait_duration(execution, max(wake_at - self._context.now, timedelta(0)), "sleep")
            wake_in = None
        status = StepStatus.WAITING if left else StepStatus.COMPLETED
        write = self._context.build_write(execution, status, wake_at=wake_at, wake_in=wake_in)
        if left and other_steps is OtherSteps.NONE:
            self._context.suspend_with(StepCommit(write.commit_id, [write], ending=build_suspension))
        else:
            self._context.commit_step(execution, write)

    def advance_wait(self, execution: StepExecution, call: WaitCall, other_steps: OtherSteps) -> None:
        """Advance a wait for an event or a topic."""
        row, schema = execution.entry.row, Codec(call.schema)
        # Each wait on a topic gets its own event for an emission, with a type that no other wait consumes.
        event_type = topic_event_type(call.event_type, execution.entry.seq) if call.is_topic else call.event_type

        payload_type = values.name_class(call.schema) if call.schema_error == "refuse" and not call.is_topic else None

        def on_timeout() -> WaitOutcome:
            text = f"{_timeout_reason(call)} within {format_limit(values.parse_duration(call.timeout))}"
            return WaitOutcome(StepStatus.ERRORED, {"error": ("EventTimeout", text), "attempts": 1})

        wait = WaitSpec(
            event_type,
            on_event=lambda event: _check_payload(execution.name, call, event, schema),
            on_timeout=on_timeout,
            timeout=self.wait_duration(execution, values.parse_duration(call.timeout), "event"),
            # A deploy may have changed the types. Then the row must change: `send_event` finds the wait by its row.
            has_same_type=row is not None and (row.wait_event_type, row.payload_type) == (event_type, payload_type),
            payload_type=payload_type,
        )
        self.check_wait(execution, wait, other_steps)

    def check_wait(self, execution: StepExecution, wait: WaitSpec, other_steps: OtherSteps) -> None:
        """Record the event if it has arrived, or the timeout if it has passed; otherwise keep waiting.

        User code runs before the commit, which locks the instance, and it runs once although a commit may be repeated.
        If something else has come by then, such as an answer at the last moment, the run keeps waiting. The commit that
        ends the pass finds that the wait is over, under the lock, and the next pass records it.
        """
        row, commit_id = execution.entry.row, next(self._context.lease.commit_ids)
        wake_at = None if row is None else row.wake_at
        prepared = self._prepare_outcome(wait, wake_at)
        decide = functools.partial(
            self._decide_wait, execution=execution, wait=wait, prepared=prepared, commit_id=commit_id
        )
        step_commit = StepCommit(commit_id, decide=decide)
        if prepared is None:
            if other_steps is OtherSteps.NONE:
                step_commit.ending = functools.partial(_find_ending, wake_at=wake_at, event_type=wait.event_type)
                self._context.suspend_with(step_commit)
                return
            if wait.has_same_type and wake_at is not None:
                execution.wait = OpenWait(wake_at, wait.event_type)
                return
        self._context.commit(step_commit, execution)

    def _prepare_outcome(self, wait: WaitSpec, wake_at: datetime | None) -> PreparedOutcome | None:
        """Build the outcome of the event if there is one, or of the timeout if it has passed; None: the wait is open.

        ``wake_at``: the deadline in the row of the wait, if it has one.
        """
        event = self._find_event(wait.event_type, _NO_DEADLINE if wake_at is None else wake_at)
        is_open = wake_at > self._context.now if wake_at is not None else wait.timeout > timedelta(0)
        if event is None and is_open:
            return None
        with self._context.lease.user_code():
            return PreparedOutcome(event, wait.on_timeout() if event is None else wait.on_event(event))

    def _decide_wait(
        self,
        tx: Tx,
        guard_result: GuardResult,
        *,
        execution: StepExecution,
        wait: WaitSpec,
        prepared: PreparedOutcome | None,
        commit_id: str,
    ) -> Decision:
        """Decide under the lock what to record: the prepared outcome, a new wait, or nothing."""
        row, claim = execution.entry.row, self._context.claim
        until = row.wake_at if row is not None and row.wake_at is not None else guard_result.now + wait.timeout
        build_write = functools.partial(
            self._context.build_write, execution, wake_at=until, event_type=wait.event_type, commit_id=commit_id
        )
        if prepared is None or not self._is_current(tx, guard_result, wait, prepared, until):
            if wait.has_same_type:
                return Decision()
            return Decision([build_write(StepStatus.WAITING, payload_type=wait.payload_type)])
        event, outcome = prepared.event, prepared.outcome
        if event is not None:
            run_events.consume(tx, claim, guard_result, event, key=execution.key)
        elif wait.message_id_to_cancel is not None:
            outbox.delete(tx, [wait.message_id_to_cancel])
            items.delete_task_item(tx, claim.pk, claim.ref.run_number, execution.key)
        write = build_write(outcome.status, **outcome.columns)
        return Decision([write, *self._context.build_race_writes(execution, write)], failures=outcome.failures)

    def _is_current(
        self, tx: Tx, guard_result: GuardResult, wait: WaitSpec, prepared: PreparedOutcome, until: datetime
    ) -> bool:
        """Whether the prepared outcome is that of the event to consume now, or of the timeout if there is no event."""
        event = run_events.find_oldest_event(tx, self._context.claim, wait.event_type, deadline=until)
        if event is None or prepared.event is None:
            return event is prepared.event and until <= guard_result.now
        return event.seq == prepared.event.seq

    def wait_duration(self, execution: StepExecution, length: timedelta, purpose: Purpose) -> timedelta:
        """Return how long a step waits: ``length``, unless the runtime shortens it, for example in tests."""
        workflow = self._context.lease.claim.ref.workflow
        return self._context.env.runtime.wait_duration(length, purpose=purpose, workflow=workflow, step=execution.name)

    def retry_delay(self, execution: StepExecution, attempt: int, failure: tuple[str, str]) -> timedelta:
        """Return how long a step waits after a failed attempt; raises RetryDelayInvalid."""
        env, workflow = self._context.env, self._context.lease.claim.ref.workflow
        return choose_retry_delay(
            env, execution.policy, workflow=workflow, step=execution.name, attempt=attempt, failure=failure
        )

    def _find_event(self, event_type: str, deadline: datetime) -> StoredEvent | None:
        """Find the event that the wait would consume, without the lock."""
        claim = self._context.lease.claim
        run_statement = self._context.env.store.run_statement
        event: StoredEvent | None = self._context.run_or_interrupt(
            lambda: run_statement(lambda tx: run_events.find_oldest_event(tx, claim, event_type, deadline=deadline))
        )
        return event


def _timeout_reason(call: WaitCall) -> str:
    if call.is_topic:
        return f"Nothing was emitted to topic {call.event_type!r}"
    return f"No event {call.event_type!r} came"


def _check_payload(name: str, call: WaitCall, event: StoredEvent, schema: Codec) -> WaitOutcome:
    try:
        schema.decode(event.payload)
    except ValidationFailed as exc:
        problems = "; ".join(f"{where}: {what}" for where, what in exc.problems[:5])
        source = "topic" if call.is_topic else "event"
        text = f"The payload of {source} {call.event_type!r} does not fit the schema of wait {name!r}: {problems}"
        return WaitOutcome(StepStatus.ERRORED, {"error": ("EventPayloadInvalid", text), "attempts": 1})
    return WaitOutcome(StepStatus.COMPLETED, {"result": event.result_json})


def _find_ending(rows: Sequence[StepRow], *, wake_at: datetime | None, event_type: str) -> Release:
    """Suspend the run until the wait ends. If it has ended after the unlocked check, the run is due now."""
    if rows or wake_at is None:
        return build_suspension(rows)
    return Release([OpenWait(wake_at, event_type)])
