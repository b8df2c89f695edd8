"""The one statement that suspends a run for a sleep."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from celery_durable.errors import Superseded
from celery_durable.model import Claim, ReleaseOutcome, StepRow, StepStatus, StepType, StepWrite, to_us
from celery_durable.store.engine import Tx
from celery_durable.store.instances import instances, lifecycle
from celery_durable.store.lanes import steps
from celery_durable.store.runs import releases
from tests.store.world import GRACE, World, step, wait_in

MINUTE = timedelta(seconds=60)
TIMES = {"for": {"wake_in": MINUTE}, "until": {"wake_at": datetime.fromisoformat("2035-01-01T00:00:00+00:00")}}

pytestmark = pytest.mark.parametrize("database", ["postgresql"], indirect=True)


def nap(**given: Any) -> StepWrite:
    given = {"wake_in": MINUTE} | given if "wake_at" not in given else given
    return step("nap", StepStatus.WAITING, type=StepType.SLEEP, **given)


def sleep(world: World, claim: Claim, write: StepWrite | None = None) -> StepRow | None:
    return world.store.run_statement(lambda tx: steps.suspend_for_sleep(tx, claim, write or nap()))


@pytest.mark.parametrize("given", TIMES.values(), ids=TIMES)
def test_it_leaves_the_rows_that_a_transaction_leaves(world: World, given: dict[str, Any]) -> None:
    def suspend_in(tx: Tx, claim: Claim) -> ReleaseOutcome:
        releases.mark_started(tx, claim)
        return wait_in(tx, claim, nap(**given))

    claims = [world.claim(world.create(name, commit_id="created")) for name in ("o-1", "o-2")]
    row = sleep(world, claims[0], nap(**given))
    assert world.store.transact(lambda tx: suspend_in(tx, claims[1])) is ReleaseOutcome.WAITING
    assert world.steps(claims[0]) == (row,)
    assert read_rows(world, claims[0]) == read_rows(world, claims[1])


def read_rows(world: World, claim: Claim) -> list[dict[str, Any]]:
    """Return the rows of an instance, its run and its step, without what names the instance."""
    t, own = world.store.tables, {"id", "instance_id", "instance_pk"}
    with world.store.engine.connect() as connection:
        found = [
            connection.execute(sa.select(table).where(key == claim.pk)).mappings().one()
            for table, key in [(t.instance, t.instance.c.id), *((each, each.c.instance_pk) for each in (t.run, t.step))]
        ]
    return [{name: value for name, value in row.items() if name not in own} for row in found]


def test_the_pass_after_the_sleep_loads_it(world: World) -> None:
    ref = world.create()
    sleep(world, world.claim(ref))
    assert world.try_claim(ref) is None
    world.advance(60)
    (row,) = world.steps(world.claim(ref))
    assert (row.status, row.wake_at) == (StepStatus.WAITING, world.now)


def test_it_keeps_the_start_that_an_earlier_pass_recorded(world: World) -> None:
    ref = world.create()
    claim = world.claim(ref)
    started_at = world.now
    sleep(world, claim)
    world.advance(60)
    again = world.claim(ref)
    sleep(world, again, step("rest", StepStatus.WAITING, type=StepType.SLEEP, seq=2, wake_in=MINUTE))
    assert world.load(again).started_at == started_at


def test_a_superseded_worker_changes_nothing(world: World) -> None:
    claim = world.claim(world.create())
    world.restart(claim.ref)
    before = world.read_all_rows()
    assert sleep(world, claim) is None
    assert world.read_all_rows() == before


def test_a_row_that_another_worker_has_written_supersedes_it(world: World) -> None:
    claim = world.claim(world.create())
    world.commit(claim, nap())
    before = world.read_all_rows()
    with pytest.raises(Superseded):
        sleep(world, claim)
    assert world.read_all_rows() == before


def test_a_pause_that_it_waited_for_leaves_it_to_the_transaction(world: World) -> None:
    ref = world.create()
    claim = world.claim(ref)
    with world.hold_transaction() as tx:
        lifecycle.pause(tx, instances.lock(tx, ref.workflow, ref.instance_id))
        runner = world.start_blocked(sleep, world, claim)
    assert runner.result() is None
    assert world.steps(claim) == ()


def test_it_sees_the_restart_that_it_waited_for(world: World) -> None:
    claim = world.claim(world.create())
    with world.hold_transaction() as tx:
        row = instances.lock(tx, claim.ref.workflow, claim.ref.instance_id)
        lifecycle.restart(tx, row, grace=GRACE, commit_id="restarted", reason=None)
        runner = world.start_blocked(sleep, world, claim)
    assert runner.result() is None
    assert world.steps(claim) == ()


def test_the_sleep_begins_after_the_wait_for_the_lock(live: World) -> None:
    """LAW 4, also if the transaction that held the lock has changed nothing."""
    ref = live.create()
    claim = live.claim(ref)
    with live.hold_transaction() as tx:
        instances.lock(tx, ref.workflow, ref.instance_id)
        runner = live.start_blocked(sleep, live, claim)
        released_us = tx.execute(sa.select(tx.store.clock())).scalar_one()
    row = runner.result()
    assert row is not None
    assert row.wake_at is not None
    wake_at = row.wake_at
    assert wake_at == live.row(ref).run_at
    assert to_us(wake_at - MINUTE) >= released_us
