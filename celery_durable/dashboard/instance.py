"""The page of one instance: why it is where it is, what to do, and one list of a run at a time.

Each list is a bounded read. The page of a step has what is large: its result and its tracebacks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import Response

from celery_durable.commands import Target
from celery_durable.dashboard.actions import read_target
from celery_durable.dashboard.changes import CHANGES, INSTANCE_CHANGES, STEP_CHANGES, read_remedies
from celery_durable.dashboard.timeline import WIDTH, Phase, draw
from celery_durable.dashboard.visits import Endpoint, Visit
from celery_durable.errors import CursorInvalid, StepNotFound
from celery_durable.insight.explain import Facts, explain
from celery_durable.insight.explain.summaries import Times
from celery_durable.model import HistoryPage, Status
from celery_durable.redaction import Redaction
from celery_durable.store.runs.history import StepFilter

_STEPS = 200
_ROWS = 50
_MAX_ATTEMPTS = 500
"""How many failed attempts a timeline draws."""
_MAX_DIGITS = 9
_UNCHANGEABLE = (Status.COMPLETE, Status.TERMINATED)


def _show(visit: Visit) -> Response:
    workflow, instance_id = read_target(visit.request)
    redaction = visit.redaction(workflow, instance_id)
    facts = visit.operations.queries.facts(workflow, instance_id).redacted(redaction)
    view = "step" if "step" in visit.query else visit.query.get("view", "")
    view = view if view in _VIEWS else "steps"
    run = _read_run(visit, facts, redaction, view)
    diagnosis = explain(facts)
    return visit.show(
        "instance.html",
        row=facts.instance,
        diagnosis=diagnosis,
        remedies=read_remedies(diagnosis.actions),
        view=view,
        run=run,
        is_current=run.run_number == facts.instance.run_number,
        now=facts.now,
        times=Times(facts.now, exact=False),
        target=Target(workflow, instance_id),
        changes=[
            each for name, each in CHANGES.items() if name in visit.offers and each.is_possible(facts.instance.status)
        ],
        **_VIEWS[view](visit, facts, redaction, run),
    )


def _read_run(visit: Visit, facts: Facts, redaction: Redaction, view: str) -> HistoryPage:
    """Return the run that the address names, with the list of this view."""
    number, cursor = visit.query.get("run", ""), visit.query.get("cursor") or None
    run = int(number) if number.isdecimal() and len(number) <= _MAX_DIGITS else facts.instance.run_number
    page = visit.operations.history.page(
        facts.instance.workflow,
        facts.instance.instance_id,
        run=run,
        limit=_ROWS,
        newest_first=True,
        with_steps=False,
        with_events=view == "events",
        with_logs=view == "log",
        with_attempts=view == "attempts",
        with_audit=view == "run",
        events_cursor=cursor if view == "events" else None,
        logs_cursor=cursor if view == "log" else None,
        attempts_cursor=cursor if view == "attempts" else None,
    )
    return redaction.redact_page(page)


# --- the views ------------------------------------------------------------------------------------


def _show_steps(visit: Visit, facts: Facts, redaction: Redaction, run: HistoryPage) -> dict[str, Any]:
    where = facts.instance.workflow, facts.instance.instance_id
    history, after = visit.operations.history, visit.query.get("cursor", "")
    chosen = StepFilter(text=visit.query.get("find", "").strip(), has_error=visit.query.get("only") == "failed")
    found = history.steps(
        *where,
        run=run.run_number,
        after=_read_position(after) if after else None,
        limit=_STEPS + 1,
        where=chosen,
        with_results=False,
    )
    steps = [redaction.redact_step(step) for _, step in found[:_STEPS]]
    attempts = history.attempts(*where, run=run.run_number, limit=_MAX_ATTEMPTS)
    running = facts.instance.running if run.run_number == facts.instance.run_number else None
    last = found[_STEPS - 1] if len(found) > _STEPS else None
    return {
        "steps": steps,
        "timeline": draw(run, steps, attempts, running, facts.now, is_first_page=not after),
        "phases": list(Phase),
        "bar_width": WIDTH,
        "chosen": chosen,
        "cursor": "" if last is None else f"{last[0]}.{last[1].step_key}",
    }


def _read_position(text: str) -> tuple[int, str]:
    """Read the position after which a page of steps begins; raises CursorInvalid."""
    seq, dot, key = text.partition(".")
    if not (seq.isdecimal() and len(seq) <= _MAX_DIGITS and dot):
        raise CursorInvalid(text)
    return int(seq), key


def _show_step(visit: Visit, facts: Facts, redaction: Redaction, run: HistoryPage) -> dict[str, Any]:
    key, where = visit.query["step"], (facts.instance.workflow, facts.instance.instance_id)
    history = visit.operations.history
    found = history.steps(*where, run=run.run_number, limit=1, where=StepFilter(key=key))
    if not found:
        raise StepNotFound(*where, run.run_number, key, [])
    attempts = history.attempts(*where, run=run.run_number, limit=_ROWS, step_key=key)
    step, status = found[0][1], facts.instance.status
    is_completable = (step.finished_at is None or step.error is not None) and status not in _UNCHANGEABLE
    possible = {"rewind", "fork", *(["set_result", "skip"] if is_completable else [])}
    return {
        "step": redaction.redact_step(step),
        "step_changes": [each for name, each in STEP_CHANGES.items() if name in possible & visit.offers],
        "attempts": [redaction.redact_attempt(each) for each in attempts],
    }


def _show_run(visit: Visit, facts: Facts, redaction: Redaction, run: HistoryPage) -> dict[str, Any]:
    where = facts.instance.workflow, facts.instance.instance_id
    published = visit.operations.history.published(*where, run=run.run_number)
    return {"published": redaction.redact_published(published)}


View = Callable[[Visit, Facts, Redaction, HistoryPage], Mapping[str, Any]]
_VIEWS: dict[str, View] = {
    "steps": _show_steps,
    "attempts": lambda *_: {},
    "events": lambda *_: {},
    "log": lambda *_: {},
    "run": _show_run,
    "step": _show_step,
}


# --- following it ----------------------------------------------------------------------------------


async def _stream(visit: Visit) -> Response:
    """Follow a run, as the API does: the page reads itself again if a message comes."""
    if visit.request.method == "HEAD":  # it would not end
        raise HTTPException(405)
    if not visit.can_stream:
        raise HTTPException(501, "This server cannot send a stream.")
    workflow, instance_id = read_target(visit.request)
    return await visit.site.reading.stream(
        workflow, instance_id, last_event_id=visit.request.headers.get("last-event-id")
    )


SHOW = Endpoint(_show, "get", offers=(*INSTANCE_CHANGES, "send_event"))
STREAM = Endpoint(_stream, "stream")
