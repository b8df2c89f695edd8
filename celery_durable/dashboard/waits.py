"""The page of the waits: who waits for what, since when and for whom; and the form that answers a question.

A GET request never answers. An answer is checked before it is stored, and the first one counts.
"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.responses import Response

from celery_durable.commands import COMMANDS, Target
from celery_durable.dashboard.actions import read_run_number, read_target
from celery_durable.dashboard.changes import format_command, log_answer
from celery_durable.dashboard.forms import make_fields, read_form
from celery_durable.dashboard.visits import Endpoint, Visit
from celery_durable.errors import EventRefused
from celery_durable.http import timeouts
from celery_durable.model import EventWait, WaitFilter
from celery_durable.wire.requests import SendEvent

_ROWS = 50
_ANSWER = COMMANDS["send_event"]


def _show(visit: Visit) -> Response:
    to, is_all, cursor = visit.query.get("to", "").strip(), visit.query.get("show") == "all", visit.query.get("cursor")
    chosen = WaitFilter(to=to or None, is_asking=not is_all)
    page = visit.operations.stats.waits(chosen, cursor=cursor or None, limit=_ROWS)
    return visit.show(
        "waits.html",
        waits=[visit.redaction(each.workflow, each.instance_id).redact_wait(each) for each in page.items],
        cursor=page.cursor,
        is_first=not cursor,
        to=to,
        is_all=is_all,
        is_answered="answered" in visit.query,
        now=visit.now(),
    )


async def _ask(visit: Visit) -> Response:
    """Show a question, and the form of its answer."""
    actor = await visit.find_actor(_ANSWER.name, *read_target(visit.request))
    wait = await timeouts.run_in_request_thread(_read_question, visit)
    return await timeouts.run_in_request_thread(_show_form, visit, wait, actor)


def _read_question(visit: Visit) -> EventWait:
    """Return the open question that the address names; raises AnswerTooLate, which says who has answered."""
    workflow, instance_id = read_target(visit.request)
    found = visit.operations.asks.read(workflow, instance_id, visit.query.get("step", ""))
    return visit.redaction(workflow, instance_id).redact_wait(found)


def _show_form(visit: Visit, wait: EventWait, actor: str | None, problems: Sequence[tuple[str, str]] = ()) -> Response:
    fields = make_fields(wait.schema)
    target = Target(wait.workflow, wait.instance_id)
    return visit.show(
        "answer.html",
        status=422 if problems else 200,
        wait=wait,
        fields=fields,
        problems={each.input_name: [text for path, text in problems if each.has_problem(path)] for each in fields},
        others=[each for each in problems if not any(field.has_problem(each[0]) for field in fields)],
        asks_name=actor is None,
        now=visit.now(),
        command=visit.command_line(format_command("answer", target, wait.step_key, "ANSWER")),
    )


async def _answer(visit: Visit) -> Response:
    workflow, instance_id = read_target(visit.request)
    target, form = Target(workflow, instance_id), visit.form
    wait = await timeouts.run_in_request_thread(_read_question, visit)
    payload, problems = read_form(make_fields(wait.schema), form)
    actor = await visit.find_actor(_ANSWER.name, workflow, instance_id)
    if not problems:
        body = SendEvent(
            answers=wait.step_key,
            payload=payload,
            by=form.get("by", "").strip() or None,
            run_number=read_run_number(form.get("run", "")),
        )
        body = await visit.site.commands.complete(_ANSWER.name, visit.request, target, body)
        try:
            await timeouts.run_in_request_thread(_ANSWER.run, visit.operations, target, body)
        except EventRefused as exc:
            problems = exc.problems
        else:
            log_answer(body.by, f"{workflow}/{instance_id} {wait.step_key}")
            return visit.redirect(visit.path("waits", to=visit.query.get("to", ""), answered="yes"))
    return await timeouts.run_in_request_thread(_show_form, visit, wait, actor, problems)


SHOW = Endpoint(_show, "waits", offers=(_ANSWER.name,))
ASK = Endpoint(_ask, "get", offers=(_ANSWER.name,))
ANSWER = Endpoint(_answer, _ANSWER.name, method="POST", permission=_ANSWER.permission, offers=(_ANSWER.name,))
