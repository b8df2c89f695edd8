"""Diagnoses of instances that sleep, wait, or retry a step later."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Iterable
from datetime import datetime
from typing import Any

from celery_durable.errors.base import name_error
from celery_durable.insight.explain.codes import YOUR_APP, Code, instance_command
from celery_durable.insight.explain.facts import Diagnosis, Facts
from celery_durable.insight.explain.phrases import (
    build_diagnosis,
    describe_silence,
    describe_worker_deaths,
    doctor_command,
    find_consumers,
    find_silent_consumers,
    format_age,
    format_attempt_count,
    format_remaining,
    iso_or_none,
    locate_error,
    name_limit,
    quote,
    shorten,
    show_limit_command,
    worker_command,
)
from celery_durable.model import (
    LIMITS_KEY,
    Child,
    Count,
    ItemCounts,
    LimitHold,
    LimitWait,
    Status,
    StepRecord,
    StepStatus,
    StepType,
    format_duration,
)


def explain_waiting(facts: Facts, until: datetime) -> Diagnosis:
    """Return the diagnosis of an unclaimed instance that is due at ``until``."""
    row, at = facts.instance, f"in {format_duration(until - facts.now)}"
    if row.status is Status.ACTIVE and row.crash_count:
        sentence = f"It is delayed after a crash and continues {at}: {describe_worker_deaths(facts)}"
        return build_diagnosis(facts, Code.CRASHING, sentence, instance_command(row, "show"))
    waiting = waiting_steps(facts)
    if not waiting:
        if facts.run.started_at is None:
            what = "It was created to start later" if row.run_number == 1 else "A new run is to start later"
            return build_diagnosis(facts, Code.SCHEDULED, f"{what}, and starts {at}.")
        return build_diagnosis(facts, Code.SLEEPING, f"It sleeps; wakes {at}.")
    first = next((step for step in waiting if _find_mistyped_event(facts, step)), waiting[0])
    described = (
        (first,)
        if first.display_type is not StepType.TASK
        else [step for step in waiting if step.display_type is StepType.TASK]
    )
    others = [step for step in waiting if step not in described]
    found = _explain_step(facts, first)
    if not others:
        return found
    return Diagnosis(found.code, f"{found.sentence} Also: {list_steps(others)}.", found.facts, found.actions)


def waiting_steps(facts: Facts) -> list[StepRecord]:
    """Return the open steps that wait for a time, an event, a task, a child or a retry, earliest deadline first."""
    return sorted((step for step in facts.open_steps if step.is_waiting), key=_due_at)


def list_steps(steps: list[StepRecord]) -> str:
    """Describe the first three steps, in a few words each."""
    return "; ".join(_describe_step(step) for step in steps[:3]) + ("; ..." if len(steps) > 3 else "")


def _explain_step(facts: Facts, step: StepRecord) -> Diagnosis:
    row, name = facts.instance, quote(step.name)
    known: dict[str, Any] = {"step": step.name, "due_at": iso_or_none(step.next_retry_at or step.wake_at)}
    if step.status is StepStatus.READY and step.error is None:  # a linear step that no worker could start
        sentence = (
            f"Step {name} is ready, but the last worker that checked has no handler for it; the next check is "
            f"{format_remaining(facts, row.run_at)}."
        )
        return build_diagnosis(
            facts, Code.NOT_REGISTERED, sentence, f"celery -A {YOUR_APP} inspect registered", **known
        )
    match step.display_type:
        case StepType.SLEEP:
            sentence = f"Sleeps at step {name}; wakes {format_remaining(facts, step.wake_at)}."
            return build_diagnosis(facts, Code.SLEEPING, sentence, **known)
        case StepType.DO:
            return _explain_attempt(facts, step, known)
        case StepType.WAIT if step.wait_topic is not None:
            at = format_remaining(facts, step.wake_at)
            sentence = f'Waits for topic "{step.wait_topic}" at step {name}; times out {at}.'
            emit = f"celery -A {YOUR_APP} durable emit {shlex.quote(step.wait_topic)} --payload @payload.json"
            return build_diagnosis(facts, Code.WAITING_EVENT, sentence, emit, **known, topic=step.wait_topic)
        case StepType.WAIT:
            type_ = step.wait_event_type or ""
            at = format_remaining(facts, step.wake_at)
            sentence = f'Waits for event "{type_}" at step {name}; times out {at}.'
            if mistyped := _find_mistyped_event(facts, step):
                sentence += f' An event "{mistyped}" is stored, but the wait is for "{type_}": a typing mistake?'
            elif others := [f'"{other}"' for other in facts.buffered if other != type_]:
                sentence += f" Buffered for later waits: {', '.join(others[:5])}."
            known |= {"event_type": type_, "buffered": list(facts.buffered)}
            send = instance_command(row, "send-event", f"{shlex.quote(type_)} --payload @payload.json")
            if step.ask is not None:
                sentence = f"Asks {step.to or 'a person'} at step {name}; times out {at}."
                known |= {"ask": step.ask, "to": step.to}
                send = instance_command(row, "answer", f"{shlex.quote(step.step_key)} @answer.json")
            return build_diagnosis(facts, Code.WAITING_EVENT, sentence, send, **known)
        case StepType.TASK:
            return _explain_tasks(facts, step, known)
        case StepType.CHILD:
            return _explain_child(facts, step, known)
        case _:
            return _explain_map(facts, step, known) if step.items else _explain_other(facts, step, known)


def _explain_attempt(facts: Facts, step: StepRecord, known: dict[str, Any]) -> Diagnosis:
    """Describe a step whose next attempt waits for its time, or for its limits."""
    name = quote(step.name)
    if step.waits_for_limits:
        return _explain_limits(facts, step)
    error = "an error" if step.error is None else name_error(step.error.name, shorten(step.error.message))
    sentence = (
        f"Tries step {name} again {format_remaining(facts, step.next_retry_at)}; "
        f"attempt {format_attempt_count(step)} failed: {error.rstrip('.')}."
        f"{locate_error(facts, step.step_key)}"
    )
    known |= {"attempts": step.attempts, "max_attempts": step.max_attempts}
    show = instance_command(facts.instance, "show", "--full")
    return build_diagnosis(facts, Code.RETRY_SCHEDULED, sentence, show, **known)


def _explain_limits(facts: Facts, step: StepRecord) -> Diagnosis:
    who = "The run" if step.step_key == LIMITS_KEY else f"Step {quote(step.name)}"
    wait = _find_limit_wait(facts, step)
    if wait is None:
        return build_diagnosis(facts, Code.LIMITED, f"{who} waits until it gets its limits.", step=step.name)
    what, actions, known = _describe_limit(facts, wait)
    sentence = f"{who} waits for {what}."
    if wait.ancestor is not None:
        known["held_by_ancestor"] = name = f"{wait.ancestor.workflow}/{wait.ancestor.instance_id}"
        sentence += (
            f" {name} holds it, and waits for this run: unless another holder gives it back, neither continues. "
            "Raise the limit, and take it in one of the two only."
        )
    return build_diagnosis(facts, Code.LIMITED, sentence, *actions, step=step.name, **known)


def _explain_map(facts: Facts, step: StepRecord, known: dict[str, Any]) -> Diagnosis:
    """Describe a map, and the limit for which its first waiting item waits."""
    found, wait = _explain_items(facts, step, known), _find_limit_wait(facts, step)
    if wait is None:
        return found
    what, actions, more = _describe_limit(facts, wait)
    sentence = f"{found.sentence} Items wait for {what}."
    return Diagnosis(found.code, sentence, {**found.facts, **more}, (*actions, *found.actions))


def _find_limit_wait(facts: Facts, step: StepRecord) -> LimitWait | None:
    return next((each for each in facts.limit_waits if each.step_key == step.step_key), None)


def _describe_limit(facts: Facts, wait: LimitWait) -> tuple[str, list[str], dict[str, Any]]:
    """Return a limit in words, the commands that show and raise it, and the facts behind."""
    limit, holder = wait.limit, wait.longest_holder
    of_key = f" with the key {quote(limit.key)}" if limit.key else ""
    parts = [] if limit.at_once is None else [f"{limit.held} of {limit.at_once} held"]
    parts += [] if limit.rate is None else [limit.rate]
    turn = " of its turn" if wait.has_turns else ""
    parts.append(f"place {wait.place}{turn}, of {limit.waiting}")
    known: dict[str, Any] = {
        "limit": limit.name,
        "key": limit.key,
        "at_once": limit.at_once,
        "rate": limit.rate,
        "held": limit.held,
        "place": wait.place.count,
        "waiting": limit.waiting.count,
    }
    if holder is not None:
        name = f"{holder.workflow}/{holder.instance_id}"
        parts.append(f"longest holder {name}, for {format_age(facts, holder.since)}")
        known |= {"longest_holder": name, "held_since": iso_or_none(holder.since)}
    actions = [show_limit_command(limit.name, limit.key)]
    if limit.at_once is not None and limit.held >= limit.at_once:
        which = name_limit(limit.name, limit.key)
        actions.append(f"celery -A {YOUR_APP} durable limits set {which} --at-once {limit.at_once + 1}")
    row = facts.instance
    if holder is not None and (holder.workflow, holder.instance_id) != (row.workflow, row.instance_id):
        actions.append(_explain_command(holder))
    return f"limit {quote(limit.name)}{of_key} ({'; '.join(parts)})", actions, known


def _explain_tasks(facts: Facts, step: StepRecord, known: dict[str, Any]) -> Diagnosis:
    """Describe all unanswered task steps. ``step`` is the one whose timeout ends first."""
    out = [each for each in waiting_steps(facts) if each.display_type is StepType.TASK]
    oldest = min(out, key=lambda each: _sent_at(each) or facts.now)
    sent_at = _sent_at(oldest)
    since = "" if sent_at is None else f", under way for {format_age(facts, sent_at)}"
    which = f"{oldest.task} ({oldest.task_id}){since}"
    if len(out) == 1:
        sentence = f"Waits for Celery task {which}, at step {quote(step.name)}; "
    else:
        sentence = (
            f"Waits for {len(out)} Celery tasks, {facts.answered} of {facts.answered + len(out)} have answered; the "
            f"oldest is {which}, at step {quote(oldest.name)}; the next "
        )
    sentence += f"times out {format_remaining(facts, step.wake_at)}."
    unsent = [each for each in out if each.task_id in facts.unsent]
    actions = [f"celery -A {YOUR_APP} inspect query_task {oldest.task_id}"]
    if unsent:
        count = "It has" if len(out) == 1 else "1 of them has" if len(unsent) == 1 else f"{len(unsent)} of them have"
        them = "it" if len(unsent) == 1 else "them"
        sentence += f" {count} not been sent yet: the broker does not accept {them}, or no dispatcher sends {them}."
        actions = [f"celery -A {YOUR_APP} durable outbox", doctor_command()]
    code = Code.WAITING_TASKS
    if not unsent:
        code, sentence = _judge_queue(facts, oldest, sentence, actions, known)
    known |= {
        "task": oldest.task,
        "task_id": oldest.task_id,
        "tasks_out": len(out),
        "tasks_answered": facts.answered,
        "tasks_unsent": len(unsent),
    }
    return build_diagnosis(facts, code, sentence, *actions, **known)


def _judge_queue(
    facts: Facts, step: StepRecord, sentence: str, actions: list[str], known: dict[str, Any]
) -> tuple[Code, str]:
    """Return the code and the sentence for a step whose tasks were sent; adds to the actions and facts.

    Workers of applications without Durable write no heartbeat, so a queue without known consumers may have some.
    """
    queue = facts.task_queues.get(step.step_key)
    known["task_queue"] = queue
    if queue is None or find_consumers(facts, queue):
        return Code.WAITING_TASKS, sentence
    actions.insert(0, worker_command(queue))
    silent = find_silent_consumers(facts, queue)
    now = f" any more; {silent[0].node} has been silent {describe_silence(facts, silent)}" if silent else ""
    sentence += f" No worker of this app consumes its queue {queue!r}{now}. If no other application does, start one."
    return Code.TASK_NOT_CONSUMED, sentence


def _explain_items(facts: Facts, step: StepRecord, known: dict[str, Any]) -> Diagnosis:
    items = step.items or ItemCounts(0, 0, 0)
    failed = f" ({items.failed} of them failed)" if items.failed else ""
    sentence = (
        f"Waits for {step.awaited}, {items.done + items.failed} of {items.total} have answered{failed}, at "
        f"step {quote(step.name)}; the next deadline is {format_remaining(facts, step.wake_at)}."
    )
    actions = [instance_command(facts.instance, "show")]
    known["items"] = {"total": items.total, "done": items.done, "failed": items.failed}
    if step.workflow is not None:
        known["children"] = [child.instance_id for child in items.children]
        if items.children:
            sentence += f" One that has not ended is {items.children[0].instance_id}."
            actions.insert(0, _explain_command(items.children[0]))
        return build_diagnosis(facts, Code.WAITING_CHILD, sentence, *actions, **known)
    unsent = facts.unsent_items.get(step.step_key, Count(0))
    if unsent.count:
        sentence += f" {unsent} have not been sent yet: the broker does not accept them, or no dispatcher sends them."
        actions = [f"celery -A {YOUR_APP} durable outbox", doctor_command()]
    known |= {"task": step.task, "tasks_unsent": unsent.count}
    code = Code.WAITING_TASKS
    if not unsent.count:
        code, sentence = _judge_queue(facts, step, sentence, actions, known)
    return build_diagnosis(facts, code, sentence, *actions, **known)


def _sent_at(step: StepRecord) -> datetime | None:
    """Return when the current attempt of a task was sent. Earlier attempts do not count."""
    return step.created_at if step.wake_at is None or step.timeout is None else step.wake_at - step.timeout


def _explain_child(facts: Facts, step: StepRecord, known: dict[str, Any]) -> Diagnosis:
    child = step.child or Child("", "")
    status = facts.children.get(child)
    state = "which no longer exists" if status is None else f"which is {status}"
    at = format_remaining(facts, step.wake_at)
    sentence = f"Waits for {step.awaited}, {state}, at step {quote(step.name)}; times out {at}."
    child_status = None if status is None else str(status)
    known |= {"child": {"workflow": child.workflow, "instance_id": child.instance_id, "status": child_status}}
    action = () if status is None else (_explain_command(child),)
    return build_diagnosis(facts, Code.WAITING_CHILD, sentence, *action, **known)


def _explain_command(of: Child | LimitHold) -> str:
    return f"celery -A {YOUR_APP} durable explain {shlex.quote(of.workflow)} {shlex.quote(of.instance_id)}"


def _explain_other(facts: Facts, step: StepRecord, known: dict[str, Any]) -> Diagnosis:
    """Describe a step of a kind that another package has made: its row says when it is due, and nothing else."""
    due = format_remaining(facts, step.wake_at)
    sentence = f"Waits at step {quote(step.name)}, of kind {quote(step.type)}; times out {due}."
    return build_diagnosis(facts, Code.WAITING_STEP, sentence, **known)


def _find_mistyped_event(facts: Facts, step: StepRecord) -> str | None:
    """Return a buffered event type that no step waits for, and that nearly equals the type of this wait."""
    if step.display_type is not StepType.WAIT or step.wait_event_type is None:
        return None
    awaited = {each.wait_event_type for each in facts.open_steps}
    return find_near_type(step.wait_event_type, [type_ for type_ in facts.buffered if type_ not in awaited])


def find_near_type(wanted: str, types: Iterable[str]) -> str | None:
    """Return the type among these that nearly equals the type of a wait, if there is one."""
    folded = {type_.casefold(): type_ for type_ in types}
    near = difflib.get_close_matches(wanted.casefold(), folded, n=1, cutoff=0.75)
    return folded[near[0]] if near else None


def _describe_step(step: StepRecord) -> str:
    match step.display_type:
        case StepType.SLEEP:
            return f"step {quote(step.name)} sleeps"
        case StepType.DO if step.waits_for_limits:
            return f"step {quote(step.name)} waits for {step.awaited}"
        case StepType.DO:
            return f"step {quote(step.name)} is retried later"
        case _:
            return f"step {quote(step.name)} waits for {step.awaited}"


def _due_at(step: StepRecord) -> float:
    at = step.next_retry_at or step.wake_at
    return float("inf") if at is None else at.timestamp()
