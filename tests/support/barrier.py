"""A kind of step that the package does not have: `barrier` waits until a number of runs have come to it.

It shows what a new kind needs: a call, a `StepKind`, and a `CommitPart` for what its commit does besides.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import sqlalchemy as sa

from celery_durable import Step
from celery_durable.config import Settings
from celery_durable.model import DueRun, OpenWait, Release, StepRow, StepStatus, StepType, StepWrite, WakeReason
from celery_durable.runner.commit_parts import CommitPart, LockTarget, OpenCommit
from celery_durable.runner.execution_context import ExecutionContext
from celery_durable.runner.step_commit import StepCommit
from celery_durable.runner.step_execution import OtherSteps, StepExecution
from celery_durable.runner.step_kinds import CallIdentity, StepKind
from celery_durable.store.engine import Tx
from celery_durable.store.instances import instances, lifecycle
from celery_durable.values import StepPolicy

TIMEOUT = timedelta(hours=1)


@dataclass(frozen=True)
class BarrierCall:
    name: str
    parties: int


def barrier(step: Step, name: str, parties: int) -> int:
    """Wait until ``parties`` runs have called the barrier of this name; returns their number."""
    arrived: int = step.call(BarrierCall(name, parties))
    return arrived


class BarrierKind(StepKind[BarrierCall]):
    type, call_type, writes_beside = StepType("barrier"), BarrierCall, True

    def __init__(self) -> None:
        self.prepared: list[tuple[int, StepStatus]] = []
        """The instances and statuses of the rows before which something else was written."""

    def prepare_write(self, commit: OpenCommit, write: StepWrite) -> None:
        self.prepared.append((commit.claim.pk, write.status))

    def identify(self, call: BarrierCall, settings: Settings, policy: StepPolicy) -> CallIdentity:
        return CallIdentity(call.name, call.parties, policy)

    def advance(self, context: ExecutionContext, executions: Sequence[StepExecution], other_steps: OtherSteps) -> None:
        for execution in executions:
            if execution.entry.row is None:
                self._arrive(context, execution, other_steps)
            elif _has_all(context, execution):
                write = context.build_write(execution, StepStatus.COMPLETED, result=str(execution.call.parties))
                context.commit_step(execution, write)
            else:
                assert execution.entry.row.wake_at is not None
                execution.wait = _wait(execution.call, execution.entry.row.wake_at)

    @staticmethod
    def _arrive(context: ExecutionContext, execution: StepExecution, other_steps: OtherSteps) -> None:
        write = context.build_write(execution, StepStatus.WAITING, wake_in=TIMEOUT)
        step_commit = StepCommit(write.commit_id, [write], parts=[_WakeOthers(execution.call)])
        if other_steps is OtherSteps.NONE:
            step_commit.ending = functools.partial(_end, execution.call)
            context.suspend_with(step_commit)
        else:
            context.commit(step_commit, execution)
            execution.wait = execution.wait and _wait(execution.call, execution.wait.due_at)

    def decode(self, context: ExecutionContext, execution: StepExecution, row: StepRow) -> int:
        return int(row.result or 0)


@dataclass(frozen=True)
class _AllHaveArrived:
    call: BarrierCall

    def is_met(self, tx: Tx, now: datetime) -> bool:
        return len(_find_parties(tx, self.call)) >= self.call.parties


@dataclass(eq=False)
class _WakeOthers(CommitPart):
    """Wakes the runs that wait at the barrier, if this one is the last to come."""

    call: BarrierCall

    def find_lock_targets(self, tx: Tx) -> Collection[LockTarget]:
        return _find_parties(tx, self.call)

    def write(self, commit: OpenCommit) -> None:
        parties = _find_parties(commit.tx, self.call)
        if len(parties) < self.call.parties:
            return
        for party in parties:
            if party.pk != commit.claim.pk:
                row = instances.lock(commit.tx, party.workflow, party.instance_id)
                due: DueRun = lifecycle.make_due(commit.tx, row, wake_reason=WakeReason.EVENT, grace=commit.grace)
                commit.due_runs.append(due)


def _find_parties(tx: Tx, call: BarrierCall) -> list[LockTarget]:
    i, st = tx.t.instance.c, tx.t.step.c
    query = (
        sa.select(i.id, i.workflow, i.instance_id)
        .join_from(tx.t.instance, tx.t.step, sa.and_(st.instance_pk == i.id, st.run_number == i.run_number))
        .where(st.type == "barrier", st.name == call.name)
        .order_by(i.id)
    )
    return [LockTarget(*row) for row in tx.execute(query)]


def _has_all(context: ExecutionContext, execution: StepExecution) -> bool:
    read = context.env.store.read
    condition = _AllHaveArrived(execution.call)
    return bool(context.run_or_interrupt(lambda: read(lambda tx: condition.is_met(tx, context.now))))


def _wait(call: BarrierCall, due_at: datetime) -> OpenWait:
    return OpenWait(due_at, condition=_AllHaveArrived(call))


def _end(call: BarrierCall, rows: Sequence[Any]) -> Release:
    return Release([_wait(call, row.wake_at) for row in rows])
