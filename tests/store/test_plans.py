"""The hot statements find their rows by index, however many instances sleep."""

from __future__ import annotations

import importlib
import itertools
import pkgutil
import re
import time
from typing import Any

import pytest
from sqlalchemy.dialects.postgresql import psycopg

from celery_durable import store
from celery_durable.model import RunRef
from celery_durable.store import lost_tasks
from celery_durable.store.engine import Tx
from celery_durable.store.engine.statements import Statement
from celery_durable.store.events import run_events
from celery_durable.store.instances import instances, limit_waits, lists
from celery_durable.store.lanes import groups
from celery_durable.store.runs import claims, holds, limits, schedule, step_rows, sweeps
from celery_durable.store.runs.claims import RESUMING, STARTING
from tests.store.world import LEASE, REDISPATCH, World, step

SLEEPERS = 8_000
ON_SQLITE = f"(WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c WHERE n < {SLEEPERS}) SELECT n FROM c) n"
KEY = {"workflow": "order", "instance": "s-777"}
STRIPE = {"name": "stripe", "key": ""}
HOT: dict[str, tuple[Statement, dict[str, Any]]] = {
    "sweep, resuming": (sweeps._select_due, {"priority": RESUMING, "queue": "durable", "limit": 500, "since_us": 0}),
    "sweep, starting": (sweeps._select_due, {"priority": STARTING, "queue": "durable", "limit": 500, "since_us": 0}),
    "lost dispatch messages": (
        sweeps._select_lost,
        {
            "queue": "durable",
            "before_us": 10**15,
            "claimed_us": 10**15,
            "empty_us": 0,
            "lost_before_us": 0,
            "longest_us": 1_800_000_000,
            "limit": 500,
        },
    ),
    "agenda": (schedule._agenda, {}),
    "claim": (
        claims.claim_run,
        KEY | {"run": 1, "kind": "replay", "token": "t", "task_id": "t", "node": "w", "lease_us": 30_000_000},
    ),
    "lock": (instances._lock, KEY),
    "guard": (claims._guard, {"pk": 777, "token": "t", "lease_us": 30_000_000, "resets_crash_count": True}),
    "load": (step_rows._select_run_and_steps, {"pk": 777, "run": 1}),
    "event": (
        run_events._select_oldest_event,
        {"pk": 777, "run": 1, "type": "approval", "answer_id": "answer:w", "deadline_us": 1},
    ),
    "start of a task": (
        lost_tasks._select_abandoned,
        KEY | {"run": 1, "step_key": None, "type": "task:777:1:1:pack"},
    ),
    "live wait": (run_events._find_open_wait, {"pk": 777, "run": 1, "type": "approval"}),
    "limit": (limits._read_queue, STRIPE),
    "shares of a limit": (limits._count_by_fair_key, STRIPE),
    "waiter for a limit": (holds._select(4), dict(zip(holds.Waiter._fields, (777, 1, "approved", -1), strict=True))),
    "keys with waiters": (limit_waits._select_keys("waiting", "same"), STRIPE | {"limit": 1}),
    "grants to check": (limit_waits._select_to_check, {"limit": 100}),
}

_ASLEEP = """
INSERT INTO workflow_instance (workflow, instance_id, kind, run_number, status, run_at, next_check_at, wake_reason,
                               priority, dispatch_count, crash_count, pause_requested, version, queue, created_at,
                               updated_at)
SELECT CASE mod(n, 100) WHEN 0 THEN '{rare}' ELSE 'order' END,
       concat('s-', n), 'replay', 1, 'waiting', {at} + n, {at} + n, 'wake', mod(n, 2),
       0, 0, false, 2, 'durable', 0, 0 FROM {numbers}
"""
_STEPS = """
INSERT INTO workflow_step (instance_pk, run_number, step_key, seq, name, type, status, attempts, commit_id, created_at)
SELECT id, 1, 'approved', 1, 'approved', 'waitForEvent', 'waiting', 0, 'c', 0 FROM workflow_instance
"""
_RUNS = """
INSERT INTO workflow_run (instance_pk, run_number, params, created_at, commit_id, log_count, dropped_log_count)
SELECT id, 1, '{}', 0, 'c', 0, 0 FROM workflow_instance
"""
_EVENTS = """
INSERT INTO workflow_event (instance_pk, run_number, seq, event_id, type, payload, created_at)
SELECT id, 1, 1, 'e-1', 'refusal', '1', 0 FROM workflow_instance
"""
_LABELS = """
INSERT INTO workflow_label (instance_pk, name, value)
SELECT id, 'tenant', CASE WHEN instance_id IN ('s-777', 's-7777') THEN 'rare' ELSE 'acme' END FROM workflow_instance
UNION ALL SELECT id, 'stage', 'new' FROM workflow_instance
"""
_HOLDS = """
INSERT INTO workflow_hold (instance_pk, run_number, step_key, position, name, {key}, fair_key, seq, turn, state, token,
                           asked_at, lapses)
SELECT id, 1, 'approved', -1, 'stripe', '', '', id, 0, CASE mod(id, 16) WHEN 0 THEN 'held' ELSE 'waiting' END,
       CASE mod(id, 16) WHEN 0 THEN 'child' END, 0, 0 FROM workflow_instance
"""


def fill(world: World, *, rare: str = "order") -> None:
    at = world.store.runtime.clock() + 3_600_000_000 if world.store.runtime.clock else 4_000_000_000_000_000
    numbers = {
        "postgresql": f"generate_series(1, {SLEEPERS}) n",
        "mariadb": f"(SELECT seq AS n FROM seq_1_to_{SLEEPERS}) n",
        "sqlite": ON_SQLITE,
    }
    database = world.store.database.name
    with world.store.engine.begin() as connection:
        if database == "sqlite":
            driver: Any = connection.connection.driver_connection
            driver.create_function("concat", 2, "{}{}".format)
        asleep = _ASLEEP.format(at=at, rare=rare, numbers=numbers[database])
        waiting = _HOLDS.format(key="`key`" if database == "mariadb" else "key")
        for statement in (asleep, _RUNS, _STEPS, _EVENTS, _LABELS, waiting):
            connection.exec_driver_sql(statement)
    tables = "workflow_instance, workflow_run, workflow_step, workflow_event, workflow_label, workflow_hold"
    with world.store.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        if database != "sqlite":  # a file in use is not analyzed either
            analyze = f"ANALYZE {tables}" if database == "postgresql" else f"ANALYZE TABLE {tables}"
            connection.exec_driver_sql(analyze).close()


def plan(tx: Tx, what: Statement, params: dict[str, Any], *, mode: str) -> str:
    """PostgreSQL's plan, for these parameters ("custom") or for any ("generic": what kept connections end up with)."""
    compiled = tx.store.compiled(what, psycopg.dialect())  # which names the types; psycopg2 writes values in
    bound = compiled.bind(params, tx.store.runtime.clock)
    numbers = itertools.count(1)
    numbered = re.sub("%s", lambda _: f"${next(numbers)}", compiled.sql).replace("%%", "%")
    given = ", ".join("NULL" if value is None else f"'{value}'" for value in bound)
    tx.conn.exec_driver_sql(f"SET LOCAL plan_cache_mode = force_{mode}_plan")
    tx.conn.exec_driver_sql("PREPARE hot AS " + numbered)
    lines = tx.conn.exec_driver_sql(f"EXPLAIN EXECUTE hot{f'({given})' if given else ''}").scalars().all()
    tx.conn.exec_driver_sql("DEALLOCATE hot")
    return "\n".join(lines)


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_no_hot_statement_scans_a_table_on_postgresql(live: World) -> None:
    fill(live)
    with live.store.engine.begin() as connection:
        tx = Tx(connection, live.store)
        for mode in ("custom", "generic"):
            plans = {name: plan(tx, what, params, mode=mode) for name, (what, params) in HOT.items()}
            scanning = {name: text for name, text in plans.items() if "Seq Scan" in text}
            assert scanning == {}
            for name in ("sweep, resuming", "sweep, starting", "agenda"):
                assert "ix_workflow_instance_due" in plans[name], plans[name]
                assert "Sort" not in plans[name], plans[name]
            for name in ("sweep, resuming", "sweep, starting"):  # a clock that moves would only filter
                assert re.search(r"Index Cond: .*next_check_at <=", plans[name]), plans[name]
            assert "uq_workflow_instance" in plans["claim"], plans["claim"]


def all_statements() -> dict[str, Statement]:
    """The store's statements without parameters of their own, by name."""
    names = [each.name for each in pkgutil.walk_packages(store.__path__, f"{store.__name__}.") if not each.ispkg]
    modules = {
        name.rpartition(".")[2]: vars(importlib.import_module(name)) for name in names if ".migrations." not in name
    }
    return {
        f"{room}.{name}": value
        for room, values in modules.items()
        for name, value in values.items()
        if isinstance(value, Statement)
    }


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_a_plan_from_empty_tables_reads_no_list_to_find_a_row(live: World) -> None:
    """A connection keeps such a plan until the tables are analyzed, however many rows there are by then."""
    plans = {}
    with live.store.engine.begin() as connection:
        tx = Tx(connection, live.store)
        for name, what in all_statements().items():
            params = dict.fromkeys(live.store.compiled(what, psycopg.dialect())._order, None)
            plans[name] = plan(tx, what, params, mode="generic")
    assert "uq_workflow_instance" in plans["claims.claim_run"]
    reading = {name for name, text in plans.items() if re.search("instance_listed|instance_in_status|item_out", text)}
    assert reading <= {"bounds._select_workflow_names"}


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_a_group_of_steps_is_written_by_key_before_the_tables_are_analyzed(live: World) -> None:
    steps = groups.GroupedStep(live.claim(live.create("o-1")), step(result="1"))
    write = groups._lock_and_insert_all(steps.fields)
    with live.store.engine.begin() as connection:
        found = plan(Tx(connection, live.store), write, {"rows": "[]"}, mode="generic")
    assert "Seq Scan on workflow_instance" not in found, found


@pytest.mark.parametrize("database", ["mariadb"], indirect=True)
def test_no_hot_statement_scans_a_table_on_mariadb(live: World) -> None:
    fill(live)
    with live.store.engine.begin() as connection:
        for name, (what, params) in HOT.items():
            compiled = live.store.compiled(what)
            values = compiled.bind(params, live.store.runtime.clock)
            rows = connection.exec_driver_sql("EXPLAIN " + compiled.sql, values).mappings().all()
            assert [row for row in rows if row["type"] == "ALL" and not row["table"].startswith("<")] == [], name
            if name == "agenda":  # one search for each group, not one for each row
                loose = [row["Extra"] for row in rows if row["table"] and row["table"].startswith("workflow_instance")]
                assert len(loose) == 3, rows
                assert all("Using index for group-by" in extra for extra in loose), rows
            if name.startswith(("sweep", "lost")):
                used = {row["key"] for row in rows if row["table"]}
                wanted = "sent" if name == "lost dispatch messages" else "due"
                assert used == {f"ix_workflow_instance_{wanted}"}, name
                assert not any("filesort" in (row["Extra"] or "") for row in rows), name


def test_the_current_steps_of_a_page_are_read_by_key(live: World) -> None:
    fill(live)
    pks = [live.store.read(lambda tx, n=n: instances.find_pk(tx, "order", f"s-{n}")) for n in range(801, 826)]
    query = lists.build_current_steps_query(live.store.tables, pks)
    compiled = query.compile(dialect=live.store.engine.dialect, compile_kwargs={"literal_binds": True})
    verb = "EXPLAIN QUERY PLAN" if live.store.database.name == "sqlite" else "EXPLAIN"
    with live.store.engine.begin() as connection:
        lines = [" ".join(map(str, row)) for row in connection.exec_driver_sql(f"{verb} {compiled}".replace("%", "%%"))]
        assert len(connection.execute(query).all()) == len(pks)
    scans = [line for line in lines if re.search(r"Seq Scan|SCAN workflow|^\d \S+ workflow_\S+ (ALL|index) ", line)]
    assert scans == [], "\n".join(lines)


@pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)
def test_suspended_instances_do_not_slow_down_the_sweep_and_the_claim(world: World) -> None:
    fill(world)
    due = [world.create(f"o-{n}") for n in range(3)]
    world.undo_dispatch(*due)
    started = time.monotonic()
    assert [due.ref for due in world.sweep()] == due
    assert world.sweep(priority=RESUMING) == []
    assert world.store.read(schedule.read).next_at == world.now + REDISPATCH.longest
    for ref in due:
        assert world.try_claim(ref, lease=LEASE) is not None
    assert world.try_claim(RunRef("order", "s-777", 1)) is None
    assert time.monotonic() - started < 5
