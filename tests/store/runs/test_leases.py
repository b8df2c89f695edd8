"""Leases: the renewal of all claims of a process at once."""

from __future__ import annotations

from celery_durable.model import (
    Claim,
    RunOutcome,
    Status,
)
from celery_durable.store.runs import leases
from celery_durable.store.runs.leases import Renewal
from tests.store.world import LEASE, World


def _renew(world: World, *held: Claim) -> Renewal:
    return world.store.transact(lambda tx: leases.renew(tx, held, lease=LEASE))


def test_renewing_extends_the_leases_and_returns_the_claims_that_still_hold(world: World) -> None:
    kept, ended, lost = (world.claim(world.create(f"o-{n}")) for n in range(3))
    world.end_run(ended, RunOutcome(Status.COMPLETE, output="1"))
    world.restart(lost.ref)
    world.advance(10)
    assert _renew(world, kept, ended, lost) == Renewal(renewed=frozenset({kept.token}), held=frozenset({kept.token}))
    assert world.row(kept.ref).lease_until == world.now + LEASE
    assert world.row(lost.ref).lease_until is None


def test_renewing_leaves_version_and_crash_count_alone(world: World) -> None:
    ref = world.create()
    world.claim(ref)
    world.advance(30)
    claim = world.claim(ref)
    before = world.row(ref)
    _renew(world, claim)
    after = world.row(ref)
    assert (after.version, after.crash_count) == (before.version, 1)
