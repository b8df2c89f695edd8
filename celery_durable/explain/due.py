"""Diagnoses of instances that are due and that no worker has claimed."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from datetime import timedelta

from celery_durable.explain.codes import Code
from celery_durable.explain.commands import YOUR_APP
from celery_durable.explain.facts import Diagnosis, Facts
from celery_durable.explain.phrases import (
    EXECUTION_IS_OFF,
    build_diagnosis,
    count_times,
    describe_missing_dispatcher,
    describe_silence,
    doctor_command,
    find_consumers,
    find_silent_consumers,
    format_age,
    has_dispatcher,
    shorten,
    start_dispatcher_command,
    start_worker_command,
)
from celery_durable.explain.remedies import READ_ONLY_REMEDY, find_remedy, is_full_queue
from celery_durable.model import Heartbeat, Outage, format_duration, iso

_PUBLISH_DELAY = timedelta(seconds=5)
"""A running dispatcher publishes a due run within this time, unless the broker or a long queue prevents it."""
_JUST_NOW = timedelta(seconds=1)
_SIMILARITY = 0.75
"""How similar a workflow's name must be to be suggested, as `difflib` measures it."""


def explain_due(facts: Facts) -> Diagnosis:
    """Return the diagnosis of a due and unclaimed instance."""
    row, now = facts.instance, facts.now
    due_at = row.run_at or row.updated_at
    since = "It is due" if now - due_at < _JUST_NOW else f"It has been due for {format_age(facts, due_at)}"
    if (found := _explain_stopped_claims(facts, since)) is not None:
        return found
    if (outage := _find_outage(facts)) is not None:
        return _explain_outage(facts, since, outage)
    all_consumers = find_consumers(facts, row.queue)
    consumers = [beat for beat in all_consumers if beat.runs_workflows]
    if all_consumers and not consumers:
        return _explain_unsupported_pools(facts, since, all_consumers)
    if consumers and not any(row.workflow in beat.workflows for beat in consumers):
        return _explain_unregistered(facts, since, consumers)
    is_overdue = row.next_check_at is not None and row.next_check_at <= now
    if is_overdue and not has_dispatcher(facts) and (consumers or not row.dispatch_count):
        count = row.dispatch_count
        sent = f"its message was sent {count_times(count)}" if count else "no message for it has been sent"
        missing = "" if consumers else f" Also, {_describe_missing_worker(facts)}."
        sentence = f"{since}, and {sent}. {describe_missing_dispatcher(facts)}{missing}"
        actions = dict.fromkeys([*start_dispatcher_command(facts), *start_worker_command(facts, consumers)])
        return build_diagnosis(facts, Code.DUE_NOT_DISPATCHED, sentence, *actions)
    if row.dispatch_count or (row.sent_at is not None and now - row.sent_at > _PUBLISH_DELAY):
        return _explain_unclaimed(facts, since, consumers)
    if is_overdue and row.next_check_at is not None and now - row.next_check_at > _PUBLISH_DELAY:
        missing = "" if consumers else f" Also, {_describe_missing_worker(facts)}."
        sentence = f"{since}, but the dispatcher has sent no message for it, and reports no outage.{missing}"
        return build_diagnosis(
            facts, Code.DUE_NOT_DISPATCHED, sentence, *start_worker_command(facts, consumers), doctor_command()
        )
    missing = "" if consumers else f" But {_describe_missing_worker(facts)}."
    sentence = f"{since}; a worker should claim it at any moment.{missing}"
    code = Code.WORKER_SILENT if not consumers and find_silent_consumers(facts, row.queue) else Code.DUE
    return build_diagnosis(facts, code, sentence, *start_worker_command(facts, consumers))


def _explain_stopped_claims(facts: Facts, since: str) -> Diagnosis | None:
    """Return the diagnosis if a setting, or the database itself, keeps all workers from claiming the run."""
    if not facts.is_execution_enabled:
        return build_diagnosis(facts, Code.EXECUTION_DISABLED, f"{since}, but {EXECUTION_IS_OFF}")
    if facts.is_read_only:  # dispatchers cannot store their heartbeats, so they may seem to be missing
        sentence = f"{since}, but the database is read-only, so no worker can claim it. {READ_ONLY_REMEDY}"
        return build_diagnosis(facts, Code.DUE_NOT_DISPATCHED, sentence, doctor_command())
    if facts.locker is not None and facts.locker.age >= _JUST_NOW:
        pid, age = facts.locker.pid, format_duration(facts.locker.age, units=1)
        sentence = (
            f"{since}, but the database session with pid {pid} ({facts.locker.state}) has held a lock on its row in a "
            f"transaction of {age}. It continues when that transaction ends."
        )
        return build_diagnosis(facts, Code.DUE_NOT_DISPATCHED, sentence, facts.locker.end, locker_pid=pid)
    return None


# --- outages that dispatchers report ------------------------------------------------------------


def _find_outage(facts: Facts) -> Outage | None:
    """Return the outage that keeps dispatchers from publishing: of its queue, else of the broker or the database.

    If a message was sent before the outage, only an outage of the broker matters.
    """
    found = [outage for beat in facts.heartbeats if not beat.is_silent(facts.now) for outage in beat.outages]
    row = facts.instance
    for what in ("full", "queue", "broker", "database") if row.sent_at is None else ("broker",):
        is_of_queue = what in ("full", "queue")
        relevant = [each for each in found if each.what == what and (not is_of_queue or each.where == row.queue)]
        if relevant:
            return min(relevant, key=lambda outage: outage.since)
    return None


def _explain_outage(facts: Facts, since: str, outage: Outage) -> Diagnosis:
    started, error = f"since {iso(outage.since)}", shorten(outage.error).rstrip(".")
    fix = find_remedy(outage.error)
    match outage.what:
        case "database":
            sentence = f"{since}, but the dispatcher has not reached the database {started}: {error}."
            return build_diagnosis(facts, Code.DUE_NOT_DISPATCHED, sentence, doctor_command())
        case "broker":
            sent = "" if facts.instance.sent_at is None else " Messages that it held may be lost; they are sent again."
            sentence = (
                f"{since}, but the broker {outage.where} has accepted no messages {started}: {error}. {fix}{sent}"
            )
            return build_diagnosis(
                facts, Code.BROKER_UNAVAILABLE, sentence, doctor_command(), broker=outage.where, error=outage.error
            )
    is_full = outage.what == "full" or is_full_queue(outage.error)
    code = Code.QUEUE_FULL if is_full else Code.QUEUE_REFUSED
    what = "has been full" if outage.what == "full" else "has refused its messages"
    sentence = f"{since}, but queue {outage.where!r} {what} {started}: {error}. {fix}"
    actions = [doctor_command()]
    if is_full:
        consumers = find_consumers(facts, outage.where)
        if not consumers:
            sentence += f" Also, {_describe_missing_worker(facts)}."
        actions = [*start_worker_command(facts, []), *actions]
    return build_diagnosis(facts, code, sentence, *actions, refused_since=iso(outage.since), error=outage.error)


# --- workers ------------------------------------------------------------------------------------


def _explain_unregistered(facts: Facts, since: str, consumers: Sequence[Heartbeat]) -> Diagnosis:
    row = facts.instance
    nodes = ", ".join(sorted({beat.node for beat in consumers})[:5])
    known = {name for beat in consumers for name in beat.workflows}
    sentence = f"{since}, but no worker of queue {row.queue!r} knows workflow {row.workflow!r} ({nodes})"
    if facts.is_known_here:
        sentence += (
            ", although this process does. The workers run older code, or do not import the module that defines it: "
            "restart them, or import it there."
        )
    else:
        near = difflib.get_close_matches(row.workflow, known, n=1, cutoff=_SIMILARITY)
        sentence += ". Import the module that defines it in the worker, or wait for the deploy to end."
        sentence += f" A similar name is known: {near[0]!r}." if near else ""
    inspect = f"celery -A {YOUR_APP} inspect registered"
    return build_diagnosis(facts, Code.NOT_REGISTERED, sentence, inspect, known_workflows=sorted(known))


def _explain_unsupported_pools(facts: Facts, since: str, consumers: Sequence[Heartbeat]) -> Diagnosis:
    row = facts.instance
    pools = ", ".join(sorted({f"{beat.node}: {beat.pool}" for beat in consumers})[:5])
    sentence = (
        f"{since}, but queue {row.queue!r} is consumed only by workers on pools that run no workflows ({pools}). Start "
        "a worker with -P prefork, threads or solo, or give the workflow a queue of its own."
    )
    return build_diagnosis(facts, Code.POOL_UNSUPPORTED, sentence, *start_worker_command(facts, []))


def _explain_unclaimed(facts: Facts, since: str, consumers: Sequence[Heartbeat]) -> Diagnosis:
    row, code = facts.instance, Code.DISPATCHED_NOT_CLAIMED
    sentence = f"{since} and its message was sent {count_times(max(row.dispatch_count, 1))}, "
    if consumers:
        is_one = len(consumers) == 1
        count = "1 worker consumes" if is_one else f"{len(consumers)} workers consume"
        reasons = "it is busy with other work, or uses" if is_one else "they are busy with other work, or use"
        sentence += (
            f"but no worker has claimed it. {count} queue {row.queue!r}: {reasons} another broker than the sender."
        )
    else:
        sentence += f"but {_describe_missing_worker(facts)}."
        if find_silent_consumers(facts, row.queue):
            code = Code.WORKER_SILENT
            sentence += " If it continues, it claims the run, and so does any worker that you start."
    if row.next_check_at is not None and row.next_check_at > facts.now:
        again = format_duration(row.next_check_at - facts.now)
        sentence += f" The message is sent again when its queue shows that it was lost, at the latest in {again}."
    return build_diagnosis(facts, code, sentence, *start_worker_command(facts, consumers), doctor_command())


def _describe_missing_worker(facts: Facts) -> str:
    """Return that no worker consumes the run's queue, or that those that did are silent."""
    queue = facts.instance.queue
    silent = find_silent_consumers(facts, queue)
    if not silent:
        return f"no worker consumes queue {queue!r}"
    nodes = ", ".join(sorted({beat.node for beat in silent})[:5])
    return (
        f"the only worker of queue {queue!r} ({nodes}) has been silent {describe_silence(facts, silent)}: it is frozen "
        "or dead, or cannot reach the database"
    )
