"""Limited steps: what they ask for, the commit that takes their limits or lets them wait, and what ends the wait."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from celery_durable.model import Claim, OpenWait, StepRow, from_us
from celery_durable.runner.commit_parts import CommitPart, OpenCommit, RowKind
from celery_durable.runner.lease import Lease
from celery_durable.store.engine import Tx
from celery_durable.store.runs import holds
from celery_durable.store.runs.holds import LimitKey, Waiter
from celery_durable.store.runs.limits import Reply, Request, Served
from celery_durable.values import Limit

NO_DEADLINE = timedelta(days=365)
"""How long a step waits for limits at most before its run checks them by itself."""


def build_request(lease: Lease, event: Any, key: str, row: StepRow | None, given: Sequence[Limit]) -> Request:
    """Build what a step asks for; raises what the functions ``by`` and ``fair`` of its limits raise."""
    claim = lease.claim
    with lease.user_code():
        uses = [limit.use(event) for limit in given]
    waiter = Waiter(claim.pk, claim.ref.run_number, key)
    return Request(waiter, uses, claim.token, is_new=row is None, resumes=row is not None and row.attempts > 0)


@dataclass(frozen=True, slots=True)
class GrantAwaited:
    """The condition that ends the wait of a step for its limits. Whoever grants them wakes the run."""

    claim: Claim
    step_key: str

    def is_met(self, tx: Tx, now: datetime) -> bool:
        del now
        return holds.is_granted(tx, self.claim.pk, self.claim.ref.run_number, [self.step_key])


def build_wait(claim: Claim, key: str, reply: Reply) -> OpenWait:
    """Build the wait of a step that does not hold its limits: until it may start, or until they are granted."""
    if reply.start_us is not None:
        return OpenWait(from_us(reply.start_us))
    return OpenWait(claim.claimed_at + NO_DEADLINE, condition=GrantAwaited(claim, key), is_checked_again=False)


@dataclass(eq=False)
class ServeLimits(CommitPart):
    """Serves, after the commit, the limits that it has freed, and wakes those that it has granted something."""

    served: Served

    def write(self, commit: OpenCommit) -> None:
        if self.served.granted or self.served.unfinished:
            commit.announcements.append(lambda: commit.env.limit_queue.serve_after_commit(self.served))


def release_limits(commit: OpenCommit, step_keys: Sequence[str]) -> None:
    """Give back the limits of these steps."""
    claim, freed = commit.claim, set[LimitKey]()
    for key in step_keys:
        freed.update(holds.release(commit.tx, claim.pk, claim.ref.run_number, key))
    ServeLimits(Served(unfinished=freed)).write(commit)


class LimitedRows(RowKind):
    """The holds of the run, and of steps that wait for limits, which end with the run."""

    def end_with_run(self, commit: OpenCommit) -> None:
        freed = holds.release_all(commit.tx, commit.claim.pk)
        ServeLimits(Served(unfinished=set(freed))).write(commit)


LIMITED_ROWS: Any = LimitedRows()
