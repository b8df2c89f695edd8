"""What many instances cost on PostgreSQL: `python benchmarks/scale.py reads|partitions|bytes|limits [NUMBER]`.

``reads`` times every list, count and page of the dashboard among NUMBER instances (10,000,000). ``partitions`` compares
deleting the steps of NUMBER instances (20,000) with dropping a partition of them, and loads and inserts with and
without partitions. ``bytes`` says what NUMBER sleeping instances (1,000,000) weigh, index by index. ``limits`` says how
long it takes from the end of a hold to the message of its successor, while 1,000 and NUMBER (100,000) wait, and how
evenly 100 tenants are served, one of which has nearly all that wait. A database of its own is made on the
server of the tests, and dropped.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from celery import Celery
from servers import BROKER
from starlette.testclient import TestClient

sys.path.insert(0, str(Path(__file__).parent.parent))

from celery_durable import Durable
from celery_durable.config import Settings
from celery_durable.dashboard import dashboard
from celery_durable.model import DueRun
from celery_durable.operations.limit_queue import LimitQueue
from celery_durable.store.engine import Store, Tx
from celery_durable.store.instances import instances
from celery_durable.store.migrations import migrate
from celery_durable.store.runs import holds
from celery_durable.store.runs.holds import LimitKey
from tests.store.crowd import Crowd
from tests.store.instances.test_bounds import READS
from tests.support.services import DATABASES

NAME = "durable_scale"
STEPS = 10
REFRESH_SECONDS = 11
"""Longer than the first page of the dashboard keeps what it has read, and about as often as an open page refreshes."""
_FILL_STEPS = """INSERT INTO {table} (instance_pk, run_number, step_key, seq, name, type, status, attempts, commit_id,
created_at, result) SELECT n, 1, 'step-' || k, k, 'step-' || k, 'do', 'completed', 1, 'c', 0, '{{"cents": 5}}'
FROM generate_series({first}, {last}) n, generate_series(1, {steps}) k"""


@contextlib.contextmanager
def own_database() -> Iterator[Store]:
    server = sa.make_url(DATABASES["postgresql"])
    admin = sa.create_engine(server, isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        connection.exec_driver_sql(f"DROP DATABASE IF EXISTS {NAME} WITH (FORCE)")
        connection.exec_driver_sql(f"CREATE DATABASE {NAME}")
    store = Store(server.set(database=NAME).render_as_string(hide_password=False))
    try:
        migrate.upgrade(store)
        yield store
    finally:
        store.close()
        with admin.connect() as connection:
            connection.exec_driver_sql(f"DROP DATABASE {NAME} WITH (FORCE)")
        admin.dispose()


def measure(work: Callable[[], Any], *, times: int) -> float:
    """The median time in milliseconds."""
    took = []
    for _ in range(times):
        began = time.perf_counter()
        work()
        took.append((time.perf_counter() - began) * 1000)
    return statistics.median(took)


def measure_reads(number: int) -> None:
    with own_database() as store:
        began = time.perf_counter()
        Crowd(store).fill(number)
        print(f"{number:,} instances, made in {time.perf_counter() - began:.0f} s")
        with store.engine.connect() as connection, connection.begin():
            tx = Tx(connection, store)
            for name, read in READS.items():
                read(tx)
                print(f"{name:45} {measure(lambda read=read: read(tx), times=5):8.1f} ms")
        measure_pages(store)


def measure_pages(store: Store) -> None:
    app = Celery("scale", broker=BROKER, set_as_current=False)
    app.conf.durable_database_url = store.engine.url.render_as_string(hide_password=False)
    durable = Durable(app)
    pages = TestClient(dashboard(durable, allow_anonymous=True))

    def show(path: str) -> None:
        pages.get(path).raise_for_status()

    show("/")
    took = []
    for _ in range(5):
        time.sleep(REFRESH_SECONDS)
        took.append(measure(lambda: show("/"), times=1))
    print(f"dashboard {'/':35} {statistics.median(took):8.1f} ms")
    for path in ("/instances", "/waits"):
        print(f"dashboard {path:35} {measure(lambda path=path: show(path), times=5):8.1f} ms")
    durable.close()


def measure_bytes(number: int) -> None:
    with own_database() as store:
        Crowd(store).fill(number)
        query = """SELECT relname, relkind, pg_relation_size(oid) AS bytes FROM pg_class
        WHERE relname LIKE '%workflow_%' AND relkind IN ('r', 'i') ORDER BY 3 DESC"""
        with store.engine.connect() as connection:
            for name, kind, size in connection.exec_driver_sql(query.replace("%", "%%")):
                if size > number:
                    print(f"{'index' if kind == 'i' else 'table'} {name:40} {size / number:7.0f} bytes an instance")


def measure_partitions(number: int) -> None:
    with own_database() as store, store.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        run = connection.exec_driver_sql
        run("CREATE TABLE plain (LIKE workflow_step INCLUDING ALL)")
        run("CREATE TABLE parted (LIKE workflow_step INCLUDING ALL) PARTITION BY RANGE (instance_pk)")
        for part in range(8):
            bounds = f"FROM ({part * number}) TO ({(part + 1) * number})"
            run(f"CREATE TABLE parted_{part} PARTITION OF parted FOR VALUES {bounds}")
        for table in ("plain", "parted"):
            run(_FILL_STEPS.format(table=table, first=0, last=8 * number - 1, steps=STEPS))
            run(f"VACUUM ANALYZE {table}")
        for table in ("plain", "parted"):
            load = f"SELECT * FROM {table} WHERE instance_pk = 7 * {number} + 5 AND run_number = 1"
            run("BEGIN")
            run(f"PREPARE load_{table} AS {load}")
            each = measure(lambda table=table: run(f"EXECUTE load_{table}").all(), times=500)
            run("COMMIT")
            print(f"{table:7} load of {STEPS} steps        {each:8.3f} ms")
        first = 8 * number
        run(f"CREATE TABLE parted_8 PARTITION OF parted FOR VALUES FROM ({first}) TO ({2 * first})")
        for table in ("plain", "parted"):
            insert = _FILL_STEPS.format(table=table, first=first, last=first + number // 10, steps=STEPS)
            print(
                f"{table:7} insert of {number:,} steps  {measure(lambda insert=insert: run(insert), times=1):8.0f} ms"
            )
        delete = f"DELETE FROM plain WHERE instance_pk < {number}"
        print(f"plain   delete of {number * STEPS:,} steps {measure(lambda: run(delete), times=1):8.0f} ms")
        print(f"plain   and its vacuum         {measure(lambda: run('VACUUM plain'), times=1):8.0f} ms")

        def drop() -> None:
            run("ALTER TABLE parted DETACH PARTITION parted_0 CONCURRENTLY")
            run("DROP TABLE parted_0")

        print(f"parted  detach and drop        {measure(drop, times=1):8.0f} ms")


_WAIT_FOR_LIMIT = (
    """INSERT INTO workflow_instance (workflow, instance_id, kind, run_number, status, wake_reason, priority,
    dispatch_count, crash_count, pause_requested, version, queue, created_at, updated_at)
    SELECT 'order', 's-' || n, 'replay', 1, 'waiting', 'wake', 1, 0, 0, false, 2, 'durable', 0, 0
    FROM generate_series(1, {number}) n""",
    """INSERT INTO workflow_step (instance_pk, run_number, step_key, seq, name, type, status, attempts, commit_id,
    created_at) SELECT id, 1, 'call', 1, 'call', 'do', 'waiting', 0, 'c', 0 FROM workflow_instance""",
    """INSERT INTO workflow_limit (name, key, at_once, next_grant_at, next_start_at, last_seq, turn, updated_at)
    VALUES ('bank', '', 3, 0, 0, {number}, 0, 0)""",
    # The turns are those of tenants that ask one after the other: each has a turn for each of its own that waits.
    """INSERT INTO workflow_hold (instance_pk, run_number, step_key, position, name, key, fair_key, seq, turn, state,
    asked_at, lapses) SELECT id, 1, 'call', -1, 'bank', '', tenant,
    id, row_number() OVER (PARTITION BY tenant ORDER BY id), 'waiting', 0, 0
    FROM (SELECT id, CASE WHEN {tenants} = 1 THEN '' WHEN id <= {tenants} * 50 THEN 't' || mod(id, {tenants})
          ELSE 't0' END AS tenant FROM workflow_instance) t""",
)


def measure_limits(number: int) -> None:
    for waiting, tenants in ((1_000, 1), (number, 1), (number, 100)):
        with own_database() as store:
            with store.engine.begin() as connection:
                for statement in _WAIT_FOR_LIMIT:
                    connection.exec_driver_sql(statement.format(number=waiting, tenants=tenants))
            took, served = hand_on(store, times=400 if tenants == 1 else 2_000)
        p50, p95 = took[len(took) // 2], took[len(took) * 95 // 100]
        jain = sum(served) ** 2 / (tenants * sum(count * count for count in served))
        print(f"{waiting:,} of {tenants} tenants wait: p50 {p50:.1f} ms, p95 {p95:.1f} ms, Jain {jain:.3f}")


def hand_on(store: Store, *, times: int) -> tuple[list[float], list[int]]:
    """Give a limit to one waiter after the other: how long each takes, and how many each tenant has got."""
    messages: list[DueRun] = []
    queue, bank = LimitQueue(store, Settings(""), messages.extend), LimitKey("bank", "")
    queue.serve([bank])
    took, served = [], Counter[str]()
    for number in range(times):
        find = functools.partial(instances.find_pk, workflow="order", instance_id=messages[number].ref.instance_id)
        pk = store.read(find)
        (row,) = store.read(lambda tx, pk=pk: holds.read(tx, pk))
        served[row.fair_key] += 1
        began = time.perf_counter()
        store.transact(lambda tx, pk=pk: holds.release(tx, pk))
        queue.serve([bank])
        took.append((time.perf_counter() - began) * 1000)
        assert len(messages) == number + 4, "nobody has got the limit"
    return sorted(took), list(served.values())


def main() -> None:
    what, *rest = sys.argv[1:] or ["reads"]
    work, default = {
        "reads": (measure_reads, 10_000_000),
        "partitions": (measure_partitions, 20_000),
        "bytes": (measure_bytes, 1_000_000),
        "limits": (measure_limits, 100_000),
    }[what]
    work(int(rest[0]) if rest else default)


if __name__ == "__main__":
    main()
