"""The page of one instance: why it is where it is, what to do, and one list of a run at a time.

Each list is a bounded read. The page of a step has what is large: its result and its tracebacks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import Response

from celery_durable.commands import Target
from celery_durable.dashboard.actions import read_run_number, read_target
from celery_durable.dashboard.changes import CHANGES, INSTANCE_CHANGES, STEP_CHANGES, read_remedies
from celery_durable.dashboard.timeline import WIDTH, Phase, draw
from celery_durable.dashboard.visits import Endpoint, Visit
from celery_durable.errors import StepNotFound
from celery_durable.insight.explain import Facts, explain
from celery_durable.insight.explain.summaries import Times
from celery_durable.model import HistoryPage, InstanceHead, Status
from celery_durable.redaction import Redaction
from celery_durable.store.runs.history import StepFilter

_STEPS = 200
_ROWS = 50
_MAX_ATTEMPTS = 500
"""How many failed attempts a timeline draws."""
_UNCHANGEABLE = (Status.COMPLETE, Status.TERMINATED)


_LISTS = {"steps": "steps", "step": "steps", "attempts": "attempts", "events": "events", "log": "logs", "run": "audit"}
"""Which list of the run each view reads."""


def _show(visit: Visit) -> Response:
    workflow, instance_id = read_target(visit.request)
    redaction = _find_redaction(visit)
    facts = visit.operations.queries.facts(workflow, instance_id)
    view = "step" if "step" in visit.query else visit.query.get("view", "")
    view = view if view in _LISTS else "steps"
    run = redaction.redact_page(_read_run(visit, facts.head, view))
    diagnosis = explain(facts.redacted(redaction))
    show = _VIEWS.get(view)
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
        **({} if show is None else show(visit, facts, run)),
    )


def _read_run(visit: Visit, head: InstanceHead, view: str) -> HistoryPage:
    """Return the run that the address names, with the list of this view."""
    cursor, shown = visit.query.get("cursor") or None, _LISTS[view]
    return visit.operations.history.page(
        head.instance.workflow,
        head.instance.instance_id,
        run=read_run_number(visit.query.get("run", "")),
        head=head,
        limit=_STEPS if view == "steps" else _ROWS,
        newest_first=shown != "steps",
        where=StepFilter(key=visit.query["step"]) if view == "step" else _read_filter(visit),
        with_results=view == "step",
        **{f"with_{each}": each == shown for each in _LISTS.values()},  # type: ignore[arg-type]
        **({} if shown == "audit" else {f"{shown}_cursor": cursor}),  # type: ignore[arg-type]
    )


def _find_redaction(visit: Visit) -> Redaction:
    return visit.redaction(*read_target(visit.request))


def _read_filter(visit: Visit) -> StepFilter:
    return StepFilter(text=visit.query.get("find", "").strip(), has_error=visit.query.get("only") == "failed")


# --- the views ------------------------------------------------------------------------------------


def _show_steps(visit: Visit, facts: Facts, run: HistoryPage) -> dict[str, Any]:
    head, steps, is_current = facts.head, run.steps.items, run.run_number == facts.instance.run_number
    failed = [step.step_key for step in steps if step.error is not None or step.attempts > 1]
    attempts = []
    if failed:
        attempts = visit.operations.history.attempts(
            *read_target(visit.request), run=run.run_number, steps=failed, limit=_MAX_ATTEMPTS, head=head
        )
    running = head.instance.running if is_current else None
    return {
        "steps": steps,
        "timeline": draw(
            run,
            steps,
            attempts,
            running,
            head.now,
            is_first_page="cursor" not in visit.query,
            limits={each.step_key: each.limit.name for each in facts.limit_waits if is_current},
        ),
        "phases": list(Phase),
        "bar_width": WIDTH,
        "chosen": _read_filter(visit),
    }


def _show_step(visit: Visit, facts: Facts, run: HistoryPage) -> dict[str, Any]:
    key, where, redaction = visit.query["step"], read_target(visit.request), _find_redaction(visit)
    if not run.steps.items:
        raise StepNotFound(*where, run.run_number, key, [])
    step = run.steps.items[0]
    attempts = visit.operations.history.attempts(*where, run=run.run_number, steps=[key], limit=_ROWS, head=facts.head)
    is_completable = (step.finished_at is None or step.error is not None) and facts.instance.status not in _UNCHANGEABLE
    possible = {"rewind", "fork", *(["set_result", "skip"] if is_completable else [])}
    return {
        "step": step,
        "step_changes": [each for name, each in STEP_CHANGES.items() if name in possible & visit.offers],
        "attempts": [redaction.redact_attempt(each) for each in attempts],
    }


def _show_run(visit: Visit, facts: Facts, run: HistoryPage) -> dict[str, Any]:
    where = read_target(visit.request)
    published = visit.operations.history.published(*where, run=run.run_number, head=facts.head)
    return {"published": _find_redaction(visit).redact_published(published)}


View = Callable[[Visit, Facts, HistoryPage], Mapping[str, Any]]
_VIEWS: dict[str, View] = {"steps": _show_steps, "run": _show_run, "step": _show_step}


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
