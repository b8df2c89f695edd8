"""The words of diagnoses: facts that go with each, commands to type, spans of time."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from datetime import datetime
from typing import Any

from celery_durable.explain.facts import YOUR_APP, Code, Diagnosis, Facts
from celery_durable.model import Heartbeat, InstanceRow, StepRecord, format_duration, iso

_MAX_MESSAGE_LENGTH = 300


def build_diagnosis(facts: Facts, code: Code, sentence: str, *actions: str, **more: Any) -> Diagnosis:
    """A diagnosis, with what is known in any case."""
    row, now = facts.instance, facts.now
    known = {
        "now": iso(now),
        "workflow": row.workflow,
        "instance_id": row.instance_id,
        "run_number": row.run_number,
        "status": str(row.status),
        "queue": row.queue,
        "run_at": iso_or_none(row.run_at),
        "next_check_at": iso_or_none(row.next_check_at),
        "dispatch_count": row.dispatch_count,
        "sent_at": iso_or_none(row.sent_at),
        "crash_count": row.crash_count,
        "pause_requested": row.pause_requested,
        "task_id": row.claim_task_id,
        "claimed_by": row.claimed_by,
        "lease_until": iso_or_none(row.lease_until),
        "last_step": None if facts.last_step is None else facts.last_step.name,
        "last_sweep": iso_or_none(last_sweep(facts)),
        "workers": sorted({beat.node for beat in facts.heartbeats if beat.kind == "worker" and beat.is_live(now)}),
    }
    if facts.parent is not None:
        known["parent"] = asdict(facts.parent)
    return Diagnosis(code, sentence, known | more, actions)


def last_sweep(facts: Facts) -> datetime | None:
    """When a dispatcher swept last."""
    return max((beat.swept_at for beat in facts.heartbeats if beat.swept_at is not None), default=None)


def instance_command(row: InstanceRow, verb: str, rest: str = "") -> str:
    """The command that does this to the instance."""
    target = f"{shlex.quote(row.workflow)} {shlex.quote(row.instance_id)}"
    return f"celery -A {YOUR_APP} durable {verb} {target} {rest}".rstrip()


def doctor_command() -> str:
    """The command that looks at the installation."""
    return f"celery -A {YOUR_APP} durable doctor"


def start_beat_command() -> tuple[str, ...]:
    """The command that starts a dispatcher."""
    return (f"celery -A {YOUR_APP} beat",)


def start_worker_command(facts: Facts, consumers: list[Heartbeat]) -> tuple[str, ...]:
    """The command that starts a worker of its queue, where there is none."""
    return () if consumers else (f"celery -A {YOUR_APP} worker -Q {shlex.quote(facts.instance.queue)}",)


def format_end(facts: Facts) -> str:
    """How long ago the run ended, if that is known."""
    at = facts.run.completed_at
    return "" if at is None else f" {format_age(facts, at)} ago"


def format_age(facts: Facts, since: datetime) -> str:
    """How long it has been, roughly."""
    return format_duration(facts.now - since, units=1)


def format_remaining(facts: Facts, at: datetime | None) -> str:
    """How long it will be."""
    if at is None or at <= facts.now:
        return "now"
    return f"in {format_duration(at - facts.now)}"


def iso_or_none(at: datetime | None) -> str | None:
    """A time for JSON."""
    return None if at is None else iso(at)


def shorten(message: str | None) -> str:
    """An error's message, cut where it is too long for a sentence."""
    text = message or ""
    return text if len(text) <= _MAX_MESSAGE_LENGTH else text[: _MAX_MESSAGE_LENGTH - 3] + "..."


def quote(name: str) -> str:
    """A name in a sentence."""
    return f'"{name}"'


def format_attempt_count(step: StepRecord) -> str:
    """``2/6``, or ``2`` where there is no limit."""
    return f"{step.attempts}/{step.max_attempts}" if step.max_attempts else str(step.attempts)


def count_attempts(step: StepRecord) -> str:
    """How often a step was tried."""
    return "1 attempt" if step.attempts == 1 else f"{step.attempts} attempts"


def count_times(count: int) -> str:
    """How often."""
    return "once" if count == 1 else f"{count} times"


def count_worker_deaths(count: int) -> str:
    """How many workers died."""
    return "1 worker died" if count == 1 else f"{count} workers died"
