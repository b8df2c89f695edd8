"""What one dispatcher publishes: `python benchmarks/dispatcher.py [NUMBER]`.

NUMBER instances (20,000) are due at once. One dispatcher sweeps them and publishes a message for each, in three
rounds. The yardstick is `send_task` in the same process, to the same broker. CPU is that of this process and of its
PostgreSQL backend. Needs PostgreSQL and Redis on 127.0.0.1; BENCH_POSTGRESQL_URL and BENCH_BROKER name others.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from pathlib import Path

import sqlalchemy as sa
from publish import send_by_celery
from servers import NAME, fresh_database

ROUNDS = 3
FILL = """INSERT INTO workflow_instance (workflow, instance_id, kind, run_number, status, run_at, next_check_at,
 wake_reason, priority, dispatch_count, crash_count, pause_requested, version, queue, created_at, updated_at)
SELECT 'sleeper', 's-' || n, 'replay', 1, 'waiting', n, n, 'wake', 0, 0, 0, false, 2, :queue, n, n
FROM generate_series(1, :number) n"""


def main() -> None:
    logging.disable(logging.WARNING)
    number = int(sys.argv[1]) if len(sys.argv) > 1 else 20_000
    fresh_database()
    from project import app, durable

    from celery_durable.store.migrations import migrate

    app.conf.durable_queue_high_water = 10**9
    store, sweeper = durable.internals.store, durable.internals.sweeper
    migrate.upgrade(store)
    for _ in range(ROUNDS):
        by_hand = rate("send_task", number // 10, lambda: send_by_celery(app, "bench", number // 10))
        with store.engine.begin() as conn:
            conn.execute(sa.text("TRUNCATE workflow_instance CASCADE"))
            conn.execute(sa.text(FILL), {"queue": durable.internals.settings.queue, "number": number})
        with store.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as conn:
            conn.execute(sa.text("VACUUM ANALYZE workflow_instance"))
        swept = rate("dispatcher", number, sweeper.sweep)
        print(f"one dispatcher = {swept / by_hand:.1f} of send_task")
    for queue in ("bench", durable.internals.settings.queue):
        with app.connection_for_write() as connection:
            connection.default_channel.queue_purge(queue)
    durable.close()


def rate(what, count, work) -> float:
    began, cpu, database = time.perf_counter(), time.process_time(), backends_cpu()
    work()
    took, spent, in_database = time.perf_counter() - began, time.process_time() - cpu, backends_cpu() - database
    each = f"{spent / count * 1e6:6.1f} us of CPU here and {in_database / count * 1e6:5.1f} in PostgreSQL each"
    print(f"{what:<12} {count / took:8.0f} /s  {each}")
    return count / took


def backends_cpu() -> float:
    """CPU seconds of all backends of the benchmark's database."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            if NAME in stat.with_name("cmdline").read_text():
                fields = stat.read_text().rpartition(")")[2].split()
                ticks += int(fields[11]) + int(fields[12])
        except (FileNotFoundError, ProcessLookupError):
            continue
    return ticks / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
