"""Values that runs publish while they run: one row per key, overwritten under the claim.

A write follows a `claims.guard` or `claims.guard_without_renewal` in the same transaction. Reads need no lock.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from celery_durable.model import Claim, Published, from_us
from celery_durable.store import dialects
from celery_durable.store.engine import Store, Tx
from celery_durable.store.statements import param, statement


@statement
def _write(s: Store) -> Any:
    values = {
        "instance_pk": param("pk", sa.BigInteger),
        "run_number": param("run", sa.Integer),
        "key": param("key", sa.String),
        "value": param("value", sa.Text),
        "updated_at": s.clock(),
    }
    return dialects.insert_or_update(s.database, s.tables.published, values, ("instance_pk", "run_number", "key"))


def write(tx: Tx, claim: Claim, values: Mapping[str, str]) -> None:
    """Set these keys of the run to these JSON texts."""
    scope = {"pk": claim.pk, "run": claim.ref.run_number}
    tx.run_many(_write, [scope | {"key": key, "value": values[key]} for key in sorted(values)])


def read(tx: Tx, pk: int, run_number: int) -> dict[str, Published]:
    """Return what a run has published, by key."""
    p = tx.t.published.c
    query = sa.select(p.key, p.value, p.updated_at).where(p.instance_pk == pk, p.run_number == run_number)
    return {
        row.key: Published(json.loads(row.value), updated_at=from_us(row.updated_at))
        for row in tx.execute(query.order_by(p.key))
    }
