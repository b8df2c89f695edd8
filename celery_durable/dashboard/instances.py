"""The list of instances, and changes of all instances that match its filter: the `--where` text of the command line."""

from __future__ import annotations

import re
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from celery_durable.commands import Target
from celery_durable.conditions import Condition, read_condition
from celery_durable.dashboard.changes import CHANGES, Change, find_change, log_change
from celery_durable.dashboard.visits import Endpoint, Visit
from celery_durable.errors import CursorInvalid, DurableError, StoreUnavailable, ValueRefused
from celery_durable.http import timeouts
from celery_durable.insight.explain.summaries import Times
from celery_durable.model import OUTCOME_UNKNOWN, InstanceSummary, Page, Status
from celery_durable.wire.requests import RequestModel
from celery_durable.wire.responses import describe_refusal

_ROWS = 50
_EXAMINED_ROWS = 300
"""How many instances a page examines if lists do not filter by all fields of its condition."""
_PREVIEW_ROWS = 1000
_MAX_PREVIEWED = 10_000
_MAX_LISTED = 10
_BATCH_ROWS = 100
_BATCH_SECONDS = 2.0
"""After so long, a request that changes instances answers, and the browser sends the next one."""
_ANY = Condition()
_INSTANCE = re.compile(r"([^\s=/]+)/([^\s=/]+)")
"""A filter that is the name of one instance, as pages write it."""


def _read_where(text: str) -> Condition:
    return read_condition(text) if text.strip() else _ANY


def _read_page(visit: Visit, where: Condition, cursor: str, limit: int) -> Page[InstanceSummary]:
    """Return the matching ones among the next ``limit`` instances, redacted, and where to continue."""
    now = visit.now() if where.is_examined else None
    page = visit.operations.queries.list(
        where.workflow, status=where.listed_status, labels=where.labels, cursor=cursor or None, limit=limit
    )
    found = (visit.redaction(each.workflow, each.id).redact_summary(each) for each in page.items)
    return Page(tuple(each for each in found if now is None or where.matches(each, now)), page.cursor)


# --- the list -------------------------------------------------------------------------------------


def _show(visit: Visit) -> Response:
    text, cursor = visit.query.get("where", "").strip(), visit.query.get("cursor", "")
    if named := _INSTANCE.fullmatch(text):
        return visit.redirect(visit.instance_path(*named.groups()))
    error, status = "", 200
    page: Page[InstanceSummary] = Page((), None)
    where = _ANY
    try:
        where = _read_where(text)
        page = _read_page(visit, where, cursor, _EXAMINED_ROWS if where.is_examined else _ROWS)
    except (ValueRefused, CursorInvalid) as exc:
        error, status = str(exc), 400
    return visit.show(
        "instances.html",
        status=status,
        text=text,
        where=where,
        error=error,
        page=page,
        examined=_EXAMINED_ROWS if where.is_examined else None,
        is_first=not cursor,
        times=Times(visit.now(), exact=False),
        statuses={each: _with_status(text, each) for each in Status},
        changes=[each for name, each in CHANGES.items() if name in visit.offers],
    )


def _with_status(text: str, status: Status) -> str:
    """Return the text of the filter with this status, or without it if it has it already."""
    words = text.split()
    kept = [word for word in words if not word.startswith("status=")]
    return " ".join(kept if f"status={status}" in words else [*kept, f"status={status}"])


def _find_workflow(request: Request) -> str | None:
    """Return the workflow that the filter names, so that hooks see it as they see it in a request of the API."""
    try:
        return read_condition(request.query_params.get("where", "")).workflow
    except ValueRefused:  # the page says so
        return None


def _find_operation(request: Request) -> str:
    return "list_instances" if request.path_params.get("workflowName") else "list_all_instances"


# --- changes of many ------------------------------------------------------------------------------


def _preview(visit: Visit) -> Response:
    """Show which instances the command would change, without changing any."""
    change, text = find_change(visit.query.get("command", "")), visit.query.get("where", "").strip()
    where, found, cursor, examined = read_condition(text), list[InstanceSummary](), "", 0
    while True:
        page = _read_page(visit, where, cursor, _PREVIEW_ROWS)
        found += (each for each in page.items if where.selects(change.name, each.status))
        cursor, examined = page.cursor or "", examined + _PREVIEW_ROWS
        if not cursor or examined >= _MAX_PREVIEWED:
            break
    return visit.show(
        "change.html",
        change=change,
        text=text,
        count=len(found),
        is_exact=not cursor,
        listed=found[:_MAX_LISTED],
        unknown=sum(each.error is not None and each.error.name == OUTCOME_UNKNOWN for each in found),
        command=visit.command_line(change.format_command(where=text, family="family" in visit.query)),
    )


@dataclass(frozen=True, slots=True)
class Refusal:
    """An instance that a command did not change, and why."""

    target: Target
    sentence: str


async def _change(visit: Visit) -> Response:
    """Change the next instances that match. The page that answers has a form that continues below them."""
    form = visit.form
    change, reason = find_change(form.get("command", "")), form.get("reason", "").strip()
    text = visit.query.get("where", "")  # as in the preview, so that the hooks see its workflow
    where, cursor = read_condition(text), form.get("cursor", "")
    done, refused = (int(form[name]) if form.get(name, "").isdecimal() else 0 for name in ("done", "refused"))
    actor = await visit.find_actor(change.name, where.workflow)
    body = change.make_body(reason, actor, family="family" in visit.query)
    runtime, refusals = visit.site.durable.internals.runtime, list[Refusal]()
    until = runtime.monotonic() + _BATCH_SECONDS
    while True:
        rows = _EXAMINED_ROWS if where.is_examined else _BATCH_ROWS
        page = await timeouts.run_in_request_thread(_read_page, visit, where, cursor, rows)
        for item in page.items:
            if where.selects(change.name, item.status):
                refusal = await _change_one(visit, change, Target(item.workflow, item.id), body)
                done, refused = done + (refusal is None), refused + (refusal is not None)
                refusals += [] if refusal is None else [refusal]
        cursor = page.cursor or ""
        if not cursor or runtime.monotonic() > until:
            break
    log_change(actor, change, f"{done} instances where {text}, {refused} refused", reason)
    return visit.show(
        "changed.html",
        change=change,
        text=text,
        reason=reason,
        cursor=cursor,
        done=done,
        refused=refused,
        refusals=refusals[:_MAX_LISTED],
    )


async def _change_one(visit: Visit, change: Change, target: Target, body: RequestModel) -> Refusal | None:
    """Change an instance, if the hooks allow it. The others continue if one is refused, as in the command line."""
    await timeouts.pause(0)  # the time limits of a request count for one instance
    try:
        await visit.admit(change.name, target.workflow, target.instance_id)
        await timeouts.run_in_request_thread(change.apply, visit.operations, target, body)
    except StoreUnavailable:  # the others would wait for it, too
        raise
    except DurableError as exc:
        return Refusal(target, describe_refusal(exc))
    return None


_COMMANDS = tuple(CHANGES)
SHOW = Endpoint(_show, _find_operation, find_workflow=_find_workflow, offers=_COMMANDS)
PREVIEW = Endpoint(_preview, _find_operation, find_workflow=_find_workflow, offers=_COMMANDS)
CHANGE = Endpoint(_change, _find_operation, method="POST", find_workflow=_find_workflow)
