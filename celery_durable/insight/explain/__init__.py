"""Explain why an instance does not move: turn facts from the database into one diagnosis for a person.

This package is pure: it uses no SQL, no Celery and no clock. Any facts have exactly one diagnosis.
"""

from __future__ import annotations

import shlex
from dataclasses import replace
from datetime import datetime, timedelta

from celery_durable.errors import (
    Cancelled,
    StepLimitExceeded,
    StepNameReused,
    StepTypeMismatch,
    WorkerCrashLoop,
    WorkflowParamsInvalid,
)
from celery_durable.errors.base import name_error
from celery_durable.insight.explain.codes import YOUR_APP, Code, instance_command
from celery_durable.insight.explain.due import explain_due
from celery_durable.insight.explain.facts import Diagnosis, Facts
from celery_durable.insight.explain.phrases import (
    EXECUTION_IS_OFF,
    build_diagnosis,
    count_attempts,
    describe_last_death,
    describe_missing_dispatcher,
    describe_running,
    describe_silence,
    describe_worker_deaths,
    format_age,
    format_end,
    format_remaining,
    has_dispatcher,
    inspect_worker_command,
    locate_error,
    quote,
    shorten,
    start_dispatcher_command,
)
from celery_durable.insight.explain.waits import explain_waiting, list_steps, waiting_steps
from celery_durable.model import OUTCOME_UNKNOWN, Status, StepStatus, WorkflowKind, format_duration, iso

__all__ = ["YOUR_APP", "Code", "Diagnosis", "Facts", "explain"]

_CHANGED_CODE = frozenset({StepNameReused.__name__, StepTypeMismatch.__name__})
_JUST_NOW = timedelta(seconds=1)
_OF_PARAMETERS = frozenset({"KeyError", WorkflowParamsInvalid.__name__})


def explain(facts: Facts) -> Diagnosis:
    """Return the diagnosis of these facts."""
    found = _explain_status(facts)
    return found if facts.instance.status.is_terminal else _add_limit(facts, _add_cancel(facts, found))


def _add_cancel(facts: Facts, found: Diagnosis) -> Diagnosis:
    """Say before the diagnosis that the run was asked to stop, if it was."""
    if (at := facts.run.cancel_requested_at) is None:
        return found
    reason = facts.run.reason if facts.cancellation is None else facts.cancellation.reason
    why = "" if reason is None else f" ({shorten(reason)})"
    if facts.instance.kind is WorkflowKind.LINEAR:
        effect = "it ends before its next step"
    elif facts.cancellation is None:
        effect = "its workflow gets Cancelled at its next step call"
    else:
        effect = "its workflow cleans up"
    return replace(found, sentence=f"It was cancelled {format_age(facts, at)} ago{why}; {effect}. {found.sentence}")


def _add_limit(facts: Facts, found: Diagnosis) -> Diagnosis:
    """Add until when the run may take, if that is limited."""
    row, started_at = facts.instance, facts.run.started_at
    limit, name = (row.max_run, "max_run") if row.max_run is not None else (facts.max_run_duration, "max_run_duration")
    if limit is None:
        return found
    length = format_duration(limit)
    if started_at is None:
        sentence = f"From its start it may take {length}, its {name}."
    elif (ends_at := started_at + limit) > facts.now:
        sentence = f"It is terminated {format_remaining(facts, ends_at)} unless it ends before: its {name} is {length}."
    else:
        sentence = f"It has taken longer than its {name} of {length}, so it is terminated before its next step."
    known = {"max_run": limit.total_seconds(), "ends_by": None if started_at is None else iso(started_at + limit)}
    return replace(found, sentence=f"{found.sentence} {sentence}", facts={**found.facts, **known})


def _explain_status(facts: Facts) -> Diagnosis:
    row = facts.instance
    match row.status:
        case Status.COMPLETE:
            return build_diagnosis(facts, Code.DONE, f"It completed{format_end(facts)}.")
        case Status.TERMINATED:
            how, _, why = (facts.run.reason or "").partition(": ")
            if facts.run.cancel_requested_at is None or how != str(Cancelled()):
                how, why = "terminated", facts.run.reason or ""
            sentence = f"It was {how}{format_end(facts)}{why and f': {shorten(why)}'}."
            return build_diagnosis(facts, Code.TERMINATED, sentence, instance_command(row, "restart"))
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
            return explain_due(facts)


# --- ended --------------------------------------------------------------------------------------


def _explain_failed(facts: Facts) -> Diagnosis:
    run, step, row = facts.run, facts.last_step, facts.instance
    name = run.error_name or "an error"
    error = name_error(name, shorten(run.error_message))
    sentence = f"It failed{format_end(facts)} with {error}"
    if step is not None and step.error is not None and step.error.name == run.error_name:
        sentence += f" (step {quote(step.name)}, {count_attempts(step)})"
    code = Code.FAILED
    if name == StepLimitExceeded.__name__:
        code = Code.STEP_LIMIT
    elif name in _CHANGED_CODE:
        code = Code.NONDETERMINISTIC
        sentence += ". The workflow's code does not match the recorded steps"
    sentence = f"{sentence.rstrip('.')}.{locate_error(facts, None if step is None else step.step_key)}"
    if name == WorkerCrashLoop.__name__:
        sentence += describe_last_death(facts)
    if name in _OF_PARAMETERS:
        sentence += " Retry and restart keep the parameters: if they are wrong, start a new instance."
    if facts.cancellation is not None:
        sentence += " It had been cancelled, and failed in its cleanup; a retry continues the cleanup."
    again = instance_command(row, "retry")
    if facts.failed_children:
        child, status = facts.failed_children[0]
        cause, more = (
            ("causes were its children", ", and others") if facts.failed_children[1:] else ("cause was its child", "")
        )
        sentence += f" The {cause} {child.workflow}/{child.instance_id}, which is {status}{more}."
        again = instance_command(row, "retry", "--family")
    actions = [instance_command(row, "show", "--full"), again]
    if name == OUTCOME_UNKNOWN:
        code = Code.OUTCOME_UNKNOWN
        sentence += _describe_lost_attempt(facts)
        if step is not None and step.error is not None and step.error.name == name:
            key = shlex.quote(step.step_key)
            actions.append(instance_command(row, "set-result", f"{key} '<its result as JSON>'"))
            actions.append(instance_command(row, "skip", key))
    else:
        actions.append(instance_command(row, "restart"))
    return build_diagnosis(facts, code, sentence, *actions)


def _describe_lost_attempt(facts: Facts) -> str:
    """Return when the unknown end was noticed, and which worker ran the attempt; with a leading space."""
    attempt = facts.last_attempt
    if attempt is None:
        return ""
    worker = "" if attempt.worker is None else f" on {attempt.worker}"
    return f" The attempt{worker} was found lost {format_age(facts, attempt.ended_at)} ago, at {iso(attempt.ended_at)}."


# --- claimed by a worker ------------------------------------------------------------------------


def _explain_claimed(facts: Facts) -> Diagnosis:
    row, now = facts.instance, facts.now
    node = row.claimed_by or "a worker"
    silence = describe_silence(facts, [beat for beat in facts.heartbeats if beat.node == node])
    if row.lease_until is None or row.lease_until <= now:
        since = "" if row.lease_until is None else f", which ended {format_age(facts, row.lease_until)} ago"
        silent = f", and has been silent {silence}" if silence else ""
        sentence = f"The worker {node} stopped renewing its lease{since}{silent}. "
        if not facts.is_execution_enabled:
            return build_diagnosis(facts, Code.EXECUTION_DISABLED, f"{sentence}Now {EXECUTION_IS_OFF}")
        if has_dispatcher(facts):
            sentence += (
                "A dispatcher will let another worker take over; a dispatcher that has just started first waits for "
                "the length of one lease."
            )
            return build_diagnosis(facts, Code.LEASE_EXPIRED, sentence)
        return build_diagnosis(
            facts, Code.LEASE_EXPIRED, sentence + describe_missing_dispatcher(facts), *start_dispatcher_command(facts)
        )
    if facts.is_pausing:
        sentence = f"A pause is requested; it takes effect when the running step ends. It runs {_describe_work(facts)}."
        return build_diagnosis(facts, Code.PAUSED, sentence, instance_command(row, "resume"))
    left = format_duration(row.lease_until - now)
    sentence = f"It runs {_describe_work(facts)}; the lease is valid for {left}."
    if row.crash_count:
        sentence += f" Before that, {describe_worker_deaths(facts)}"
    if silence is None:
        return build_diagnosis(facts, Code.RUNNING, sentence, instance_command(row, "logs", "--follow"))
    sentence += (
        f" But that worker has been silent {silence}: it is frozen or dead, or cannot reach the database. If it stays "
        "silent, another worker takes over when the lease ends."
    )
    return build_diagnosis(facts, Code.WORKER_SILENT, sentence, *inspect_worker_command(node))


def _describe_work(facts: Facts) -> str:
    """Return what the worker does: ``step "report", attempt 1, for 57 s, on celery@vm``, and how old that news is.

    A worker reports its running step when it renews its lease, and nothing when a step begins.
    """
    row, last, running = facts.instance, facts.last_step, facts.instance.running
    node = row.claimed_by or "a worker"
    if running is not None and (last is None or last.step_key != running.step_key):
        names = {step.step_key: step.name for step in facts.open_steps}
        lasted = f"for {format_age(facts, min(running.since, facts.now))}"
        return f"{describe_running(running, names.get(running.step_key), lasted)}, on {node}{_format_news(facts, None)}"
    started = [step.name for step in facts.open_steps if step.status in (StepStatus.PENDING, StepStatus.RUNNING)]
    if started:
        doing = ("step " if len(started) == 1 else "steps ") + ", ".join(map(quote, started[:5]))
    elif last is not None:
        doing = f"the code after step {quote(last.name)}"
    else:
        doing = "the code before its first step"
    news = _format_news(facts, None if last is None else last.finished_at)
    return f"{doing}, on {node}, which has held it for {format_age(facts, row.updated_at)}{news}"


def _format_news(facts: Facts, recorded_at: datetime | None) -> str:
    """Return ``, as of 8 s ago``: when the worker renewed its lease, or recorded a step after that."""
    lease_until = facts.instance.lease_until
    known = [at for at in (recorded_at, None if lease_until is None else lease_until - facts.lease) if at is not None]
    if not known or facts.now - max(known) < _JUST_NOW:
        return ""
    return f", as of {format_age(facts, max(known))} ago"
