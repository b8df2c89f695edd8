"""Parts of diagnoses: the common facts, commands to run, counts and durations."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from datetime import datetime
from typing import Any

from celery_durable.explain.facts import YOUR_APP, Code, Diagnosis, Facts
from celery_durable.model import Heartbeat, InstanceRow, StepRecord, format_duration, iso

_MAX_MESSAGE_LENGTH = 300


def build_diagnosis(facts: Facts, code: Code, sentence: str, *actions: str, **more: Any) -> Diagnosis:
    """Return a diagnosis with the facts that every diagnosis has, and ``more``."""
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
    """Return when a dispatcher last swept; None if no heartbeat says so."""
    return max((beat.swept_at for beat in facts.heartbeats if beat.swept_at is not None), default=None)


def instance_command(row: InstanceRow, command: str, rest: str = "") -> str:
    """Return the command that applies ``command`` to the instance."""
    target = f"{shlex.quote(row.workflow)} {shlex.quote(row.instance_id)}"
    return f"celery -A {YOUR_APP} durable {command} {target} {rest}".rstrip()


def doctor_command() -> str:
    """Return the command that checks the installation."""
    return f"celery -A {YOUR_APP} durable doctor"


def start_beat_command() -> tuple[str, ...]:
    """Return the command that starts beat, and with it a dispatcher."""
    return (f"celery -A {YOUR_APP} beat",)


def start_worker_command(facts: Facts, consumers: list[Heartbeat]) -> tuple[str, ...]:
    """Return the command that starts a worker of the instance's queue; nothing if the queue has consumers."""
    return () if consumers else (f"celery -A {YOUR_APP} worker -Q {shlex.quote(facts.instance.queue)}",)


def format_end(facts: Facts) -> str:
    """Return how long ago the run ended, with a leading space; empty if it has no end."""
    at = facts.run.completed_at
    return "" if at is None else f" {format_age(facts, at)} ago"


def format_age(facts: Facts, since: datetime) -> str:
    """Return the time since then, in its largest unit."""
    return format_duration(facts.now - since, units=1)


def format_remaining(facts: Facts, at: datetime | None) -> str:
    """Return ``in 5 min``, or ``now`` if the time has come or is unknown."""
    if at is None or at <= facts.now:
        return "now"
    return f"in {format_duration(at - facts.now)}"


def iso_or_none(at: datetime | None) -> str | None:
    """Return the time as ISO 8601 text."""
    return None if at is None else iso(at)


def shorten(message: str | None) -> str:
    """Return an error's message, cut to 300 characters."""
    text = message or ""
    return text if len(text) <= _MAX_MESSAGE_LENGTH else text[: _MAX_MESSAGE_LENGTH - 3] + "..."


def quote(name: str) -> str:
    """Return the name in double quotes."""
    return f'"{name}"'


def format_attempt_count(step: StepRecord) -> str:
    """Return ``2/6``, or ``2`` if there is no limit."""
    return f"{step.attempts}/{step.max_attempts}" if step.max_attempts else str(step.attempts)


def count_attempts(step: StepRecord) -> str:
    """Return ``1 attempt`` or ``2 attempts``."""
    return "1 attempt" if step.attempts == 1 else f"{step.attempts} attempts"


def count_times(count: int) -> str:
    """Return ``once`` or ``2 times``."""
    return "once" if count == 1 else f"{count} times"


def count_worker_deaths(count: int) -> str:
    """Return how many workers in a row died or lost their lease."""
    return "1 worker died or lost its lease" if count == 1 else f"{count} workers in a row died or lost their lease"
