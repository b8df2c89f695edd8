"""Commits that take limits: those of a workflow, before its function is called, and those of what a step sends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from celery_durable.model import LIMITS_KEY, OpenWait, StepRow, StepStatus, StepType, StepWrite
from celery_durable.runner.execution_context import ExecutionContext
from celery_durable.runner.limits import ServeLimits, build_request, build_wait
from celery_durable.runner.step_commit import Decision, StepCommit
from celery_durable.runner.step_execution import StepExecution
from celery_durable.store.engine import Tx
from celery_durable.store.runs import limits
from celery_durable.store.runs.claims import GuardResult
from celery_durable.store.runs.holds import STEP, Waiter
from celery_durable.store.runs.limits import Reply
from celery_durable.values import Limit


def take_workflow_limits(
    context: ExecutionContext, given: Sequence[Limit], row: StepRow | None, holder: str
) -> OpenWait | None:
    """Commit that a run takes the limits of its workflow, or waits; returns what it waits for.

    ``row``: what is recorded of them. ``holder``: the result of that row once the run has them.
    """
    claim, commit_id = context.claim, next(context.lease.commit_ids)
    waits = row is not None and row.waits_for_limits
    request = replace(build_request(context.lease, context.event, LIMITS_KEY, row, given), token=None)
    replies: list[Reply] = []

    def decide(tx: Tx, guard_result: GuardResult) -> Decision:
        del guard_result
        replies[:], served = limits.ask(tx, [request])
        holds = replies[0].holds
        status, result = (StepStatus.COMPLETED, holder) if holds else (StepStatus.WAITING, None)
        replaces = None if row is None else row.commit_id
        write = StepWrite(LIMITS_KEY, 0, "limits", StepType.DO, status, replaces, commit_id, result=result)
        return Decision([] if waits and not holds else [write], [ServeLimits(served)])

    context.commit(StepCommit(commit_id, decide=decide, shows_progress=False))
    return None if replies[0].holds else build_wait(claim, LIMITS_KEY, replies[0])


def commit_with_limits(
    context: ExecutionContext,
    execution: StepExecution,
    given: Sequence[Limit],
    *,
    commit_id: str,
    attempt: int,
    token: str,
    position: int = STEP,
    send: Callable[[Tx, GuardResult], Decision],
) -> None:
    """Commit what a step sends once it has its limits, or that it waits for them.

    ``send`` decides under the lock what is sent. ``token`` and ``position``: of the hold that belongs to it.
    """
    claim, key, row = context.claim, execution.key, context.replay_state.rows.get(execution.key)
    request = replace(
        build_request(context.lease, context.event, key, row, given),
        waiter=Waiter(claim.pk, claim.ref.run_number, key, position),
        token=token,
    )
    kept: dict[str, Any] = {}
    if row is not None and row.error_name is not None:
        kept["error"] = row.error_name, row.error_message or ""
    waits = row is not None and row.waits_for_limits
    replies: list[Reply] = []

    def decide(tx: Tx, guard_result: GuardResult) -> Decision:
        replies[:], served = limits.ask(tx, [request])
        if replies[0].holds:
            sent = send(tx, guard_result)
            return Decision(sent.writes, [*sent.parts, ServeLimits(served)])
        write = context.build_write(
            execution, StepStatus.WAITING, attempts=attempt - 1, commit_id=commit_id, keeps_limits=True, **kept
        )
        return Decision([] if waits else [write], [ServeLimits(served)])

    context.commit(StepCommit(commit_id, decide=decide), execution)
    if not replies[0].holds:
        execution.wait = build_wait(claim, key, replies[0])
