"""The form of a command on one instance: what it will do, its command line, and a reason. Sending it does it."""

from __future__ import annotations

import json
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from celery_durable.commands import COMMANDS, Target
from celery_durable.dashboard.changes import INSTANCE_CHANGES, Change, log_change
from celery_durable.dashboard.visits import Endpoint, ReadOnly, Visit
from celery_durable.errors import ValueRefused
from celery_durable.http import Forbidden, timeouts
from celery_durable.model import OUTCOME_UNKNOWN, Permission, Status

_MAX_LISTED = 200
_MAX_DIGITS = 9


def read_target(request: Request) -> tuple[str, str]:
    """Return the workflow and the id of the instance of a path."""
    return request.path_params["workflowName"], request.path_params["instanceId"]


def read_run_number(text: str) -> int | None:
    """Return the number of a run; None, which means the current run, if it is no number."""
    return int(text) if text.isdecimal() and len(text) <= _MAX_DIGITS else None


def _find_command(request: Request) -> str:
    name: str = request.path_params["command"]
    if name not in INSTANCE_CHANGES:
        raise HTTPException(404)
    return name


def _find_permission(request: Request) -> Permission:
    return COMMANDS[_find_command(request)].permission


async def _ask(visit: Visit) -> Response:
    """Show the form. It changes nothing."""
    change = INSTANCE_CHANGES[_find_command(visit.request)]
    if visit.is_read_only:
        raise ReadOnly
    if change.name not in visit.offers:
        raise Forbidden
    actor = await visit.find_actor(change.name, *read_target(visit.request))
    return await timeouts.run_in_request_thread(_show_form, visit, change, actor)


def _show_form(visit: Visit, change: Change, actor: str | None, *, error: str = "") -> Response:
    workflow, instance_id = read_target(visit.request)
    target, step = Target(workflow, instance_id), visit.query.get("step", "")
    if "step" in change.fields and not step:
        raise ValueRefused("The address names no step: choose one on the page of the instance.")
    operations = visit.operations
    found = operations.queries.details(workflow, instance_id)[1].details
    again = operations.rewind.preview(workflow, instance_id, step) if change.name in ("rewind", "fork") else []
    family = []
    if "family" in change.fields and found.status is Status.ERRORED:
        family = operations.families.preview_retry(workflow, instance_id)
    arguments = [step] if step else []
    arguments += ["RESULT"] if "result" in change.fields else []
    arguments += ["--family"] if visit.query.get("family") else []
    return visit.show(
        "action.html",
        status=400 if error else 200,
        change=change,
        target=target,
        instance_status=found.status,
        step=step,
        about=change.about,
        again=again[:_MAX_LISTED],
        more=len(again[_MAX_LISTED:]),
        family=family[:_MAX_LISTED],
        is_family_chosen="family" in visit.query,
        is_outcome_unknown=change.name in ("retry", "restart")
        and found.error is not None
        and found.error.name == OUTCOME_UNKNOWN,
        asks_name="by" in change.fields and actor is None,
        command=visit.command_line(change.format_command_of(target, *arguments)),
        error=error,
    )


async def _change(visit: Visit) -> Response:
    workflow, instance_id = read_target(visit.request)
    change, reason = INSTANCE_CHANGES[_find_command(visit.request)], visit.form.get("reason", "").strip()
    target = Target(workflow, instance_id)
    actor = await visit.find_actor(change.name, workflow, instance_id)
    try:
        given = _read_fields(visit)
    except ValueRefused as exc:
        return await timeouts.run_in_request_thread(_show_form, visit, change, actor, error=str(exc))
    body = change.make_body(reason, actor or visit.form.get("by", "").strip() or None, **given)
    body = await visit.site.commands.complete(change.name, visit.request, target, body)
    await timeouts.run_in_request_thread(change.apply, visit.operations, target, body)
    log_change(actor, change, f"{workflow}/{instance_id} {visit.query.get('step', '')}".strip(), reason)
    return visit.redirect(visit.instance_path(workflow, getattr(body, "id", None) or instance_id))


def _read_fields(visit: Visit) -> dict[str, Any]:
    """Return what the form has besides a reason and a name, for the commands that have these fields."""
    form = visit.form
    given: dict[str, Any] = {
        "step": visit.query.get("step", ""),
        "id": form.get("id", "").strip() or None,
        "family": "family" in form,
        "children": "no-children" not in form,
    }
    if "result" in form:
        try:
            given["result"] = json.loads(form["result"])
        except ValueError as exc:
            raise ValueRefused(f"The result is not JSON: {exc}. Text needs quotation marks.") from exc
    return given


ASK = Endpoint(_ask, "get", offers=tuple(INSTANCE_CHANGES))
CHANGE = Endpoint(_change, _find_command, method="POST", permission=_find_permission)
