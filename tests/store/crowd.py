"""Many instances in every status, written by the database itself, and the rows that a read of them meets."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import sqlalchemy as sa

from celery_durable.store.engine import Store, Tx

_PAST, _LATER = 1_600_000_000_000_000, 4_000_000_000_000_000
_INSTANCES = """
INSERT INTO workflow_instance (workflow, instance_id, kind, run_number, status, run_at, next_check_at, wake_reason,
                               priority, dispatch_count, crash_count, pause_requested, version, queue, created_at,
                               updated_at)
SELECT CASE WHEN mod(n, 1000) = 0 THEN 'refund' WHEN mod(n, 10) = 0 THEN 'ship' ELSE 'order' END,
       {id}, 'replay', 1,
       CASE WHEN mod(n, 5000) = 7 THEN 'paused' WHEN mod(n, 3) = 0 THEN 'waiting' WHEN mod(n, 100) = 1 THEN 'errored'
            ELSE 'complete' END,
       CASE WHEN mod(n, 3) = 0 THEN {later} + n END, CASE WHEN mod(n, 3) = 0 THEN {later} + n END, 'wake', mod(n, 2),
       0, 0, false, 2, 'durable', {past} + n, {past} + n FROM {numbers}
"""
_REST = (
    """INSERT INTO workflow_run (instance_pk, run_number, params, output, created_at, completed_at, commit_id,
                                 log_count, dropped_log_count)
    SELECT id, 1, '{{}}', CASE WHEN status = 'complete' THEN 'null' END, created_at,
           CASE WHEN status IN ('complete', 'errored') THEN updated_at END, 'c', 0, 0 FROM workflow_instance""",
    """INSERT INTO workflow_step (instance_pk, run_number, step_key, seq, name, type, status, attempts,
                                  wait_event_type, commit_id, created_at)
    SELECT id, 1, 'approved', 1, 'approved', CASE WHEN mod({n}, 300) = 0 THEN 'waitForEvent' ELSE 'sleep' END,
           CASE WHEN status = 'waiting' THEN 'waiting' ELSE 'completed' END, 0,
           CASE WHEN mod({n}, 300) = 0 THEN 'approval' END, 'c', 0 FROM workflow_instance""",
    """INSERT INTO workflow_label (instance_pk, name, value)
    SELECT id, 'tenant', CASE WHEN mod({n}, 20000) = 777 THEN 'rare' ELSE 'acme' END FROM workflow_instance
    UNION ALL SELECT id, 'stage', 'new' FROM workflow_instance""",
    """INSERT INTO workflow_outbox (id, kind, name, payload, instance_pk, run_number, attempts, next_check_at,
                                    created_at)
    SELECT {text_id}, 'event', 'Paid', '1', id, 1, 0, CASE WHEN mod({n}, 2) = 0 THEN {later} + id END, 0
    FROM workflow_instance""",
    """INSERT INTO workflow_hold (instance_pk, run_number, step_key, position, name, {quote}key{quote}, fair_key, seq,
                                  turn, state, asked_at, lapses)
    SELECT id, 1, 'charge', -1, 'bank', '', '', id, 0, 'waiting', {past}, 0 FROM workflow_instance
    WHERE mod({n}, 30) = 3""",
    """INSERT INTO workflow_limit (name, {quote}key{quote}, at_once, next_grant_at, next_start_at, last_seq, turn,
                                   updated_at)
    SELECT 'bank', '', 20, 0, 0, 0, 0, 0 FROM workflow_instance WHERE {n} = 1
    UNION ALL SELECT 'tenant', {text_id}, 20, 0, 0, 0, 0, 0 FROM workflow_instance WHERE mod({n}, 200) = 0""",
)
_TABLES = (
    "workflow_instance, workflow_run, workflow_step, workflow_label, workflow_outbox, workflow_hold, workflow_limit"
)


class Crowd:
    """A store that many instances fill: two thirds have ended, a third sleeps or waits."""

    def __init__(self, store: Store) -> None:
        self.store, self.name = store, store.database.name

    def fill(self, number: int, *, is_analyzed: bool = True) -> None:
        """Insert the instances, and have the database read its statistics."""
        numbers = {
            "postgresql": f"generate_series(1, {number}) n",
            "mariadb": f"(SELECT seq AS n FROM seq_1_to_{number}) n",
            "sqlite": f"(WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c WHERE n < {number})"
            " SELECT n FROM c) n",
        }[self.name]
        id_, text_id = ("'s-' || n", "'m-' || id") if self.name == "sqlite" else ("concat('s-', n)", "concat('m-', id)")
        # The keys of a database that is used again do not begin with 1.
        given = {"numbers": numbers, "id": id_, "text_id": text_id, "later": _LATER, "past": _PAST}
        given |= {"n": f"created_at - {_PAST}", "quote": "`" if self.name == "mariadb" else '"'}
        autocommit = self.store.engine.execution_options(isolation_level="AUTOCOMMIT")
        if self.name == "postgresql":  # which plans for what earlier tests have deleted, until a vacuum
            with autocommit.connect() as connection:
                connection.exec_driver_sql(f"VACUUM FULL {_TABLES}")
        with self.store.engine.begin() as connection:
            for statement in (_INSTANCES, *_REST):
                connection.exec_driver_sql(statement.format(**given))
        if not is_analyzed:
            return
        with autocommit.connect() as connection:
            if self.name == "postgresql":
                connection.exec_driver_sql(f"VACUUM ANALYZE {_TABLES}")
            elif self.name == "mariadb":
                connection.exec_driver_sql(f"ANALYZE TABLE {_TABLES}").close()
            else:
                connection.exec_driver_sql("ANALYZE")

    def count_met_rows(self, read: Callable[[Tx], Any]) -> int:
        """Return how many rows and index entries the statements of a read meet.

        SQLite counts none: there it is the number of scanned tables, each of which counts as all of its rows.
        """
        with self.store.engine.connect() as connection, connection.begin():
            tx = Tx(connection, self.store)
            if self.name == "postgresql":
                return self._count_by_postgresql(tx, read)
            if self.name == "mariadb":
                before = _handler_reads(connection)
                read(tx)
                return _handler_reads(connection) - before
            return self._count_by_sqlite(tx, read)

    def _count_by_postgresql(self, tx: Tx, read: Callable[[Tx], Any]) -> int:
        met = 0
        for statement, parameters in collect(tx, read):
            if statement.lstrip().upper().startswith(("SELECT", "WITH")):
                (found,) = tx.conn.exec_driver_sql(
                    f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {statement}", parameters
                ).scalar_one()
                met += _met(found["Plan"])
        return met

    def _count_by_sqlite(self, tx: Tx, read: Callable[[Tx], Any]) -> int:
        scans = 0
        for statement, parameters in collect(tx, read):
            lines = tx.conn.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters).all()
            scans += sum(_is_scan(line[3]) for line in lines)
        return scans * 1_000_000


def _is_scan(line: str) -> bool:
    """Whether a line of a plan reads a table from end to end. Walks along an index or the primary key have a limit."""
    return re.fullmatch(r"SCAN workflow_(?!instance_\d)\w+", line) is not None


def collect(tx: Tx, read: Callable[[Tx], Any]) -> list[tuple[str, Any]]:
    seen: list[tuple[str, Any]] = []
    sa.event.listen(tx.conn, "before_cursor_execute", lambda *given: seen.append((given[2], given[3])))
    read(tx)
    return list(seen)


def _met(plan: dict[str, Any]) -> int:
    own = plan["Actual Rows"] + plan.get("Rows Removed by Filter", 0) if "Scan" in plan["Node Type"] else 0
    return int(own * plan["Actual Loops"]) + sum(_met(each) for each in plan.get("Plans", ()))


def _handler_reads(connection: sa.Connection) -> int:
    rows = connection.exec_driver_sql("SHOW SESSION STATUS LIKE 'Handler_read%%'").all()
    return sum(int(value) for _, value in rows)
