"""What operators and a chaos run ask reads what is due or worked on, however many instances sleep beside it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from celery_durable.model import StuckRun
from celery_durable.store.engine import Tx
from celery_durable.store.instances import chaos_checks, overview
from celery_durable.store.runs import schedule
from tests.store.test_plans import SLEEPERS, fill
from tests.store.world import LEASE, World

ASKED: dict[str, Callable[[Tx], Any]] = {
    "overdue": overview.count_overdue,
    "leases": lambda tx: overview.read_leases(tx, limit=100, lease=LEASE),
    "held by a node": lambda tx: chaos_checks.find_held_claims(tx, "w@here", lease=LEASE),
    "soon": lambda tx: chaos_checks.find_due_soon(tx, within=timedelta(seconds=60), limit=100),
}
_ROWS = SLEEPERS // 20


@pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)
def test_the_queries_read_no_suspended_instance(live: World) -> None:
    fill(live)
    live.claim(live.create("o-1"), by="task-1 w@here")
    live.create("o-2")
    with live.store.engine.begin() as connection:
        read = _read_by_postgresql if live.store.database.name == "postgresql" else _read_by_mariadb
        tx = Tx(connection, live.store)
        rows = {question: read(connection, functools.partial(ask, tx)) for question, ask in ASKED.items()}
    assert {question: count for question, count in rows.items() if count >= _ROWS} == {}


def _read_by_postgresql(connection: sa.Connection, ask: Callable[[], Any]) -> int:
    """Rows that the scans of all its statements met; an index that is read from end to end shows as blocks."""
    seen: list[tuple[str, Any]] = []
    sa.event.listen(connection, "before_cursor_execute", lambda *given: seen.append((given[2], given[3])))
    ask()
    met = 0
    for statement, parameters in list(seen):
        (found,) = connection.exec_driver_sql(
            f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {statement}", parameters
        ).scalar_one()
        met += found["Plan"]["Shared Hit Blocks"] + found["Plan"]["Shared Read Blocks"] + _met(found["Plan"])
    return met


def _met(plan: dict[str, Any]) -> int:
    own = plan["Actual Rows"] + plan.get("Rows Removed by Filter", 0) if "Scan" in plan["Node Type"] else 0
    return int(own * plan["Actual Loops"]) + sum(_met(each) for each in plan.get("Plans", ()))


def _read_by_mariadb(connection: sa.Connection, ask: Callable[[], Any]) -> int:
    def handled() -> int:
        rows = connection.exec_driver_sql("SHOW SESSION STATUS LIKE 'Handler_read%%'").all()
        return sum(int(value) for _, value in rows)

    before = handled()
    ask()
    return handled() - before


def test_overdue_runs_count_with_a_new_an_old_or_no_dispatch_message(world: World) -> None:
    """A dispatch message that is sent again moves the next check far ahead. The instance is still due."""
    sent, again, unsent, claimed = (world.create(name) for name in ("o-1", "o-2", "o-3", "o-4"))
    world.create("o-5", run_at=world.now + timedelta(seconds=30))
    began = world.now
    world.claim(claimed)
    i = world.store.tables.instance
    with world.store.engine.begin() as connection:
        moved = (
            sa.update(i)
            .where(i.c.instance_id == again.instance_id)
            .values(next_check_at=i.c.next_check_at + 1_800_000_000)
        )
        connection.execute(moved)
    world.undo_dispatch(unsent, delay=30)
    world.advance(1)
    found = world.store.read(overview.count_overdue)
    assert (found.count, found.oldest) == (3, began)


def test_of_each_workflow_the_run_is_found_that_is_late_for_the_longest_time(world: World) -> None:
    began = world.now
    for name in ("s-1", "s-2", "held", "held later"):
        world.create(name, workflow="ship" if name.startswith("s") else "order")
        world.advance(1)
    for name in ("held", "held later"):
        world.claim(world.ref(name))
    lapsed = world.now + LEASE
    assert _find_stuck(world) == [StuckRun("ship", "s-1", began)]
    world.advance(LEASE.total_seconds() + 1)
    world.create("o-1")
    assert _find_stuck(world) == [
        StuckRun("ship", "s-1", began),
        StuckRun("order", "held", lapsed),
        StuckRun("order", "o-1", world.now),
    ]


def _find_stuck(world: World) -> list[StuckRun]:
    return world.store.read(lambda tx: overview.read_overdue(tx, schedule.read(tx)))[1]
