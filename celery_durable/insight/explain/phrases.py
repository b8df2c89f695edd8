"""Parts of diagnoses: the common facts, commands to run, counts and durations."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Any

from celery_durable.insight.explain.codes import YOUR_APP, Code
from celery_durable.insight.explain.facts import Diagnosis, Facts
from celery_durable.model import AttemptOutcome, Heartbeat, RunningStep, StepRecord, format_duration, iso

EXECUTION_IS_OFF = (
    "workers take no runs, because durable_execution_enabled is off. It continues when the setting is on."
)
_MAX_MESSAGE_LENGTH = 300


def build_diagnosis(facts: Facts, code: Code, sentence: str, *actions: str, **more: Any) -> Diagnosis:
    """Return a diagnosis with the facts that every diagnosis has, and ``more``."""
    row, now = facts.instance, facts.now
    live = [beat for beat in facts.heartbeats if not beat.is_silent(now)]
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
        "pause_requested": facts.is_pausing,
        "cancel_requested_at": iso_or_none(facts.run.cancel_requested_at),
        "task_id": row.claim_task_id,
        "claimed_by": row.claimed_by,
        "lease_until": iso_or_none(row.lease_until),
        "running": None
        if row.running is None
        else {"step_key": row.running.step_key, "attempt": row.running.attempt, "since": iso(row.running.since)},
        "last_step": None if facts.last_step is None else facts.last_step.name,
        "last_sweep": iso_or_none(last_sweep(facts)),
        "workers": sorted({beat.node for beat in live if beat.kind == "worker"}),
    }
    if facts.head.parent is not None:
        known["parent"] = asdict(facts.head.parent)
    return Diagnosis(code, sentence, known | more, actions)


def last_sweep(facts: Facts) -> datetime | None:
    """Return when a dispatcher last swept; None if no heartbeat says so."""
    return max((beat.swept_at for beat in facts.heartbeats if beat.swept_at is not None), default=None)


def find_consumers(facts: Facts, queue: str) -> list[Heartbeat]:
    """Return the workers that consume the queue, and have missed no heartbeat."""
    return [beat for beat in facts.heartbeats if queue in beat.queues and not beat.is_silent(facts.now)]


def find_silent_consumers(facts: Facts, queue: str) -> list[Heartbeat]:
    """Return the workers that consumed the queue, and are frozen or ended without saying so."""
    return [beat for beat in facts.heartbeats if queue in beat.queues and beat.is_silent(facts.now)]


def has_dispatcher(facts: Facts) -> bool:
    """Whether a dispatcher sweeps."""
    return any(beat.sweeps(facts.now) and not beat.is_silent(facts.now) for beat in facts.heartbeats)


def describe_missing_dispatcher(facts: Facts) -> str:
    """Return since when no dispatcher has swept, and which process should run one."""
    last = last_sweep(facts)
    frozen = [beat for beat in facts.heartbeats if beat.swept_at is not None]
    if (silence := describe_silence(facts, frozen)) is not None:
        nodes = ", ".join(sorted({beat.node for beat in frozen})[:5])
        return (
            f"The only dispatcher ({nodes}) has been silent {silence}: it is frozen or dead, or cannot reach the "
            "database. If it continues, it sends the message."
        )
    since = "No dispatcher has been seen" if last is None else f"No dispatcher has swept since {iso(last)}"
    if facts.dispatcher == "worker":
        return f"{since}, although each worker should run one (durable_dispatcher)."
    return f"{since}: is celery beat running?"


def describe_silence(facts: Facts, beats: Sequence[Heartbeat]) -> str | None:
    """Return since when all of these processes are silent; None if one is not, or if nothing is known of them."""
    if not beats or not all(beat.is_silent(facts.now) for beat in beats):
        return None
    last = max(beat.seen_at for beat in beats)
    return f"for {format_age(facts, last)}, since {iso(last)}"


def doctor_command() -> str:
    """Return the command that checks the installation."""
    return f"celery -A {YOUR_APP} durable doctor"


def start_dispatcher_command(facts: Facts) -> tuple[str, ...]:
    """Return the command that starts a dispatcher; ``doctor`` if workers should run one and do not."""
    if facts.dispatcher != "worker":
        return (f"celery -A {YOUR_APP} beat",)
    return start_worker_command(facts, find_consumers(facts, facts.instance.queue)) or (doctor_command(),)


def start_worker_command(facts: Facts, consumers: Sequence[Heartbeat]) -> tuple[str, ...]:
    """Return the command that starts a worker of the instance's queue; nothing if the queue has consumers."""
    return () if consumers else (worker_command(facts.instance.queue),)


def worker_command(queue: str) -> str:
    """Return the command that starts a worker of this queue."""
    return f"celery -A {YOUR_APP} worker -Q {shlex.quote(queue)}"


def show_limit_command(name: str, key: str) -> str:
    """Return the command that lists who holds a limit, and who waits for it."""
    return f"celery -A {YOUR_APP} durable limits show {name_limit(name, key)}"


def name_limit(name: str, key: str) -> str:
    """Return a limit, or one key of it, as the arguments of a command."""
    return shlex.join([name, *(["--key", key] if key else [])])


def inspect_worker_command(node: str) -> tuple[str, ...]:
    """Return the command that asks a worker whether it lives."""
    return (f"celery -A {YOUR_APP} inspect ping -d {shlex.quote(node)}",)


def describe_running(running: RunningStep, name: str | None, lasted: str) -> str:
    """Return ``step "report", attempt 1, for 57 s``. ``name``: of the step, if its key does not contain it."""
    return f"step {quote(name or running.name)}, attempt {running.attempt}, {lasted}"


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


def locate_error(facts: Facts, step_key: str | None) -> str:
    """Return where the last failed attempt raised its error, as a sentence after a space; empty if unknown."""
    attempt = facts.last_attempt
    if attempt is None or attempt.location is None or attempt.step_key not in (None, step_key):
        return ""
    return f" Raised at {attempt.location}."


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


def describe_worker_deaths(facts: Facts) -> str:
    """Return how many workers in a row died or lost their lease, and what is known of the last one."""
    count = facts.instance.crash_count
    dead = "1 worker died or lost its lease" if count == 1 else f"{count} workers in a row died or lost their lease"
    return f"{dead}, without finishing a step.{describe_last_death(facts)}"


def describe_last_death(facts: Facts) -> str:
    """Return how the last worker died, and which step it ran, as a sentence after a space; empty if none has died."""
    last = facts.last_attempt
    return "" if last is None or last.outcome is not AttemptOutcome.CRASHED else f" Last: {last.error.message}"
