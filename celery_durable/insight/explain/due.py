"""Diagnoses of instances that are due and that no worker has claimed."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from datetime import timedelta
from typing import Literal

from celery_durable.insight.explain.codes import YOUR_APP, Code
from celery_durable.insight.explain.facts import Diagnosis, Facts
from celery_durable.insight.explain.phrases import (
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
from celery_durable.model import Heartbeat, Outage, format_duration, iso

# Remedies for a broker, a queue or a database that cannot be used, found by the text of its error.


_UNKNOWN_BROKER_ERROR = "Check the broker's log for this error."
_UNKNOWN_DATABASE_ERROR = "Is the server running, and is durable_database_url right?"
_REFUSED_HOST = r"vhost \S+ not found|access to vhost"
_REFUSED_LOGIN = r"Login was refused|username-password pair|Authentication required|called without any password"
_POOLER = "unsupported startup parameter"
_BROKER_REMEDIES = (
    (
        r"PRECONDITION_FAILED|\(406\)",
        "The queue exists with other arguments: delete it, or declare it in task_queues with these arguments.",
    ),
    (_REFUSED_HOST, "Create the virtual host that broker_url names, and allow the user to use it."),
    (_REFUSED_LOGIN, "Correct the user name and the password in broker_url."),
    (r"ACCESS_REFUSED|\(403\)", "Allow the broker's user to configure, write and read this queue and its exchange."),
    (
        r"RESOURCE_LOCKED|\(405\)",
        "Another connection has exclusive use of the queue: close it, or declare the queue without exclusive.",
    ),
    (
        r"NO_ROUTE|\b312\b",
        "No queue is bound to its exchange for this routing key: bind one, or start a worker that declares it.",
    ),
    (r"no exchange", "Its exchange was deleted: declare it again, or start a worker of this queue."),
    (
        r"NOT_FOUND|\(404\)",
        "The queue, or its exchange, was deleted: start a worker of this queue, which declares both.",
    ),
    (
        r"QueueNotFound",
        "Name the queue in task_queues, or set task_create_missing_queues = True.",
    ),
    (
        r"^QueueFull",
        "Start more workers of this queue, or raise durable_queue_high_water. Until then, work waits in the database.",
    ),
    (r"basic\.nack", "The queue is full and rejects messages: start workers of this queue, or raise its x-max-length."),
    (r"NOPERM|NoPermission", "Allow the Redis user to write to the queue's key: ACL SETUSER <user> ~<queue>* +@all."),
    (r"WRONGTYPE", "The queue's key in Redis is not a list: other data uses that name. Rename one of them."),
    (r"READONLY|ReadOnly", "This Redis is a replica: set broker_url to the primary server."),
    (r"[Cc]onnection refused", "Nothing listens there: start the broker, or correct broker_url."),
    (
        r"TimeoutError|Timeout (reading|writing|connecting)|timed out",
        "It does not answer: check its load, its disk, and the network between.",
    ),
    (r"\bOOM\b|OutOfMemory", "Redis has reached maxmemory: raise the limit, or delete data."),
    (
        r"connection\.blocked|ConnectionBlocked",
        "RabbitMQ has raised a memory or disk alarm: free some. It then accepts messages again by itself.",
    ),
)
_URL = "durable_database_url"
READ_ONLY_REMEDY = f"Name the server that takes writes in {_URL}, or end the read-only mode."
_DATABASE_REMEDIES = (
    (_POOLER, "Behind PgBouncer in transaction mode, set durable_prepared_statements = False."),
    (r'database "([^"]+)" does not exist', rf"Create the database, createdb \1, or correct its name in {_URL}."),
    (r"Unknown database '([^']+)'", rf"Create the database, CREATE DATABASE `\1`, or correct its name in {_URL}."),
    (r"read-?only", READ_ONLY_REMEDY),
    (r"No space left|\bis full\b", "The disk of the database is full: free some space."),
    (
        r"authentication failed|no password supplied|no pg_hba\.conf entry|role \S+ does not exist|Access denied",
        f"Correct the user name and the password in {_URL}, or allow the user to connect.",
    ),
    (
        r"[Tt]oo many (clients|connections)|connection slots",
        "Raise max_connections of the server, or run fewer processes.",
    ),
    (
        r"Name or service not known|Temporary failure in name resolution|failed to resolve host|could not translate",
        f"Correct the host in {_URL}.",
    ),
    (r"unable to open database file", f"Create the folder that {_URL} names, and let this user write to it."),
)


def is_full_queue(error: str) -> bool:
    """Whether the broker rejected a message because the queue has reached its limit."""
    return "basic.nack" in error


def is_refused_connection(error: str) -> bool:
    """Whether the broker answers, and refuses the virtual host or the login of its URL."""
    return re.search(f"{_REFUSED_HOST}|{_REFUSED_LOGIN}", error) is not None


def is_pooler_rejection(error: str) -> bool:
    """Whether a pooler in transaction mode, such as PgBouncer, refuses a setting of the session."""
    return _POOLER in error


def find_remedy(error: str, *, of: Literal["broker", "database"] = "broker") -> str:
    """Return one sentence that says how to fix this error of the broker or database, or where to look."""
    remedies, unknown = (
        (_DATABASE_REMEDIES, _UNKNOWN_DATABASE_ERROR) if of == "database" else (_BROKER_REMEDIES, _UNKNOWN_BROKER_ERROR)
    )
    matches = ((re.search(pattern, error), sentence) for pattern, sentence in remedies)
    return next((match.expand(sentence) for match, sentence in matches if match is not None), unknown)


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
    """Return the outage of its queue, else of the broker or the database; if a message was sent, of the broker only."""
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
