"""Leases: renew those of all claims of a process, and record which steps its threads run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import MappingProxyType
from typing import Any

import sqlalchemy as sa

from celery_durable.model import Claim, RunningStep, duration_us, to_us
from celery_durable.store.engine import Store, Tx
from celery_durable.store.engine.statements import param, statement, statement_for
from celery_durable.store.runs import runs


@dataclass(frozen=True, slots=True)
class Renewal:
    """The tokens that `renew` has renewed, and those that still hold. Another transaction locked the others' rows."""

    renewed: frozenset[str]
    held: frozenset[str]
    cancelled: frozenset[str] = frozenset()


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

    A transaction that holds a lock renews the lease itself (`claims.guard`) or takes the claim away. ``running`` has,
    by token, the step that each claim's worker runs now, for the claims whose step has changed.
    """
    named = _name_claims([(claim.pk, claim.token) for claim in claims])
    locked = tx.run(_lock_claims(len(claims)), **named)
    if locked:
        tx.run(
            _renew_claims(len(locked)),
            lease_us=duration_us(lease),
            **_name_claims([(row.id, row.claim_token) for row in locked]),
        )
        changed = [(row.id, running[row.claim_token]) for row in locked if row.claim_token in running]
        tx.run_many(_record_running_step, [_running_step_params(pk, step) for pk, step in changed])
    held = locked if len(locked) == len(claims) else tx.run(_select_claims(len(claims)), **named)
    cancelled = [row for row in held if row.pause_requested and runs.is_cancel_requested(tx, row.id, row.run_number)]
    return Renewal(*(frozenset(row.claim_token for row in rows) for rows in (locked, held, cancelled)))


@statement_for
def _select_claims(s: Store, count: int) -> Any:
    i = s.tables.instance.c
    return sa.select(i.id, i.claim_token, i.run_number, i.pause_requested).where(*_are_held(s, count))


@statement_for
def _lock_claims(s: Store, count: int) -> Any:
    i = s.tables.instance.c
    return _select_claims(count).build(s).order_by(i.id).with_for_update(skip_locked=True, key_share=True)


@statement_for
def _renew_claims(s: Store, count: int) -> Any:
    until = s.clock() + param("lease_us", sa.BigInteger)
    return sa.update(s.tables.instance).where(*_are_held(s, count)).values(lease_until=until)


def _are_held(s: Store, count: int) -> tuple[sa.ColumnElement[bool], ...]:
    """Conditions for the rows of so many claims that still hold. `_name_claims` returns their parameters."""
    i = s.tables.instance.c
    pks = [param(f"pk_{number}", sa.BigInteger) for number in range(count)]
    tokens = [param(f"token_{number}", sa.String) for number in range(count)]
    return i.id.in_(pks), i.claim_token.in_(tokens)


def _name_claims(claims: Iterable[Sequence[Any]]) -> dict[str, Any]:
    """Return the parameters of `_are_held` for claims, which are pairs of key and token."""
    named: dict[str, Any] = {}
    for number, (pk, token) in enumerate(claims):
        named[f"pk_{number}"], named[f"token_{number}"] = pk, token
    return named


def _running_step_params(pk: int, step: RunningStep | None) -> dict[str, Any]:
    if step is None:
        return {"pk": pk, "step_key": None, "attempt": None, "since_us": None}
    return {"pk": pk, "step_key": step.step_key, "attempt": step.attempt, "since_us": to_us(step.since)}
