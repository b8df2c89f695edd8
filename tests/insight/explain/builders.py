"""Rows and heartbeats, as `explain` gets them."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from celery_durable.insight.explain import Diagnosis, Facts, explain
from celery_durable.model import (
    Child,
    ErrorInfo,
    Heartbeat,
    InstanceHead,
    InstanceRow,
    Outage,
    RunRow,
    Status,
    StepRecord,
    StepStatus,
    StepType,
    WakeReason,
)

NOW = datetime(2030, 1, 1, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
DURABLE = "celery -A <your app> durable"


def instance(status: Status = Status.ACTIVE, **given: Any) -> InstanceRow:
    row = InstanceRow(
        pk=1,
        workflow="order",
        instance_id="o-1",
        run_number=1,
        status=status,
        claim_token=None,
        claim_task_id=None,
        claimed_by=None,
        lease_until=None,
        run_at=NOW - MINUTE,
        next_check_at=NOW + MINUTE,
        wake_reason=WakeReason.START,
        priority=1,
        dispatch_count=0,
        crash_count=0,
        pause_requested=False,
        version=1,
        queue="durable",
        created_at=NOW - MINUTE,
        updated_at=NOW - MINUTE,
    )
    return replace(row, **given)


def run(**given: Any) -> RunRow:
    return replace(RunRow(1, "{}", None, None, None, None, NOW - MINUTE, NOW - MINUTE, None, 0), **given)


def step(name: str = "charge", type_: StepType = StepType.DO, **given: Any) -> StepRecord:
    base = StepRecord(step_key=name, name=name, type=type_, status=StepStatus.WAITING, attempts=0, created_at=NOW)
    return replace(base, **given)


def worker(**given: Any) -> Heartbeat:
    beat = Heartbeat("w", "worker", "celery@a", 7, ("durable",), ("order",), NOW - MINUTE, NOW, None, None)
    return replace(beat, **given)


def dispatcher(**given: Any) -> Heartbeat:
    return replace(Heartbeat("d", "dispatcher", "beat@a", 8, (), (), NOW - MINUTE, NOW, NOW, None), **given)


REFUSED = Outage(
    "queue", "durable", NOW - 2 * MINUTE, "PreconditionFailed: (406) inequivalent arg 'x-max-priority'.", 7
)
FULL = Outage(
    "full", "durable", NOW - 2 * MINUTE, "QueueFull: 10000 or more messages wait in it (durable_queue_high_water)", 0
)
HUNG_BROKER = Outage("broker", "amqp://guest:**@mq:5672//", NOW - MINUTE, "TimeoutError: no answer within 3 s", 9)
BROKER_AWAY = Outage("broker", "redis://:**@mq:6379/0", NOW - MINUTE, "ConnectionError: refused", 60)


def told(row: InstanceRow, *, of: RunRow | None = None, **given: Any) -> Diagnosis:
    head = InstanceHead(NOW, row, of or run(), parent=given.pop("parent", None))
    return explain(Facts(head, **given))


RUNNING = {
    "claim_token": "t",
    "claim_task_id": "task-1",
    "claimed_by": "celery@a",
    "lease_until": NOW + timedelta(seconds=20),
}
ASLEEP = instance(Status.WAITING, run_at=NOW + 60 * MINUTE, next_check_at=NOW + 60 * MINUTE)
NAP = step("nap", StepType.SLEEP, wake_at=NOW + 60 * MINUTE)
WAIT = step("await approval", StepType.WAIT, wake_at=NOW + 90 * MINUTE, wait_event_type="approval")
RETRY = step(
    attempts=2, max_attempts=6, next_retry_at=NOW + MINUTE, error=ErrorInfo("ConnectionError", "the gateway is away.")
)


def task(name: str = "thumb", id_: str = "id-1", *, sent: timedelta = timedelta(0), **given: Any) -> StepRecord:
    """A step that has waited since ``sent`` ago for a Celery task, which has an hour."""
    times = {"timeout": 60 * MINUTE, "created_at": NOW - sent, "wake_at": NOW - sent + 60 * MINUTE}
    return step(name, StepType.TASK, **{**times, "attempts": 1, "task": "media.resize", "task_id": id_, **given})


CHILD = step("bill", StepType.CHILD, wake_at=NOW + 90 * MINUTE, child=Child("billing", "b 1"))
INSPECT = "celery -A <your app> inspect query_task id-1"
OUTBOX = [f"{DURABLE} outbox", f"{DURABLE} doctor"]
SEND = f"{DURABLE} send-event order o-1 approval --payload @payload.json"
OVERDUE = instance(next_check_at=NOW - timedelta(seconds=30))
BEAT, WORKER = "celery -A <your app> beat", "celery -A <your app> worker -Q durable"
