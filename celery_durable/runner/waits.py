"""Sleeps and waits: steps that finish at a time or when an event arrives; `check_wait` is for every such kind."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from celery_durable import values
from celery_durable.config import Settings
from celery_durable.errors import SleepTooFar
from celery_durable.errors.base import format_limit
from celery_durable.model import (
    OpenWait,
    ReceivedEvent,
    Release,
    StepRow,
    StepStatus,
    StepType,
    StepWrite,
    StoredEvent,
    from_us,
    parse_topic_event_type,
    topic_event_type,
)
from celery_durable.replay_state import FinishTimer, RecordNew, ReplayStep, WaitUntil
from celery_durable.runner.commit_parts import CommitPart, OpenCommit
from celery_durable.runner.execution_context import ExecutionContext
from celery_durable.runner.failed_attempts import choose_retry_delay
from celery_durable.runner.step_commit import Decision, StepCommit, build_suspension
from celery_durable.runner.step_execution import OtherSteps, StepExecution, decode_result
from celery_durable.runner.step_kinds import CallIdentity, StepKind, compare_duration, parse_timeout
from celery_durable.runtime import Purpose
from celery_durable.step import SleepCall, WaitCall
from celery_durable.store.engine import Tx
from celery_durable.store.events import run_events
from celery_durable.store.runs import topic_waits
from celery_durable.store.runs.claims import GuardResult
from celery_durable.values import Codec, StepPolicy, ValidationFailed

_NO_DEADLINE = datetime.max.replace(tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class WaitOutcome:
    """What becomes of a step at its event or its timeout: arguments of `build_write`, and parts of the commit."""

    status: StepStatus
    columns: Mapping[str, Any]
    parts: Sequence[CommitPart] = ()


@dataclass(frozen=True, slots=True)
class WaitSpec:
    """What a step waits for, and the outcome of its event (``on_event``) or its timeout (``on_timeout``).

    The two functions may call user code. ``timeout``: the length of a wait that has no row yet; a recorded one keeps
    its deadline. ``has_same_type``: the recorded row waits for this event type, with this ``payload_type`` and ``ask``.
    """

    event_type: str
    on_event: Callable[[StoredEvent], WaitOutcome]
    on_timeout: Callable[[], WaitOutcome]
    timeout: timedelta = timedelta(0)
    has_same_type: bool = True
    payload_type: str | None = None
    ask: str | None = None


@dataclass(frozen=True, slots=True)
class PreparedOutcome:
    """An outcome that was built without the lock: that of ``event``, or of the timeout if that is None."""

    event: StoredEvent | None
    outcome: WaitOutcome

    def is_current(self, event: StoredEvent | None, *, is_over: bool) -> bool:
        """Whether it is that of the ``event`` to consume now, or of the timeout if there is no event."""
        if event is None or self.event is None:
            return event is self.event and is_over
        return event.seq == self.event.seq


class SleepKind(StepKind[SleepCall]):
    """Steps that finish at a time: `step.sleep` and `step.sleep_until`."""

    type, call_type = StepType.SLEEP, SleepCall

    def identify(self, call: SleepCall, settings: Settings, policy: StepPolicy) -> CallIdentity:
        if call.until is None:
            return CallIdentity(call.name, values.parse_pause(call.duration, maximum=settings.max_sleep), policy)
        return CallIdentity(call.name, values.to_utc(call.until, "sleep_until"), policy)

    def check_new(self, identity: CallIdentity, settings: Settings, get_now: Callable[[], datetime]) -> None:
        # With the time of this pass, a later one could accept a call that an earlier one refused, although the
        # workflow function handled the refusal.
        if isinstance(identity.work, datetime) and identity.work - get_now() > settings.max_sleep:
            raise SleepTooFar(identity.work, settings.max_sleep)

    def advance(self, context: ExecutionContext, executions: Sequence[StepExecution], other_steps: OtherSteps) -> None:
        for execution in executions:
            match context.replay_state.decide_timer(execution.entry.row, now=context.now):
                case ReplayStep(row):
                    execution.finished_row = row
                case WaitUntil(until):
                    execution.wait = OpenWait(until)
                case FinishTimer(row):
                    write = context.build_write(execution, StepStatus.COMPLETED, wake_at=row.wake_at)
                    context.commit_step(execution, write)
                case RecordNew():
                    _start_sleep(context, execution, execution.call, other_steps)

    def decode(self, context: ExecutionContext, execution: StepExecution, row: StepRow) -> None:
        del context, execution, row

    def find_changes(
        self, execution: StepExecution, row: StepRow, settings: Settings
    ) -> Iterable[tuple[str, str, str]]:
        del settings
        call: SleepCall = execution.call
        if call.until is None:
            yield from compare_duration(row, "length", values.parse_duration(call.duration))
        elif row.wake_at is not None and values.to_utc(call.until, "sleep_until") != row.wake_at:
            yield f"instant {row.wake_at}", f"instant {call.until}", "The sleep still ends at the recorded time."


def _start_sleep(context: ExecutionContext, execution: StepExecution, call: SleepCall, other_steps: OtherSteps) -> None:
    """Record the wake time. If it has passed already, finish the sleep at once."""
    wake_at = None if call.until is None else values.to_utc(call.until, "sleep_until")
    if wake_at is None:
        left = wake_in = wait_duration(context, execution, values.parse_duration(call.duration), "sleep")
    else:
        left = wait_duration(context, execution, max(wake_at - context.now, timedelta(0)), "sleep")
        wake_in = None
    status = StepStatus.WAITING if left else StepStatus.COMPLETED
    write = context.build_write(execution, status, wake_at=wake_at, wake_in=wake_in)
    if left and other_steps is OtherSteps.NONE:
        context.suspend_with(StepCommit(write.commit_id, [write], ending=build_suspension))
    else:
        context.commit_step(execution, write)


class WaitKind(StepKind[WaitCall]):
    """Steps that finish with an event: `step.wait_for_event` and `step.wait_for_topic`."""

    type, call_type, writes_beside = StepType.WAIT, WaitCall, True

    def identify(self, call: WaitCall, settings: Settings, policy: StepPolicy) -> CallIdentity:
        _ = Codec(call.schema, what=f"The schema of wait {call.name!r}").is_typed
        if call.is_topic:
            values.check_topic(call.event_type)
        else:
            values.check_event_type(call.event_type, settings.max_event_type)
        work = call.event_type, call.is_topic, parse_timeout(call.timeout, settings)
        return CallIdentity(call.name, work, policy)

    def advance(self, context: ExecutionContext, executions: Sequence[StepExecution], other_steps: OtherSteps) -> None:
        for execution in executions:
            check_wait(context, execution, _build_wait(context, execution, execution.call), other_steps)

    def decode(self, context: ExecutionContext, execution: StepExecution, row: StepRow) -> ReceivedEvent[Any]:
        with context.lease.user_code():
            return _decode_event(execution.name, row, Codec(execution.call.schema))

    def find_changes(
        self, execution: StepExecution, row: StepRow, settings: Settings
    ) -> Iterable[tuple[str, str, str]]:
        del settings
        call: WaitCall = execution.call
        topic = parse_topic_event_type(row.wait_event_type)
        was = f"event {row.wait_event_type!r}" if topic is None else f"topic {topic!r}"
        now = f"{'topic' if call.is_topic else 'event'} {call.event_type!r}"
        if row.wait_event_type is not None and was != now:
            yield was, now, "The wait keeps its deadline. The next pass changes what it waits for."
        yield from compare_duration(row, "timeout", values.parse_duration(call.timeout))

    def prepare_write(self, commit: OpenCommit, write: StepWrite) -> None:
        topic = None if write.event_type is None else parse_topic_event_type(write.event_type)
        if write.status is StepStatus.CANCELLED or (topic is not None and write.is_finished):
            topic_waits.close_wait(commit.tx, commit.claim, key=write.key)
        elif topic is not None:
            topic_waits.open_wait(commit.tx, commit.claim, commit.guard_result, key=write.key, topic=topic)


def _build_wait(context: ExecutionContext, execution: StepExecution, call: WaitCall) -> WaitSpec:
    row, schema = execution.entry.row, Codec(call.schema)
    # Each wait on a topic gets its own event for an emission, with a type that no other wait consumes.
    event_type = topic_event_type(call.event_type, execution.entry.seq) if call.is_topic else call.event_type

    payload_type = values.name_class(call.schema) if call.schema_error == "refuse" and not call.is_topic else None
    ask = None if call.ask is None else values.encode_ask(call.ask, call.to, schema.json_schema)

    def on_timeout() -> WaitOutcome:
        text = f"{_timeout_reason(call)} within {format_limit(values.parse_duration(call.timeout))}"
        return WaitOutcome(StepStatus.ERRORED, {"error": ("EventTimeout", text), "attempts": 1})

    return WaitSpec(
        event_type,
        on_event=lambda event: _check_payload(execution.name, call, event, schema),
        on_timeout=on_timeout,
        timeout=wait_duration(context, execution, values.parse_duration(call.timeout), "event"),
        # A deploy may have changed the types. Then the row must change: `send_event` finds the wait by its row.
        has_same_type=row is not None
        and (row.wait_event_type, row.payload_type, row.ask) == (event_type, payload_type, ask),
        payload_type=payload_type,
        ask=ask,
    )


# --- for every kind that waits for an event -----------------------------------------------------


def check_wait(context: ExecutionContext, execution: StepExecution, wait: WaitSpec, other_steps: OtherSteps) -> None:
    """Record the event if it has arrived, or the timeout if it has passed; otherwise keep waiting.

    User code runs before the commit, which locks the instance and may be repeated. If something else has come by then,
    such as an answer at the last moment, the run keeps waiting. The commit that ends the pass finds that the wait is
    over, under the lock, and the next pass records it.
    """
    row, key, commit_id = execution.entry.row, execution.key, next(context.lease.commit_ids)
    wake_at = None if row is None else row.wake_at
    prepared = _prepare_outcome(context, key, wait, wake_at)

    def decide(tx: Tx, guard_result: GuardResult) -> Decision:
        """Decide under the lock what to record: the prepared outcome, a new wait, or nothing."""
        until = guard_result.now + wait.timeout if wake_at is None else wake_at
        build_write = functools.partial(
            context.build_write, execution, wake_at=until, event_type=wait.event_type, ask=wait.ask, commit_id=commit_id
        )
        if prepared is not None:
            event = run_events.find_oldest_event(tx, context.claim, wait.event_type, key=key, deadline=until)
            if prepared.is_current(event, is_over=until <= guard_result.now):
                if event is not None:
                    run_events.consume(tx, context.claim, guard_result, event, key=key)
                write = build_write(prepared.outcome.status, **prepared.outcome.columns)
                return Decision([write, *context.build_race_writes(execution, write)], prepared.outcome.parts)
        if wait.has_same_type:
            return Decision()
        return Decision([build_write(StepStatus.WAITING, payload_type=wait.payload_type)])

    def find_ending(rows: Sequence[StepRow]) -> Release:
        """Suspend the run until the wait ends. If it has ended after the unlocked check, the run is due now."""
        if rows or wake_at is None:
            return build_suspension(rows)
        return Release([OpenWait(wake_at, wait.event_type)])

    step_commit = StepCommit(commit_id, decide=decide)
    if prepared is None:
        if other_steps is OtherSteps.NONE:
            step_commit.ending = find_ending
            context.suspend_with(step_commit)
            return
        if wait.has_same_type and wake_at is not None:
            execution.wait = OpenWait(wake_at, wait.event_type)
            return
    context.commit(step_commit, execution)


def _prepare_outcome(
    context: ExecutionContext, key: str, wait: WaitSpec, wake_at: datetime | None
) -> PreparedOutcome | None:
    """Build the outcome of the event if there is one, or of the timeout if it has passed; None: the wait is open."""
    event = _find_event(context, key, wait.event_type, _NO_DEADLINE if wake_at is None else wake_at)
    is_open = wake_at > context.now if wake_at is not None else wait.timeout > timedelta(0)
    if event is None and is_open:
        return None
    with context.lease.user_code():
        return PreparedOutcome(event, wait.on_timeout() if event is None else wait.on_event(event))


def wait_duration(
    context: ExecutionContext, execution: StepExecution, length: timedelta, purpose: Purpose
) -> timedelta:
    """Return how long a step waits: ``length``, unless the runtime shortens it, for example in tests."""
    workflow = context.lease.claim.ref.workflow
    return context.env.runtime.wait_duration(length, purpose=purpose, workflow=workflow, step=execution.name)


def retry_delay(
    context: ExecutionContext, execution: StepExecution, attempt: int, failure: tuple[str, str]
) -> timedelta:
    """Return how long a step waits after a failed attempt; raises RetryDelayInvalid."""
    env, workflow = context.env, context.lease.claim.ref.workflow
    return choose_retry_delay(
        env, execution.policy, workflow=workflow, step=execution.name, attempt=attempt, failure=failure
    )


def _find_event(context: ExecutionContext, key: str, event_type: str, deadline: datetime) -> StoredEvent | None:
    """Find the event that the wait would consume, without the lock."""
    claim = context.lease.claim
    run_statement = context.env.store.run_statement
    event: StoredEvent | None = context.run_or_interrupt(
        lambda: run_statement(
            lambda tx: run_events.find_oldest_event(tx, claim, event_type, key=key, deadline=deadline)
        )
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


def _decode_event(step: str, row: StepRow, schema: Codec) -> ReceivedEvent[Any]:
    event = Codec().decode(row.result or "null")
    payload = event["payload"]
    if schema.is_typed:
        payload = decode_result(
            step, schema, values.encode(payload, what="Event payload", limits=values.ALREADY_CHECKED_LIMITS)
        )
    return ReceivedEvent(type=event["type"], payload=payload, timestamp=from_us(event["at"]), by=event.get("by"))
