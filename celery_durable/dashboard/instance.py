"""The page of one instance: why it is where it is, what to do, and the steps of a run."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from celery_durable.commands import COMMANDS, Target
from celery_durable.dashboard.changes import CHANGES, find_change, log_change, read_remedies
from celery_durable.dashboard.visits import Endpoint, Visit
from celery_durable.http import timeouts
from celery_durable.insight.explain import explain
from celery_durable.insight.explain.summaries import Times
from celery_durable.model import Permission

_ROWS = 100


def _show(visit: Visit) -> Response:
    workflow, instance_id = _read_target(visit.request)
    redaction = visit.redaction(workflow, instance_id)
    facts = visit.operations.queries.facts(workflow, instance_id).redacted(redaction)
    run = visit.query.get("run", "")
    history = redaction.redact_page(
        visit.operations.history.page(
            workflow,
            instance_id,
            run=int(run) if run.isdecimal() else None,
            limit=_ROWS,
            steps_cursor=visit.query.get("steps") or None,
        )
    )
    diagnosis = explain(facts)
    return visit.show(
        "instance.html",
        row=facts.instance,
        diagnosis=diagnosis,
        remedies=read_remedies(diagnosis.actions),
        history=history,
        now=facts.now,
        times=Times(facts.now, exact=False),
        changes=[
            each for name, each in CHANGES.items() if name in visit.offers and each.is_possible(facts.instance.status)
        ],
    )


async def _change(visit: Visit) -> Response:
    workflow, instance_id = _read_target(visit.request)
    change, reason = find_change(visit.request.path_params["command"]), visit.form.get("reason", "").strip()
    actor = await visit.find_actor(change.name, workflow, instance_id)
    body, target = change.make_body(reason, actor), Target(workflow, instance_id)
    await timeouts.run_in_request_thread(change.apply, visit.operations, target, body)
    log_change(actor, change, f"{workflow}/{instance_id}", reason)
    return visit.redirect(visit.instance_path(workflow, instance_id))


def _read_target(request: Request) -> tuple[str, str]:
    return request.path_params["workflowName"], request.path_params["instanceId"]


def _find_command(request: Request) -> str:
    name: str = request.path_params["command"]
    if name not in CHANGES:
        raise HTTPException(404)
    return name


def _find_permission(request: Request) -> Permission:
    return COMMANDS[_find_command(request)].permission


SHOW = Endpoint(_show, "get", offers=tuple(CHANGES))
CHANGE = Endpoint(_change, _find_command, method="POST", permission=_find_permission)
