"""Sleeps and waits: steps that finish at a time or when an event arrives."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from celery_durable import values
from celery_durable.model import OpenWait, StepRow, StepStatus, topic_event_type
from celery_durable.replay_state import FinishTimer, RecordNew, ReplayStep, WaitUntil
from celery_durable.runner.execution_context import ExecutionContext
from celery_durable.runner.step_commit import Committed, StepCommit
from celery_durable.runner.step_execution import StepExecution
from celery_durable.runtime import Purpose
from celery_durable.step import SleepCall, WaitCall
from celery_durable.store import run_events
from celery_durable.store.claims import GuardResult
from celery_durable.store.run_events import StoredEvent
from celery_durable.store.step_rows import StepWrite
from celery_durable.values import Codec, ValidationFailed

_NO_DEADLINE = datetime.max.replace(tzinfo=UTC)


BuildWrite = functools.partial[StepWrite]
"""`ExecutionContext.build_write` for one step, with the arguments that are the same for an event and a timeout."""


@dataclass(frozen=True, slots=True)
class WaitSpec:
    """What a step waits for, and the row to record for its event (``on_event``) or its timeout (``on_timeout``).

    ``timeout``: the length of a wait that has no row yet. A recorded wait keeps the deadline in its row.
    ``has_same_type``: the recorded row waits for this event type. ``topic``: the topic that the step waits on, if any.
    ``message_id_to_cancel``: the outbox message of the task that sends the event; it is deleted at the timeout.
    """

    event_type: str
    on_event: Callable[[StoredEvent, BuildWrite], StepWrite]
    on_timeout: Callable[[BuildWrite], StepWrite]
    timeout: timedelta = timedelta(0)
    has_same_type: bool = True
    topic: str | None = None
    message_id_to_cancel: str | None = None


class WaitSteps:
    """Advances the sleeps and waits of a pass."""

    def __init__(self, context: ExecutionContext) -> None:
        self._context = context

    def advance_sleep(self, execution: StepExecution, call: SleepCall, *, may_suspend: bool) -> None:
        """Advance a sleep.

        ``may_suspend``: no other step is waited for, so the commit of this wait may also suspend the instance.
        """
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
                self._start_sleep(execution, call, may_suspend=may_suspend)

    def _start_sleep(self, execution: StepExecution, call: SleepCall, *, may_suspend: bool) -> None:
        """Record the wake time. If it has passed already, finish the sleep at once."""
        wake_at = None if call.until is None else values.to_utc(call.until, "sleep_until")
        wake_in = (
            self.wait_duration(execution, values.parse_duration(call.duration), "sleep") if wake_at is None else None
        )
        left = (
            wake_in
            if wake_at is None
            else self.wait_duration(execution, max(wake_at - self._context.now, timedelta(0)), "sleep")
        )
        status = StepStatus.WAITING if left else StepStatus.COMPLETED
        write = self._context.build_write(execution, status, wake_at=wake_at, wake_in=wake_in)
        if left and may_suspend:
            self._context.defer_suspension(
                StepCommit([write], self._context.drain_logs(), waits_after_commit=recorded_waits)
            )
        else:
            self._context.commit_step(execution, write)

    def advance_wait(self, execution: StepExecution, call: WaitCall, *, may_suspend: bool) -> None:
        """Advance a wait for an event or a topic. ``may_suspend``: as in `advance_sleep`."""
        row, schema = execution.entry.row, Codec(call.schema)
        # Each wait on a topic gets its own event for an emission, with a type that no other wait consumes.
        event_type = topic_event_type(call.event_type, execution.entry.seq) if call.is_topic else call.event_type

        def on_timeout(build_write: BuildWrite) -> StepWrite:
            text = f"{_timeout_reason(call)} within {values.parse_duration(call.timeout)}"
            return build_write(StepStatus.ERRORED, error=("EventTimeout", text), attempts=1)

        wait = WaitSpec(
            event_type,
            on_event=lambda event, build_write: _build_event_write(build_write, execution.name, call, event, schema),
            on_timeout=on_timeout,
            timeout=self.wait_duration(execution, values.parse_duration(call.timeout), "event"),
            # A deploy may have changed the type. Then the row must change: `send_event` finds the wait by its row.
            has_same_type=row is not None and row.wait_event_type == event_type,
            topic=call.event_type if call.is_topic else None,
        )
        self.check_wait(execution, wait, may_suspend=may_suspend)

    def check_wait(self, execution: StepExecution, wait: WaitSpec, *, may_suspend: bool) -> None:
        """Record the event if it has arrived, or the timeout if it has passed; otherwise keep waiting."""
        row, commit_id, event_type = execution.entry.row, self._context.env.runtime.new_token(), wait.event_type

        def deadline(guard_result: GuardResult) -> datetime:
            return row.wake_at if row is not None and row.wake_at is not None else guard_result.now + wait.timeout

        def write(guard_result: GuardResult, event: StoredEvent | None) -> list[StepWrite]:
            until = deadline(guard_result)
            build_write = functools.partial(
                self._context.build_write, execution, wake_at=until, event_type=event_type, commit_id=commit_id
            )
            if event is None and until > guard_result.now:
                return [] if wait.has_same_type else [build_write(StepStatus.WAITING)]
            write_row = wait.on_timeout(build_write) if event is None else wait.on_event(event, build_write)
            return [
                write_row,
                *(self._context.build_race_writes(execution, commit_id) if write_row.is_finished else ()),
            ]

        def commit(*, suspends: bool) -> Committed:
            return self._context.committer.commit_wait(
                event_type=event_type,
                topic=wait.topic,
                deadline=deadline,
                write=write,
                logs=self._context.drain_logs(),
                key=execution.key,
                commit_id=commit_id,
                suspends=suspends,
                message_id_to_cancel=wait.message_id_to_cancel,
            )

        wake_at = None if row is None else row.wake_at
        if (wake_at is None or wake_at > self._context.now) and not self._peek_event(event_type):
            if may_suspend:
                self._context.pending_suspension = lambda: commit(suspends=True)
                return
            if wait.has_same_type and wake_at is not None:  # the suspension checks again, under the lock
                execution.wait = OpenWait(wake_at, event_type)
                return
        committed = self._context.run_or_interrupt(lambda: commit(suspends=False))
        if not committed.rows:
            assert committed.until is not None
            execution.wait = OpenWait(committed.until, event_type)
        self._context.apply_to(execution, committed)

    def wait_duration(self, execution: StepExecution, length: timedelta, purpose: Purpose) -> timedelta:
        """Return how long a step waits: ``length``, unless the runtime shortens it, for example in tests."""
        workflow = self._context.lease.claim.ref.workflow
        return self._context.env.runtime.wait_duration(length, purpose=purpose, workflow=workflow, step=execution.name)

    def _peek_event(self, event_type: str) -> bool:
        """Check for an event without the lock. If there is one, the pass records it now and continues.

        An event may arrive right after this check. The commit that suspends the instance checks again under the lock.
        """
        claim = self._context.lease.claim
        check = self._context.env.store.transact
        found = self._context.run_or_interrupt(
            lambda: check(
                lambda tx: run_events.find_oldest_event(tx, claim, event_type, deadline=_NO_DEADLINE),
                is_single_statement=True,
            )
        )
        return found is not None


def _timeout_reason(call: WaitCall) -> str:
    if call.is_topic:
        return f"Nothing was emitted to topic {call.event_type!r}"
    return f"No event {call.event_type!r} came"


def _build_event_write(
    build_write: BuildWrite, name: str, call: WaitCall, event: StoredEvent, schema: Codec
) -> StepWrite:
    try:
        schema.decode(event.payload)
    except ValidationFailed as exc:
        problems = "; ".join(f"{where}: {what}" for where, what in exc.problems[:5])
        source = "topic" if call.is_topic else "event"
        text = f"The payload of {source} {call.event_type!r} does not fit the schema of wait {name!r}: {problems}"
        return build_write(StepStatus.ERRORED, error=("EventPayloadInvalid", text), attempts=1)
    return build_write(StepStatus.COMPLETED, result=event.result_json)


def recorded_waits(rows: list[StepRow]) -> list[OpenWait]:
    """The waits of the rows that were recorded with a wake time."""
    return [OpenWait(row.wake_at, row.wait_event_type) for row in rows if row.wake_at is not None]
