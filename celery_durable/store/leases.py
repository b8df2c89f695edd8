"""Leases: renew those of all claims of a process, and record which steps its threads run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import MappingProxyType
from typing import Any

import sqlalchemy as sa

from celery_durable.model import Claim, RunningStep, duration_us, to_us
from celery_durable.store.engine import Store, Tx
from celery_durable.store.statements import param, statement


@dataclass(frozen=True, slots=True)
class Renewal:
    """The tokens of the claims that `renew` has renewed, and of all those that still hold.

    If a token is in ``held`` only, another transaction had locked its row.
    """

    renewed: frozenset[str]
    held: frozenset[str]


@statement
def _record_running_step(s: Store) -> Any:
    i = s.tables.instance
    values = {
        "running_step_key": param("step_key", sa.String),
        "running_attempt": param("attempt", sa.Integer),
        "running_since": param("since_us", sa.BigInteger),
    }
    return sa.update(i).where(i.c.id == param("pk", sa.BigInteger)).values(values)


def renew(
    tx: Tx,
    claims: Sequence[Claim],
    *,
    lease: timedelta,
    running: Mapping[str, RunningStep | None] = MappingProxyType({}),
) -> Renewal:
    """Renew the leases of these claims, and skip rows that another transaction has locked.

    ``running`` has, by token, the step that each claim's worker runs now, for the claims whose step has changed.

    That transaction either renews the lease itself or takes the claim away. Rows are locked in the order of their ids,
    so that two renewals cannot deadlock.
    """
    i = tx.t.instance
    tokens = {claim.token for claim in claims}
    wanted = sa.and_(i.c.id.in_([claim.pk for claim in claims]), i.c.claim_token.in_(tokens))
    unlocked = (
        sa.select(i.c.id, i.c.claim_token)
        .where(wanted)
        .order_by(i.c.id)
        .with_for_update(skip_locked=True, key_share=True)
    )
    locked = tx.execute(unlocked).all()
    if locked:
        until = tx.store.clock() + duration_us(lease)
        renewable = sa.and_(i.c.id.in_([row.id for row in locked]), i.c.claim_token.in_(tokens))
        tx.execute(sa.update(i).where(renewable).values(lease_until=until))
        changed = [(row.id, running[row.claim_token]) for row in locked if row.claim_token in running]
        tx.run_many(_record_running_step, [_running_step_params(pk, step) for pk, step in changed])
    held = tx.execute(sa.select(i.c.claim_token).where(wanted)).scalars()
    return Renewal(frozenset(row.claim_token for row in locked), frozenset(held))


def _running_step_params(pk: int, step: RunningStep | None) -> dict[str, Any]:
    if step is None:
        return {"pk": pk, "step_key": None, "attempt": None, "since_us": None}
    return {"pk": pk, "step_key": step.step_key, "attempt": step.attempt, "since_us": to_us(step.since)}
