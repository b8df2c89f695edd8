"""The database's own time (LAW 4)."""

from __future__ import annotations

import time
from typing import Any

import pytest
import sqlalchemy as sa

from celery_durable.store.engine import Tx
from celery_durable.store.events import run_events
from celery_durable.store.instances import instances
from tests.store.world import World


def _clocks(world: World, tx: Tx) -> tuple[int, int]:
    row = tx.execute(sa.select(world.store.clock(), world.store.statement_clock())).one()
    return int(row[0]), int(row[1])


def test_the_clock_is_the_real_time_in_microseconds(live: World) -> None:
    before = time.time()
    clock, statement_clock = live.store.transact(lambda tx: _clocks(live, tx))
    after = time.time()
    for now in (clock, statement_clock):
        assert before - 0.002 <= now / 1_000_000 <= after + 0.002  # SQLite rounds to milliseconds


@pytest.mark.parametrize("zone", ["+05:30", "-11:00"])
@pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)
def test_the_clock_does_not_depend_on_the_sessions_time_zone(live: World, zone: str) -> None:
    set_zone = {
        "postgresql": f"SET TIME ZONE INTERVAL '{zone}' HOUR TO MINUTE",
        "mariadb": f"SET SESSION time_zone='{zone}'",
    }

    def work(tx: Tx) -> tuple[int, int]:
        tx.conn.exec_driver_sql(set_zone[live.store.database.name])
        try:
            return _clocks(live, tx)
        finally:
            tx.conn.invalidate()

    with live.store.engine.connect() as connection:
        clock, statement_clock = work(Tx(connection, live.store))
    assert abs(clock / 1_000_000 - time.time()) < 5
    assert abs(statement_clock / 1_000_000 - time.time()) < 5


def test_the_clock_moves_inside_a_transaction(live: World) -> None:
    def work(tx: Tx) -> list[int]:
        seen = [_clocks(live, tx)[0]]
        while len(seen) < 3:
            now = _clocks(live, tx)[0]
            if now != seen[-1]:
                seen.append(now)
        return seen

    seen = live.store.transact(work)
    assert seen == sorted(seen)
    assert seen[-1] - seen[0] < 1_000_000


@pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)
def test_a_timestamp_written_after_a_lock_wait_is_later_than_the_wait(live: World) -> None:
    ref = live.create()

    def send(tx: Tx) -> Any:
        row = instances.lock(tx, ref.workflow, ref.instance_id)
        run_events.insert_event(tx, row, type_="a", payload="1", event_id="e-1")

    with live.store.engine.begin() as connection:
        tx = Tx(connection, live.store)
        instances.lock(tx, ref.workflow, ref.instance_id)
        rival = live.start_blocked(live.store.transact, send)
        released_at = _clocks(live, tx)[0]
    rival.result()
    e = live.store.tables.event.c
    assert live.store.read(lambda tx: tx.execute(sa.select(e.created_at)).scalar_one()) >= released_at
