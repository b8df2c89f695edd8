"""Explain why an instance does not move: turn facts from the database into one diagnosis for a person.

This package is pure: it uses no SQL, no Celery and no clock. Any facts have exactly one diagnosis. Only diagnoses use
heartbeats; the engine decides nothing by them.
"""

from __future__ import annotations

import difflib
from datetime import timedelta

from celery_durable.errors import StepLimitExceeded, StepNameReused, StepTypeMismatch
from celery_durable.explain.facts import YOUR_APP, Code, Diagnosis, Facts
from celery_durable.explain.phrases import (
    build_diagnosis,
    count_attempts,
    count_times,
    count_worker_deaths,
    doctor_command,
    format_age,
    format_end,
    instance_command,
    last_sweep,
    quote,
    shorten,
    start_beat_command,
    start_worker_command,
)
from celery_durable.explain.remedies import find_remedy
from celery_durable.explain.waits import explain_waiting, list_steps, waiting_steps
from celery_durable.model import Heartbeat, Outage, Status, StepStatus, format_duration, iso

__all__ = ["YOUR_APP", "Code", "Diagnosis", "Facts", "explain"]

_PUBLISH_DELAY = timedelta(seconds=5)
"""A running dispatcher publishes a due run within this time, unless the broker or a long queue prevents it."""
_JUST_NOW = timedelta(seconds=1)
_CHANGED_CODE = frozenset({StepNameReused.__name__, StepTypeMismatch.__name__})


def explain(facts: Facts) -> Diagnosis:
    """Return the diagnosis of these facts."""
    row = facts.instance
    match row.status:
        case Status.COMPLETE:
            return build_diagnosis(facts, Code.DONE, f"It completed{format_end(facts)}.")
        case Status.TERMINATED:
            why = "" if facts.run.reason is None else f": {shorten(facts.run.reason)}"
            return build_diagnosis(
                facts, Code.TERMINATED, f"It was terminated{format_end(facts)}{why}.", instance_command(row, "restart")
            )
        case Status.ERRORED:
            return _explain_failed(facts)
        case Status.PAUSED:
            sentence = f"It has been paused for {format_age(facts, row.updated_at)}; its timers keep running."
            if waiting := waiting_steps(facts):
                sentence += f" Unfinished: {list_steps(waiting)}."
            return build_diagnosis(facts, Code.PAUSED, sentence, instance_command(row, "resume"))
        case Status.ACTIVE | Status.WAITING:
            if row.claim_token is not None:
                return _explain_claimed(facts)
            if row.run_at is not None and row.run_at > facts.now:
                return explain_waiting(facts, row.run_at)
            return _explain_due(facts)


# --- ended --------------------------------------------------------------------------------------


def _explain_failed(facts: Facts) -> Diagnosis:
    run, step = facts.run, facts.last_step
    name = run.error_name or "an error"
    error = f"{name}: {shorten(run.error_message)}" if run.error_message else name
    sentence = f"It failed{format_end(facts)} with {error}"
    if step is not None and step.error is not None and step.error.name == run.error_name:
        sentence += f" (step {quote(step.name)}, {count_attempts(step)})"
    code = Code.FAILED
    if name == StepLimitExceeded.__name__:
        code = Code.STEP_LIMIT
    elif name in _CHANGED_CODE:
        code = Code.NONDETERMINISTIC
        sentence += ". The workflow's code does not match the recorded steps"
    row = facts.instance
    actions = [
        instance_command(row, "show", "--full"),
        instance_command(row, "retry"),
        instance_command(row, "restart"),
    ]
    return build_diagnosis(facts, code, f"{sentence.rstrip('.')}.", *actions)


# --- claimed by a worker ------------------------------------------------------------------------


def _explain_claimed(facts: Facts) -> Diagnosis:
    row, now = facts.instance, facts.now
    node = row.claimed_by or "a worker"
    if row.lease_until is None or row.lease_until <= now:
        since = "" if row.lease_until is None else f", which ended {format_age(facts, row.lease_until)} ago"
        sentence = f"The worker {node} stopped renewing its lease{since}. "
        if _has_dispatcher(facts):
            sentence += (
                "A dispatcher will let another worker take over; a dispatcher that has just started first waits for "
                "the length of one lease."
            )
            return build_diagnosis(facts, Code.LEASE_EXPIRED, sentence)
        return build_diagnosis(
            facts, Code.LEASE_EXPIRED, sentence + _describe_missing_dispatcher(facts), *start_beat_command()
        )
    where = f"the worker {node}, which has held it for {format_age(facts, row.updated_at)}"
    if row.pause_requested:
        sentence = f"A pause is requested; it takes effect when the running step ends, on {where}."
        return build_diagnosis(facts, Code.PAUSED, sentence, instance_command(row, "resume"))
    started = [step.name for step in facts.open_steps if step.status in (StepStatus.PENDING, StepStatus.RUNNING)]
    if started:
        doing = ("step " if len(started) == 1 else "steps ") + ", ".join(map(quote, started[:5]))
    elif facts.last_step is not None:
        doing = f"the code after step {quote(facts.last_step.name)}"
    else:
        doing = "the code before its first step"
    sentence = f"It runs {doing}, on {where}; the lease is valid for {format_duration(row.lease_until - now)}."
    if row.crash_count:
        sentence += f" Before that, {count_worker_deaths(row.crash_count)}, without finishing a step."
    seen = [beat for beat in facts.heartbeats if beat.node == node]
    if seen and not any(beat.is_live(now) for beat in seen):
        last = max(beat.seen_at for beat in seen)
        sentence += (
            f" That worker was last seen {format_age(facts, last)} ago; if it is dead, another worker takes over when "
            "the lease ends."
        )
    return build_diagnosis(facts, Code.RUNNING, sentence, instance_command(row, "logs", "--follow"))


# --- due, and not claimed -----------------------------------------------------------------------


def _explain_due(facts: Facts) -> Diagnosis:
    row, now = facts.instance, facts.now
    due_at = row.run_at or row.updated_at
    since = "It is due" if now - due_at < _JUST_NOW else f"It has been due for {format_age(facts, due_at)}"
    if row.sent_at is None and (outage := _find_outage(facts)) is not None:
        return _explain_outage(facts, since, outage)
    all_consumers = [beat for beat in facts.heartbeats if beat.is_live(now) and row.queue in beat.queues]
    consumers = [beat for beat in all_consumers if beat.runs_workflows]
    if all_consumers and not consumers:
        return _explain_unsupported_pools(facts, since, all_consumers)
    if consumers and not any(row.workflow in beat.workflows for beat in consumers):
        return _explain_unregistered(facts, since, consumers)
    missing = "" if consumers else f" Also, no worker consumes queue {row.queue!r}."
    is_overdue = row.next_check_at is not None and row.next_check_at <= now
    if is_overdue and not _has_dispatcher(facts) and (consumers or not row.dispatch_count):
        count = row.dispatch_count
        sent = f"its message was sent {count_times(count)}" if count else "no message for it has been sent"
        sentence = f"{since}, and {sent}. {_describe_missing_dispatcher(facts)}{missing}"
        return build_diagnosis(
            facts, Code.DUE_NOT_DISPATCHED, sentence, *start_beat_command(), *start_worker_command(facts, consumers)
        )
    if row.dispatch_count or (row.sent_at is not None and now - row.sent_at > _PUBLISH_DELAY):
        return _explain_unclaimed(facts, since, consumers)
    if is_overdue and row.next_check_at is not None and now - row.next_check_at > _PUBLISH_DELAY:
        sentence = (
            f"{since}, but the dispatcher sends no message for it: the broker does not answer, or queue {row.queue!r} "
            f"is longer than durable_queue_high_water.{missing}"
        )
        return build_diagnosis(
            facts, Code.DUE_NOT_DISPATCHED, sentence, *start_worker_command(facts, consumers), doctor_command()
        )
    missing = "" if consumers else f" But no worker consumes queue {row.queue!r}."
    sentence = f"{since}; a worker should claim it at any moment.{missing}"
    return build_diagnosis(facts, Code.DUE, sentence, *start_worker_command(facts, consumers))


def _find_outage(facts: Facts) -> Outage | None:
    """Return the outage that keeps dispatchers from publishing: of its queue, else of the broker or the database."""
    found = [outage for beat in facts.heartbeats if beat.is_live(facts.now) for outage in beat.outages]
    queue = facts.instance.queue
    for what in ("queue", "broker", "database"):
        relevant = [outage for outage in found if outage.what == what and (what != "queue" or outage.where == queue)]
        if relevant:
            return min(relevant, key=lambda outage: outage.since)
    return None


def _explain_outage(facts: Facts, since: str, outage: Outage) -> Diagnosis:
    started, error = f"since {iso(outage.since)}", shorten(outage.error).rstrip(".")
    if outage.what == "database":
        sentence = f"{since}, but the dispatcher has not reached the database {started}: {error}."
        return build_diagnosis(facts, Code.DUE_NOT_DISPATCHED, sentence, doctor_command())
    fix = find_remedy(outage.error)
    if outage.what == "broker":
        sentence = f"{since}, but the broker {outage.where} has accepted no messages {started}: {error}. {fix}"
        return build_diagnosis(facts, Code.DUE_NOT_DISPATCHED, sentence, doctor_command())
    sentence = f"{since}, but queue {outage.where!r} has refused its messages {started}: {error}. {fix}"
    return build_diagnosis(
        facts, Code.QUEUE_REFUSED, sentence, doctor_command(), refused_since=iso(outage.since), error=outage.error
    )


def _explain_unregistered(facts: Facts, since: str, consumers: list[Heartbeat]) -> Diagnosis:
    row = facts.instance
    nodes = ", ".join(sorted({beat.node for beat in consumers})[:5])
    known = {name for beat in consumers for name in beat.workflows}
    near = difflib.get_close_matches(row.workflow, known, n=1)
    sentence = (
        f"{since}, but no worker of queue {row.queue!r} knows workflow {row.workflow!r} ({nodes}). Import the module "
        "that defines it in the worker, or wait for the deploy to end."
        + (f" A similar name is known: {near[0]!r}." if near else "")
    )
    inspect = f"celery -A {YOUR_APP} inspect registered"
    return build_diagnosis(facts, Code.NOT_REGISTERED, sentence, inspect, known_workflows=sorted(known))


def _explain_unsupported_pools(facts: Facts, since: str, consumers: list[Heartbeat]) -> Diagnosis:
    row = facts.instance
    pools = ", ".join(sorted({f"{beat.node}: {beat.pool}" for beat in consumers})[:5])
    sentence = (
        f"{since}, but queue {row.queue!r} is consumed only by workers on pools that run no workflows ({pools}). Start "
        "a worker with -P prefork, threads or solo, or give the workflow a queue of its own."
    )
    return build_diagnosis(facts, Code.POOL_UNSUPPORTED, sentence, *start_worker_command(facts, []))


def _explain_unclaimed(facts: Facts, since: str, consumers: list[Heartbeat]) -> Diagnosis:
    row = facts.instance
    sentence = f"{since} and its message was sent {count_times(max(row.dispatch_count, 1))}, "
    if consumers:
        is_one = len(consumers) == 1
        count = "1 worker consumes" if is_one else f"{len(consumers)} workers consume"
        reasons = "it is busy with other work, or uses" if is_one else "they are busy with other work, or use"
        sentence += (
            f"but no worker has claimed it. {count} queue {row.queue!r}: {reasons} another broker than the sender."
        )
    else:
        sentence += f"but no worker consumes queue {row.queue!r}."
    if row.next_check_at is not None and row.next_check_at > facts.now:
        again = format_duration(row.next_check_at - facts.now)
        sentence += f" The message is sent again when its queue shows that it was lost, at the latest in {again}."
    return build_diagnosis(
        facts, Code.DISPATCHED_NOT_CLAIMED, sentence, *start_worker_command(facts, consumers), doctor_command()
    )


def _has_dispatcher(facts: Facts) -> bool:
    return any(beat.sweeps(facts.now) for beat in facts.heartbeats)


def _describe_missing_dispatcher(facts: Facts) -> str:
    last = last_sweep(facts)
    since = "No dispatcher has been seen" if last is None else f"No dispatcher has swept since {iso(last)}"
    return f"{since}: is celery beat running?"
