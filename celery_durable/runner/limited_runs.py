"""The limits of a workflow: a run takes them before its function is called, and holds them until it ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from celery_durable.model import LIMITS_KEY, OpenWait, StepRow, StepStatus, StepType, StepWrite
from celery_durable.runner.execution_context import ExecutionContext
from celery_durable.runner.limits import ServeLimits, build_request, build_wait
from celery_durable.runner.step_commit import Decision, StepCommit
from celery_durable.store.engine import Tx
from celery_durable.store.runs import limits
from celery_durable.store.runs.claims import GuardResult
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
