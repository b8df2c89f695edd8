"""What operators and a chaos run ask reads what is due or worked on, however many instances sleep beside it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from celery_durable.store.engine import Tx
from celery_durable.store.instances import chaos_checks, overview
from tests.store.test_plans import SLEEPERS, fill
from tests.store.world import LEASE, World

ASKED: dict[str, Callable[[Tx], Any]] = {
    "overdue": overview.count_overdue,
    "the longest overdue": lambda tx: overview.read_overdue(tx, limit=3),
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
    listed = world.store.read(lambda tx: overview.read_overdue(tx, limit=2))
    assert [(each.instance_id, each.run_at) for each in listed] == [("o-1", began), ("o-2", began)]
