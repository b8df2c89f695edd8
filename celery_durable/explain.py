"""Why is it not moving? What the database says of an instance in, one diagnosis for a person out.

Pure: no SQL, no Celery, no clock of its own; whatever the facts are, there is exactly one answer. Heartbeats are hints
for it and for nothing else: no decision of the engine rests on them.
"""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

from celery_durable.errors import StepLimitExceeded, StepNameReused, StepTypeMismatch
from celery_durable.model import (
    Child,
    Heartbeat,
    InstanceRow,
    ItemCounts,
    Kind,
    RunRow,
    Status,
    StepRecord,
    StepStatus,
    StepType,
    iso,
    span,
)

YOUR_APP = "<your app>"
"""Where an action names the app after ``-A``: whoever shows it may know the name."""

_PUBLISHES_WITHIN = timedelta(seconds=5)
"""A dispatcher that lives has published by then what it found due, unless something keeps it from it."""
_JUST_NOW = timedelta(seconds=1)
_CHANGED_CODE = frozenset({StepNameReused.__name__, StepTypeMismatch.__name__})
_LONGEST_MESSAGE = 300


class Code(StrEnum):
    """The answers there are."""

    SLEEPING = "SLEEPING"
    WAITING_EVENT = "WAITING_EVENT"
    WAITING_TASKS = "WAITING_TASKS"
    WAITING_CHILD = "WAITING_CHILD"
    RETRY_SCHEDULED = "RETRY_SCHEDULED"
    SCHEDULED = "SCHEDULED"
    PAUSED = "PAUSED"
    RUNNING = "RUNNING"
    DUE = "DUE"
    DUE_NOT_DISPATCHED = "DUE_NOT_DISPATCHED"
    DISPATCHED_NOT_CLAIMED = "DISPATCHED_NOT_CLAIMED"
    NOT_REGISTERED = "NOT_REGISTERED"
    LEASE_EXPIRED = "LEASE_EXPIRED"
    CRASHING = "CRASHING"
    STEP_LIMIT = "STEP_LIMIT"
    NONDETERMINISTIC = "NONDETERMINISTIC"
    FAILED = "FAILED"
    TERMINATED = "TERMINATED"
    DONE = "DONE"


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of an instance and of the processes around it, at one moment of the database's time."""

    now: datetime
    instance: InstanceRow
    run: RunRow
    open_steps: tuple[StepRecord, ...] = ()
    """Of the current run, in call order."""
    last_step: StepRecord | None = None
    """The last of the current run that has ended."""
    buffered: tuple[str, ...] = ()
    """Types of events that nobody has consumed, each once."""
    answered: int = 0
    """How many of the run's Celery tasks have answered."""
    unsent: frozenset[str] = frozenset()
    """Ids of those of its Celery tasks that have not left the outbox."""
    children: Mapping[Child, Status] = field(default_factory=dict)
    """How the instances stand that do its open steps; without those that are not there any more."""
    heartbeats: tuple[Heartbeat, ...] = ()


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """One answer. ``facts``: what it rests on, ready for JSON. ``actions``: commands to type, the most useful first."""

    code: Code
    sentence: str
    facts: Mapping[str, Any]
    actions: tuple[str, ...] = ()


def explain(facts: Facts) -> Diagnosis:
    """The one diagnosis of these facts."""
    row = facts.instance
    match row.status:
        case Status.COMPLETE:
            return _said(facts, Code.DONE, f"It completed{_ended(facts)}.")
        case Status.TERMINATED:
            why = "" if facts.run.reason is None else f": {_short(facts.run.reason)}"
            return _said(facts, Code.TERMINATED, f"It was terminated{_ended(facts)}{why}.", _do(row, "restart"))
        case Status.ERRORED:
            return _failed(facts)
        case Status.PAUSED:
            sentence = f"It is paused, for {_ago(facts, row.updated_at)}; timers go on counting."
            if waiting := _waiting(facts):
                sentence += f" Behind the pause: {_list(waiting)}."
            return _said(facts, Code.PAUSED, sentence, _do(row, "resume"))
        case Status.ACTIVE | Status.WAITING:
            if row.claim_token is not None:
                return _claimed(facts)
            if row.run_at is not None and row.run_at > facts.now:
                return _asleep(facts, row.run_at)
            return _due(facts)


# --- ended --------------------------------------------------------------------------------------


def _failed(facts: Facts) -> Diagnosis:
    run, step = facts.run, facts.last_step
    name = run.error_name or "an error"
    error = f"{name}: {_short(run.error_message)}" if run.error_message else name
    sentence = f"It failed{_ended(facts)} with {error}"
    if step is not None and step.error is not None and step.error.name == run.error_name:
        sentence += f" (step {_quoted(step.name)}, {_attempts(step)})"
    code = Code.FAILED
    if name == StepLimitExceeded.__name__:
        code = Code.STEP_LIMIT
    elif name in _CHANGED_CODE:
        code = Code.NONDETERMINISTIC
        sentence += ". The workflow's code and what is recorded do not fit"
    row = facts.instance
    again = ("restart",) if row.kind is Kind.LINEAR else ("retry", "restart")
    actions = [_do(row, "show", "--full"), *(_do(row, verb) for verb in again)]
    return _said(facts, code, f"{sentence.rstrip('.')}.", *actions)


# --- in a worker's hands ------------------------------------------------------------------------


def _claimed(facts: Facts) -> Diagnosis:
    row, now = facts.instance, facts.now
    node = (row.claimed_by or "").rpartition(" ")[2] or "a worker"
    if row.lease_until is None or row.lease_until <= now:
        since = "" if row.lease_until is None else f", its lease ended {_ago(facts, row.lease_until)} ago"
        sentence = f"The worker {node} fell silent{since}. "
        if _has_dispatcher(facts):
            sentence += "A dispatcher hands the run on; one that has just started waits as long as a lease lasts."
            return _said(facts, Code.LEASE_EXPIRED, sentence)
        return _said(facts, Code.LEASE_EXPIRED, sentence + _nobody_sweeps(facts), *_start_beat())
    where = f"the worker {node}, which has had it for {_ago(facts, row.updated_at)}"
    if row.pause_requested:
        sentence = f"A pause is requested; it takes effect when the running step ends, on {where}."
        return _said(facts, Code.PAUSED, sentence, _do(row, "resume"))
    begun = [step.name for step in facts.open_steps if step.status in (StepStatus.PENDING, StepStatus.RUNNING)]
    if begun:
        doing = ("step " if len(begun) == 1 else "steps ") + ", ".join(map(_quoted, begun[:5]))
    elif facts.last_step is not None:
        doing = f"what follows step {_quoted(facts.last_step.name)}"
    else:
        doing = "its beginning"
    sentence = f"It runs {doing}, on {where}; the lease is good for {span(row.lease_until - now)}."
    if row.crash_count:
        sentence += f" {_crashes(row.crash_count)} before, without a step in between."
    seen = [beat for beat in facts.heartbeats if beat.node == node]
    if seen and not any(beat.is_live(now) for beat in seen):
        last = max(beat.seen_at for beat in seen)
        sentence += (
            f" That worker was last seen {_ago(facts, last)} ago; if it is dead, the lease ends, and it is handed on."
        )
    return _said(facts, Code.RUNNING, sentence, _do(row, "logs", "--follow"))


# --- until its time -----------------------------------------------------------------------------


def _asleep(facts: Facts, until: datetime) -> Diagnosis:
    row, at = facts.instance, f"in {span(until - facts.now)}"
    if row.status is Status.ACTIVE and row.crash_count:
        sentence = (
            f"It rests after a crash and goes on {at}. {_crashes(row.crash_count)} there, without a step in between."
        )
        return _said(facts, Code.CRASHING, sentence, _do(row, "logs", "--level warn"))
    waiting = _waiting(facts)
    if not waiting:
        if facts.run.started_at is None:
            return _said(facts, Code.SCHEDULED, f"It was created for a later time, and starts {at}.")
        return _said(facts, Code.SLEEPING, f"It sleeps; wakes {at}.")
    first = next((step for step in waiting if _mistyped(facts, step)), waiting[0])
    told = (first,) if first.verb is not StepType.TASK else [step for step in waiting if step.verb is StepType.TASK]
    others = [step for step in waiting if step not in told]
    found = _open_step(facts, first)
    if not others:
        return found
    return Diagnosis(found.code, f"{found.sentence} Besides: {_list(others)}.", found.facts, found.actions)


def _waiting(facts: Facts) -> list[StepRecord]:
    """Earliest first."""
    return sorted((step for step in facts.open_steps if step.is_waiting), key=_due_at)


def _list(steps: list[StepRecord]) -> str:
    return "; ".join(_briefly(step) for step in steps[:3]) + ("; ..." if len(steps) > 3 else "")


def _open_step(facts: Facts, step: StepRecord) -> Diagnosis:
    row, name = facts.instance, _quoted(step.name)
    known: dict[str, Any] = {"step": step.name, "due_at": _maybe_iso(step.next_retry_at or step.wake_at)}
    if step.status is StepStatus.READY and step.error is None:  # a linear step that nobody could begin
        sentence = (
            f"Step {name} is ready, but the worker that looked last has no handler for it; the next one looks "
            f"{_when(facts, row.run_at)}."
        )
        return _said(facts, Code.NOT_REGISTERED, sentence, f"celery -A {YOUR_APP} inspect registered", **known)
    match step.verb:
        case StepType.SLEEP:
            sentence = f"Sleeps at step {name}; wakes {_when(facts, step.wake_at)}."
            return _said(facts, Code.SLEEPING, sentence, **known)
        case StepType.DO:
            error = "an error" if step.error is None else f"{step.error.name}: {_short(step.error.message)}"
            sentence = (
                f"Tries step {name} again {_when(facts, step.next_retry_at)}; "
                f"attempt {_n_of_m(step)} failed: {error.rstrip('.')}."
            )
            known |= {"attempts": step.attempts, "max_attempts": step.max_attempts}
            return _said(facts, Code.RETRY_SCHEDULED, sentence, _do(row, "logs", "--level warn"), **known)
        case StepType.WAIT if step.wait_topic is not None:
            sentence = f'Waits for topic "{step.wait_topic}" at step {name}; times out {_when(facts, step.wake_at)}.'
            emit = f"celery -A {YOUR_APP} durable emit {shlex.quote(step.wait_topic)} --payload '{{...}}'"
            return _said(facts, Code.WAITING_EVENT, sentence, emit, **known, topic=step.wait_topic)
        case StepType.WAIT:
            type_ = step.wait_event_type or ""
            sentence = f'Waits for event "{type_}" at step {name}; times out {_when(facts, step.wake_at)}.'
            if mistyped := _mistyped(facts, step):
                sentence += f' An event "{mistyped}" is buffered, the wait is for "{type_}": a typing mistake?'
            elif others := [f'"{other}"' for other in facts.buffered if other != type_]:
                sentence += f" Buffered for later waits: {', '.join(others[:5])}."
            known |= {"event_type": type_, "buffered": list(facts.buffered)}
            send = _do(row, "send-event", f"{shlex.quote(type_)} --payload '{{...}}'")
            return _said(facts, Code.WAITING_EVENT, sentence, send, **known)
        case StepType.TASK:
            return _tasks(facts, step, known)
        case StepType.MAP:
            return _map(facts, step, known)
        case StepType.CHILD:
            return _child(facts, step, known)


def _tasks(facts: Facts, step: StepRecord, known: dict[str, Any]) -> Diagnosis:
    """All Celery tasks that are out: ``step`` is the one whose time is over first."""
    out = [each for each in facts.open_steps if each.verb is StepType.TASK and each.task is not None]
    oldest = min(out, key=lambda each: each.created_at or facts.now)
    since = "" if oldest.created_at is None else f", under way for {_ago(facts, oldest.created_at)}"
    which = f"{oldest.task} ({oldest.task_id}){since}"
    if len(out) == 1:
        sentence = f"Waits for Celery task {which}, at step {_quoted(step.name)}; "
    else:
        sentence = (
            f"Waits for {len(out)} Celery tasks, {facts.answered} of {facts.answered + len(out)} have answered; the "
            f"oldest is {which}, at step {_quoted(oldest.name)}; the next "
        )
    sentence += f"times out {_when(facts, step.wake_at)}."
    unsent = [each for each in out if each.task_id in facts.unsent]
    actions = [f"celery -A {YOUR_APP} inspect query_task {oldest.task_id}"]
    if unsent:
        count = "It has" if len(out) == 1 else f"{len(unsent)} of them have"
        sentence += f" {count} not left yet: the broker does not take it, or no dispatcher sends it."
        actions = [f"celery -A {YOUR_APP} durable outbox", _doctor()]
    known |= {
        "task": oldest.task,
        "task_id": oldest.task_id,
        "tasks_out": len(out),
        "tasks_answered": facts.answered,
        "tasks_unsent": len(unsent),
    }
    return _said(facts, Code.WAITING_TASKS, sentence, *actions, **known)


def _map(facts: Facts, step: StepRecord, known: dict[str, Any]) -> Diagnosis:
    items = step.items or ItemCounts(0, 0, 0)
    failed = f" ({items.failed} of them failed)" if items.failed else ""
    sentence = (
        f"Waits for Celery tasks {step.task}, {items.done + items.failed} of {items.total} have answered{failed}, at "
        f"step {_quoted(step.name)}; the next is judged {_when(facts, step.wake_at)} if it is silent."
    )
    known |= {"task": step.task, "items": {"total": items.total, "done": items.done, "failed": items.failed}}
    return _said(facts, Code.WAITING_TASKS, sentence, _do(facts.instance, "show"), **known)


def _child(facts: Facts, step: StepRecord, known: dict[str, Any]) -> Diagnosis:
    assert step.child is not None
    child, status = step.child, facts.children.get(step.child)
    stands = "which is not there any more" if status is None else f"which is {status}"
    sentence = (
        f"Waits for instance {_quoted(child.instance_id)} of workflow {_quoted(child.workflow)}, {stands}, at step "
        f"{_quoted(step.name)}; times out {_when(facts, step.wake_at)}."
    )
    known |= {"child": {"workflow": child.workflow, "instance_id": child.instance_id, "status": status}}
    target = f"{shlex.quote(child.workflow)} {shlex.quote(child.instance_id)}"
    action = () if status is None else (f"celery -A {YOUR_APP} durable explain {target}",)
    return _said(facts, Code.WAITING_CHILD, sentence, *action, **known)


def _mistyped(facts: Facts, step: StepRecord) -> str | None:
    """A buffered event whose type nobody waits for, but which is nearly that of this wait."""
    if step.verb is not StepType.WAIT or step.wait_event_type is None:
        return None
    awaited = {each.wait_event_type for each in facts.open_steps}
    left = {type_.casefold(): type_ for type_ in facts.buffered if type_ not in awaited}
    near = difflib.get_close_matches(step.wait_event_type.casefold(), left, n=1, cutoff=0.75)
    return left[near[0]] if near else None


def _briefly(step: StepRecord) -> str:
    match step.verb:
        case StepType.SLEEP:
            return f"step {_quoted(step.name)} sleeps"
        case StepType.DO:
            return f"step {_quoted(step.name)} is tried again"
        case StepType.WAIT if step.wait_topic is not None:
            return f'step {_quoted(step.name)} waits for topic "{step.wait_topic}"'
        case StepType.WAIT:
            return f'step {_quoted(step.name)} waits for event "{step.wait_event_type}"'
        case StepType.TASK:
            return f"step {_quoted(step.name)} waits for Celery task {step.task}"
        case StepType.MAP:
            return f"step {_quoted(step.name)} waits for Celery tasks {step.task}"
        case StepType.CHILD:
            return f"step {_quoted(step.name)} waits for another instance"


def _due_at(step: StepRecord) -> float:
    at = step.next_retry_at or step.wake_at
    return float("inf") if at is None else at.timestamp()


# --- due, and in nobody's hands -----------------------------------------------------------------


def _due(facts: Facts) -> Diagnosis:
    row, now = facts.instance, facts.now
    due_at = row.run_at or row.updated_at
    since = "It is due" if now - due_at < _JUST_NOW else f"It has been due for {_ago(facts, due_at)}"
    consumers = [beat for beat in facts.heartbeats if beat.is_live(now) and row.queue in beat.queues]
    if consumers and not any(row.workflow in beat.workflows for beat in consumers):
        return _unknown(facts, since, consumers)
    missing = "" if consumers else f" And no worker consumes queue {row.queue!r}."
    is_overdue = row.poll_at is not None and row.poll_at <= now
    if is_overdue and not _has_dispatcher(facts) and (consumers or not row.dispatches):
        sent = f"was sent {_times(row.dispatches)}" if row.dispatches else "nobody has sent it to a worker"
        sentence = f"{since}, and {sent}. {_nobody_sweeps(facts)}{missing}"
        return _said(facts, Code.DUE_NOT_DISPATCHED, sentence, *_start_beat(), *_start_worker(facts, consumers))
    if row.dispatches:
        return _unclaimed(facts, since, consumers)
    if is_overdue and row.poll_at is not None and now - row.poll_at > _PUBLISHES_WITHIN:
        sentence = (
            f"{since}, and the dispatcher does not send it: the broker does not answer, or queue {row.queue!r} is "
            f"longer than durable_queue_high_water.{missing}"
        )
        return _said(facts, Code.DUE_NOT_DISPATCHED, sentence, *_start_worker(facts, consumers), _doctor())
    missing = "" if consumers else f" But no worker consumes queue {row.queue!r}."
    sentence = f"{since}; a worker should take it any moment.{missing}"
    return _said(facts, Code.DUE, sentence, *_start_worker(facts, consumers))


def _unknown(facts: Facts, since: str, consumers: list[Heartbeat]) -> Diagnosis:
    row = facts.instance
    nodes = ", ".join(sorted({beat.node for beat in consumers})[:5])
    known = {name for beat in consumers for name in beat.workflows}
    near = difflib.get_close_matches(row.workflow, known, n=1)
    sentence = (
        f"{since}, and no worker of queue {row.queue!r} knows workflow {row.workflow!r} ({nodes}). Import the module "
        "that defines it in the worker, or wait for the deploy to end." + (f" They know {near[0]!r}." if near else "")
    )
    inspect = f"celery -A {YOUR_APP} inspect registered"
    return _said(facts, Code.NOT_REGISTERED, sentence, inspect, known_workflows=sorted(known))


def _unclaimed(facts: Facts, since: str, consumers: list[Heartbeat]) -> Diagnosis:
    row = facts.instance
    sentence = f"{since} and was sent {_times(row.dispatches)}, "
    if consumers:
        count = "1 worker consumes" if len(consumers) == 1 else f"{len(consumers)} workers consume"
        sentence += (
            f"but no worker has taken it. {count} queue {row.queue!r}: they are busy with other work, or have another "
            "broker than who sends."
        )
    else:
        sentence += f"but no worker consumes queue {row.queue!r}."
    if row.poll_at is not None and row.poll_at > facts.now:
        sentence += f" It is sent again in {span(row.poll_at - facts.now)}."
    return _said(facts, Code.DISPATCHED_NOT_CLAIMED, sentence, *_start_worker(facts, consumers), _doctor())


def _has_dispatcher(facts: Facts) -> bool:
    return any(beat.sweeps(facts.now) for beat in facts.heartbeats)


def _nobody_sweeps(facts: Facts) -> str:
    last = _last_sweep(facts)
    since = "No dispatcher has been seen" if last is None else f"Nobody has swept since {iso(last)}"
    return f"{since}: is celery beat running?"


def _last_sweep(facts: Facts) -> datetime | None:
    return max((beat.swept_at for beat in facts.heartbeats if beat.swept_at is not None), default=None)


# --- words --------------------------------------------------------------------------------------


def _said(facts: Facts, code: Code, sentence: str, *actions: str, **more: Any) -> Diagnosis:
    row, now = facts.instance, facts.now
    known = {
        "now": iso(now),
        "workflow": row.workflow,
        "instance_id": row.instance_id,
        "run_number": row.run_number,
        "status": str(row.status),
        "queue": row.queue,
        "run_at": _maybe_iso(row.run_at),
        "poll_at": _maybe_iso(row.poll_at),
        "dispatches": row.dispatches,
        "crash_count": row.crash_count,
        "pause_requested": row.pause_requested,
        "claimed_by": row.claimed_by,
        "lease_until": _maybe_iso(row.lease_until),
        "last_step": None if facts.last_step is None else facts.last_step.name,
        "last_sweep": _maybe_iso(_last_sweep(facts)),
        "workers": sorted({beat.node for beat in facts.heartbeats if beat.kind == "worker" and beat.is_live(now)}),
    }
    return Diagnosis(code, sentence, known | more, actions)


def _do(row: InstanceRow, verb: str, rest: str = "") -> str:
    target = f"{shlex.quote(row.workflow)} {shlex.quote(row.instance_id)}"
    return f"celery -A {YOUR_APP} durable {verb} {target} {rest}".rstrip()


def _doctor() -> str:
    return f"celery -A {YOUR_APP} durable doctor"


def _start_beat() -> tuple[str, ...]:
    return (f"celery -A {YOUR_APP} beat",)


def _start_worker(facts: Facts, consumers: list[Heartbeat]) -> tuple[str, ...]:
    return () if consumers else (f"celery -A {YOUR_APP} worker -Q {shlex.quote(facts.instance.queue)}",)


def _ended(facts: Facts) -> str:
    at = facts.run.completed_at
    return "" if at is None else f" {_ago(facts, at)} ago"


def _ago(facts: Facts, since: datetime) -> str:
    return span(facts.now - since, units=1)


def _when(facts: Facts, at: datetime | None) -> str:
    if at is None or at <= facts.now:
        return "now"
    return f"in {span(at - facts.now)}"


def _maybe_iso(at: datetime | None) -> str | None:
    return None if at is None else iso(at)


def _short(message: str | None) -> str:
    text = message or ""
    return text if len(text) <= _LONGEST_MESSAGE else text[: _LONGEST_MESSAGE - 3] + "..."


def _quoted(name: str) -> str:
    return f'"{name}"'


def _n_of_m(step: StepRecord) -> str:
    return f"{step.attempts}/{step.max_attempts}" if step.max_attempts else str(step.attempts)


def _attempts(step: StepRecord) -> str:
    return "1 attempt" if step.attempts == 1 else f"{step.attempts} attempts"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _crashes(count: int) -> str:
    return "1 worker died" if count == 1 else f"{count} workers died"
