"""How far queues have come: what claims say of the hints that led to them."""

from __future__ import annotations

from datetime import datetime

import pytest

from celery_durable.runner.watermark import Watermark
from celery_durable.store.runs import schedule
from tests.store.world import World, seconds


def _claimed(world: World, queue: str = "durable") -> datetime | None:
    return world.store.read(schedule.read_claimed).get(queue)


def _advance(world: World, sent_at: datetime) -> None:
    world.store.transact(lambda tx: schedule.record_claimed(tx, "durable", sent_at=sent_at))


def test_a_dispatch_message_counts_as_claimed_after_three_seconds(world: World) -> None:
    first = world.now
    world.store.transact(lambda tx: schedule.insert_queue(tx, "durable", sent_at=first))
    world.advance(2.999999)
    assert _claimed(world) is None
    world.advance(0.000001)
    assert _claimed(world) == first
    second = world.now
    _advance(world, second)
    assert _claimed(world) == first
    world.advance(2)
    _advance(world, world.now)  # too soon after the last: it would never grow old
    assert _claimed(world) == first
    world.advance(1)
    assert _claimed(world) == second


def test_a_dispatch_message_that_was_sent_earlier_changes_nothing(world: World) -> None:
    sent_at = world.now
    world.store.transact(lambda tx: schedule.insert_queue(tx, "durable", sent_at=sent_at))
    world.advance(10)
    _advance(world, sent_at - seconds(1))
    assert _claimed(world) == sent_at
    world.store.transact(lambda tx: schedule.insert_queue(tx, "durable", sent_at=world.now))  # another process began
    assert _claimed(world) == sent_at


def test_setting_the_database_clock_back_makes_no_dispatch_message_lost(world: World) -> None:
    """Else each would be sent again and again until that time has come a second time."""
    world.advance(3600)
    world.store.transact(lambda tx: schedule.insert_queue(tx, "durable", sent_at=world.now))
    world.advance(-3600)
    assert _claimed(world) is None
    sent_at = world.now
    _advance(world, sent_at)
    assert _claimed(world) is None
    world.advance(3)
    assert _claimed(world) == sent_at


@pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)
def test_of_two_simultaneous_reports_one_is_stored(world: World) -> None:
    world.store.transact(lambda tx: schedule.insert_queue(tx, "durable", sent_at=world.now))
    world.advance(10)
    sent_at = world.now - seconds(1)
    with world.hold_transaction() as tx:
        schedule.record_claimed(tx, "durable", sent_at=sent_at)
        rival = world.start_blocked(_advance, world, world.now)
    rival.result()
    world.advance(3)
    assert _claimed(world) == sent_at  # the other one's would be as young as three seconds ago, too, but not older


def test_a_process_reports_its_newest_claim_every_three_seconds(world: World) -> None:
    real_monotonic = [100.0]
    world.store.runtime.monotonic = lambda: real_monotonic[0]
    watermark = Watermark(world.store, world.store.runtime)

    def claim(id: str) -> datetime:
        ref = world.create(id)
        sent_at = world.now
        watermark.record_claim(world.claim(ref))
        return sent_at

    first = claim("o-1")
    world.advance(3)
    assert _claimed(world) == first
    second = claim("o-2")  # the first one made the row
    world.advance(1)
    real_monotonic[0] += 1
    third = claim("o-3")
    world.advance(2)
    assert _claimed(world) == second
    real_monotonic[0] += 2
    assert claim("o-4") > third
    world.advance(3)
    assert _claimed(world) == second + seconds(3)


def test_a_claim_without_a_dispatch_message_reports_nothing(world: World) -> None:
    ref = world.create()
    world.undo_dispatch(ref)
    Watermark(world.store, world.store.runtime).record_claim(world.claim(ref))
    world.advance(10)
    assert world.store.read(schedule.read_claimed) == {}


def test_a_failed_report_does_not_fail_the_pass(world: World, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "celery_durable.runner")
    claim = world.claim(world.create())
    with world.store.engine.begin() as connection:
        connection.exec_driver_sql("ALTER TABLE workflow_queue RENAME TO workflow_elsewhere")
    try:
        Watermark(world.store, world.store.runtime).record_claim(claim)
    finally:
        with world.store.engine.begin() as connection:
            connection.exec_driver_sql("ALTER TABLE workflow_elsewhere RENAME TO workflow_queue")
    assert "The watermark of queue 'durable' could not be written: " in caplog.text
