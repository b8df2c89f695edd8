"""Limits of a run and of its steps: what they ask for, and the commit that takes the limits or lets them wait."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from celery_durable.model import LIMITS_KEY, Claim, OpenWait, StepStatus, StepType, StepWrite, from_us
from celery_durable.runner.commit_parts import CommitPart, ServeLimits
from celery_durable.runner.execution_context import ExecutionContext
from celery_durable.runner.step_commit import Decision, StepCommit
from celery_durable.runner.step_execution import StepExecution
from celery_durable.store.engine import Tx
from celery_durable.store.runs import holds, limits
from celery_durable.store.runs.claims import GuardResult
from celery_durable.store.runs.holds import STEP, Waiter
from celery_durable.store.runs.limits import Reply, Request
from celery_durable.values import Limit

NO_DEADLINE = timedelta(days=365)
"""How long a step waits for limits at most before its run checks them by itself."""


def build_request(
    context: ExecutionContext, key: str, given: Sequence[Limit], *, token: str | None, position: int = STEP
) -> Request:
    """Build what a step asks for; raises what the functions ``by`` and ``fair`` of its limits raise.

    ``token`` and ``position``: of the hold that it gets.
    """
    claim, row = context.claim, context.replay_state.rows.get(key)
    with context.lease.user_code():
        uses = [limit.use(context.event) for limit in given]
    waiter = Waiter(claim.pk, claim.ref.run_number, key, position)
    return Request(waiter, uses, token, is_new=row is None, resumes=row is not None and row.attempts > 0)


@dataclass(frozen=True, slots=True)
class LimitedCall:
    """A step, or a run, that asks for limits.

    ``take``: decides under the lock what is written once it has them. ``build_wait``: builds the row of its wait.
    """

    request: Request
    take: Callable[[Tx, GuardResult], Decision]
    build_wait: Callable[[GuardResult], StepWrite]

    @classmethod
    def of_step(
        cls,
        context: ExecutionContext,
        execution: StepExecution,
        write: StepWrite,
        take: Callable[[Tx, GuardResult], Decision] | None = None,
        *,
        token: str,
        position: int = STEP,
    ) -> LimitedCall:
        """Build that of the attempt that ``write`` begins. While it waits, its row keeps what is recorded of the last.

        Without ``take``, only ``write`` is written once it has the limits.
        """
        row = context.replay_state.rows.get(execution.key)

        def build_wait(guard_result: GuardResult) -> StepWrite:
            kept: dict[str, Any] = {"attempts": write.attempts - 1, "commit_id": write.commit_id, "keeps_limits": True}
            if row is not None:
                kept["error"] = None if row.error_name is None else (row.error_name, row.error_message or "")
                kept["ran_for"] = None if row.started_at is None else guard_result.now - row.started_at
            return context.build_write(execution, StepStatus.WAITING, **kept)

        request = build_request(context, execution.key, execution.policy.limits, token=token, position=position)
        return cls(request, take or (lambda *_: Decision([write])), build_wait)


def commit_limited(
    context: ExecutionContext,
    calls: Sequence[LimitedCall],
    commit_id: str,
    *,
    writes: Sequence[StepWrite] = (),
    execution: StepExecution | None = None,
    shows_progress: bool | None = None,
) -> list[OpenWait | None]:
    """Commit that each call takes all its limits, or waits. Returns what each waits for; None if it has them.

    The other arguments are those of `StepCommit` and `ExecutionContext.commit`.
    """
    rows = context.replay_state.rows
    waiting = {key for call in calls if (row := rows.get(key := call.request.waiter.step_key)) and row.waits_for_limits}
    replies: list[Reply] = []

    def decide(tx: Tx, guard_result: GuardResult) -> Decision:
        replies[:], served = limits.ask(tx, [call.request for call in calls])
        decided, parts = list[StepWrite](), list[CommitPart]()
        for call, reply in zip(calls, replies, strict=True):
            if reply.holds:
                taken = call.take(tx, guard_result)
                decided, parts = [*decided, *taken.writes], [*parts, *taken.parts]
            elif call.request.waiter.step_key not in waiting:
                decided.append(call.build_wait(guard_result))
        return Decision(decided, [*parts, ServeLimits(served)])

    context.commit(StepCommit(commit_id, writes, decide=decide, shows_progress=shows_progress), execution)
    return [_build_wait(context.claim, call, reply) for call, reply in zip(calls, replies, strict=True)]


def _build_wait(claim: Claim, call: LimitedCall, reply: Reply) -> OpenWait | None:
    if reply.holds:
        return None
    if reply.start_us is not None:
        return OpenWait(from_us(reply.start_us))
    condition = GrantAwaited(claim, call.request.waiter.step_key)
    return OpenWait(claim.claimed_at + NO_DEADLINE, condition=condition, is_checked_again=False)


@dataclass(frozen=True, slots=True)
class GrantAwaited:
    """The condition that ends the wait of a step for its limits. Whoever grants them wakes the run."""

    claim: Claim
    step_key: str

    def is_met(self, tx: Tx, now: datetime) -> bool:
        del now
        return holds.is_granted(tx, self.claim.pk, self.claim.ref.run_number, [self.step_key])


def take_workflow_limits(context: ExecutionContext, given: Sequence[Limit], holder: str) -> OpenWait | None:
    """Commit that a run takes the limits of its workflow, or waits; returns what it waits for.

    ``holder``: the result of the row that records them, once the run has them.
    """
    commit_id, row = next(context.lease.commit_ids), context.replay_state.rows.get(LIMITS_KEY)

    def build_row(status: StepStatus, result: str | None) -> StepWrite:
        replaces = None if row is None else row.commit_id
        return StepWrite(LIMITS_KEY, 0, "limits", StepType.DO, status, replaces, commit_id, result=result)

    call = LimitedCall(
        build_request(context, LIMITS_KEY, given, token=None),
        lambda *_: Decision([build_row(StepStatus.COMPLETED, holder)]),
        lambda _: build_row(StepStatus.WAITING, None),
    )
    return commit_limited(context, [call], commit_id, shows_progress=False)[0]
