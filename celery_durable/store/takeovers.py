"""Takeovers: claim a run whose last claim has expired, and record the crash of its worker."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from celery_durable.model import Claim, from_us
from celery_durable.store import attempts, claims
from celery_durable.store.engine import Store, Tx
from celery_durable.store.statements import param, statement


@statement
def _take_over(s: Store) -> Any:
    i = s.tables.instance
    counted = (i.c.crash_count, i.c.crash_count + 1)
    taken = (
        sa.update(i).where(i.c.id == param("pk", sa.BigInteger)).ordered_values(counted, *claims.new_values(s).items())
    )
    if not s.database.update_returns:
        return taken
    return taken.returning(i.c.claim_token, *claims.claimed_columns(s), *claims.new_run_columns(s))


@statement
def _read_crashed(s: Store) -> Any:
    """Read the claim that a takeover overwrites. `claims.claim_run` has locked the row."""
    i = s.tables.instance
    columns = [i.c.id, s.clock().label("now_us"), *attempts.crash_columns(i)]
    return sa.select(*columns).where(i.c.workflow == param("workflow"), i.c.instance_id == param("instance"))


def take_over(tx: Tx, request: claims.ClaimRequest) -> Claim | None:
    """Claim the run, also if its last claim has expired, which counts as a crash and is recorded.

    Call it in a transaction. Returns None if the run is not due any more.
    """
    found = claims.find_claimed(tx, request, tx.run(claims.claim_run, **request.parameters))
    if found is None:
        return None
    if found.claim_token != request.token:
        key = {"workflow": request.ref.workflow, "instance": request.ref.instance_id}
        crashed = tx.run(_read_crashed, **key).one()
        now = from_us(crashed.now_us)
        attempts.record_crash(tx, crashed, pk=crashed.id, run_number=request.ref.run_number, now=now)
        found = claims.find_claimed(tx, request, tx.run(_take_over, pk=crashed.id, **request.parameters))
    return claims.make_claim(found, request.ref, request.token, request.lease)
