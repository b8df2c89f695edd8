"""The agenda as dispatchers read it: also while a transaction keeps an old snapshot, it costs a few index searches."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from celery_durable.store import schedule
from celery_durable.store.engine import Store, Tx
from celery_durable.store.schedule import Agenda
from celery_durable.tasks.agenda import AgendaReader
from tests.store.crowd import collect
from tests.store.world import World

MOVED = 20_000


def read(world: World) -> Agenda:
    return world.store.read(schedule.read)


def read_known(world: World, known: Agenda) -> Agenda:
    return world.store.read(lambda tx: schedule.read_known(tx, known))


def test_a_known_agenda_is_read_again_as_the_complete_one(world: World) -> None:
    for n, queue in enumerate(("fast", "slow", "fast")):
        world.create(f"o-{n}", queue=queue)
    world.wait(world.claim(world.create("o-3")))
    known = read(world)
    assert read_known(world, known) == known
    world.advance(30)
    world.undo_dispatch(world.ref("o-1"))
    world.claim(world.ref("o-0"))
    world.create("o-4", queue="fast")
    world.create("o-5", queue="slow", run_at=world.now - timedelta(seconds=50))  # written late
    assert read_known(world, known) == read(world)


def test_an_empty_agenda_knows_only_the_time(world: World) -> None:
    known = read(world)
    world.advance(1)
    assert read_known(world, known) == Agenda(world.now, {}, None, None) == read(world)


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_a_known_agenda_does_not_pass_the_entries_that_an_old_snapshot_keeps(live: World) -> None:
    with live.store.engine.connect().execution_options(isolation_level="REPEATABLE READ") as old, old.begin():
        _insert_and_move(live.store, old)
        with live.store.engine.connect() as connection, connection.begin():
            tx = Tx(connection, live.store)
            known = schedule.read(tx)
            complete, again = (_blocks(tx, ask) for ask in (schedule.read, lambda tx: schedule.read_known(tx, known)))
    assert list(known.queues) == ["durable"]
    assert again * 20 < complete


def _insert_and_move(store: Store, old: sa.Connection) -> None:
    """Instances that were due an hour ago, and sleep now. The snapshot of ``old`` sees them as they were.

    The entries of earlier tests are removed before: there may be no autovacuum.
    """
    with store.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql("VACUUM workflow_instance")
    with store.engine.begin() as connection:
        connection.exec_driver_sql(
            "INSERT INTO workflow_instance (workflow, instance_id, kind, run_number, status, run_at, next_check_at,"
            " wake_reason, priority, dispatch_count, crash_count, pause_requested, version, queue, created_at,"
            " updated_at) SELECT 'order', concat('s-', n), 'replay', 1, 'waiting', n, n, 'wake', mod(n, 2), 0, 0,"
            f" false, 2, 'durable', 0, 0 FROM generate_series(1, {MOVED}) n"
        )
    old.exec_driver_sql("SELECT 1 FROM workflow_instance").all()
    with store.engine.begin() as connection:
        connection.exec_driver_sql("UPDATE workflow_instance SET next_check_at = 4000000000000000")


def _blocks(tx: Tx, ask: Callable[[Tx], Any]) -> int:
    blocks = 0
    for statement, parameters in collect(tx, ask):
        explain = f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {statement}"
        (found,) = tx.conn.exec_driver_sql(explain, parameters).scalar_one()
        blocks += found["Plan"]["Shared Hit Blocks"] + found["Plan"]["Shared Read Blocks"]
    return blocks


class TestAgendaReader:
    """The first complete reads are slow, as a clock says that moves with each look at it."""

    @pytest.fixture
    def reader(self, world: World, monkeypatch: pytest.MonkeyPatch) -> AgendaReader:
        self.seconds, self.cost = 0.0, 0.01

        def look() -> float:
            self.seconds += self.cost
            return self.seconds

        monkeypatch.setattr(world.store.runtime, "monotonic", look)
        world.create("o-1")
        return AgendaReader(world.store, world.store.runtime)

    def test_after_two_slow_reads_it_reads_what_it_knows_for_a_hundred_times_as_long(
        self, world: World, reader: AgendaReader
    ) -> None:
        assert [list(reader.read().queues) for _ in range(2)] == [["durable"]] * 2
        world.create("o-2", queue="new")
        assert list(reader.read().queues) == ["durable"]
        self.seconds += 1
        assert list(reader.read().queues) == ["durable", "new"]

    def test_one_slow_read_changes_nothing(self, world: World, reader: AgendaReader) -> None:
        reader.read()
        world.create("o-2", queue="new")
        assert list(reader.read().queues) == ["durable", "new"]

    def test_a_fast_read_ends_it(self, world: World, reader: AgendaReader) -> None:
        reader.read()
        self.cost = 0.001
        reader.read()
        world.create("o-2", queue="new")
        assert list(reader.read().queues) == ["durable", "new"]

    def test_it_reads_all_once_the_clock_of_the_database_was_set_back(self, world: World, reader: AgendaReader) -> None:
        reader.read()
        reader.read()
        world.advance(-3600)
        world.create("o-2", queue="new")
        assert list(reader.read().queues) == ["durable", "new"]
