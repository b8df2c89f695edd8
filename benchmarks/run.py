"""What a step costs, as ratios within one run: `make bench`.

Needs PostgreSQL and Redis on 127.0.0.1; BENCH_POSTGRESQL_URL and BENCH_BROKER name others. Makes and drops a
database of its own. The yardstick is a plain loop of single-row INSERT and COMMIT with psycopg on the same
server, in the same run.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import sqlalchemy as sa

HERE = Path(__file__).parent
SERVER = sa.make_url(os.environ.get("BENCH_POSTGRESQL_URL", "postgresql+psycopg://postgres@127.0.0.1:5432/postgres"))
DATABASE = SERVER.set(database="durable_bench")
os.environ["BENCH_BROKER"] = os.environ.get("BENCH_BROKER", "redis://127.0.0.1:6379/9")
os.environ["BENCH_DATABASE"] = DATABASE.render_as_string(hide_password=False)
SECONDS = 3.0
SCRATCH = Path(tempfile.mkdtemp(prefix="durable-bench-"))


def main() -> None:
    instances = int(sys.argv[1]) if len(sys.argv) > 1 else 1500
    fresh_database()
    from project import durable, many

    with durable.internals.store.engine.begin() as conn:
        durable.internals.store.tables.metadata.create_all(conn)
        conn.execute(sa.text("CREATE TABLE bench_start (id text, at double precision)"))
        conn.execute(sa.text("CREATE TABLE bench_row (id bigserial primary key, a bigint, b text, c text)"))
    one, two = insert_loop(1), insert_loop(2)
    print(f"single-row INSERT+COMMIT, psycopg, 1 connection   {one:8.0f} /s")
    print(f"single-row INSERT+COMMIT, psycopg, 2 connections  {two:8.0f} /s")
    for steps, count in ((10, instances), (100, instances // 8), (1, instances)):
        rate, cpu, commits = throughput(durable, many, steps, count)
        print(
            f"{steps:3} steps, prefork -c 2: {rate:6.0f} steps/s = {rate / one:.2f} of 1, {rate / two:.2f} of 2"
            f" connections; worker CPU {cpu:.2f} ms/step; commits {commits:.2f}/step"
        )
    for steps in (10, 1):
        print(f"statements per step ({steps} steps)   {statements(durable, many, steps):.2f}")
    print(f"a superfluous message: {superfluous(durable, many)}")
    print(f"wake-up, due to body start, beat dispatcher: {wake_up(durable)}")
    print(f"step.map: {fan_out()}")
    print(f"create(): {creation(durable, many):.0f} /s, each committed and published")
    durable.close()


def fresh_database() -> None:
    admin = sa.create_engine(SERVER, isolation_level="AUTOCOMMIT")
    with admin.connect() as conn:
        conn.execute(sa.text("DROP DATABASE IF EXISTS durable_bench WITH (FORCE)"))
        conn.execute(sa.text("CREATE DATABASE durable_bench"))


def insert_loop(connections: int) -> float:
    """Commits per second of plain inserts, one process for each connection."""
    with multiprocessing.get_context("spawn").Pool(connections) as pool:
        return sum(pool.map(insert_once, range(connections)))


def insert_once(_: int) -> float:
    url = DATABASE.set(drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(url, prepare_threshold=0) as conn:
        count, started_at = 0, time.perf_counter()
        while time.perf_counter() - started_at < SECONDS:
            conn.execute("INSERT INTO bench_row (a, b, c) VALUES (%s, %s, %s)", (count, "name", '{"x":1}'))
            conn.commit()
            count += 1
        return count / (time.perf_counter() - started_at)


def throughput(durable, many, steps: int, count: int) -> tuple[float, float, float]:
    """Steps per second, worker CPU ms and commits per step, of work that waits when the worker starts."""
    for _ in range(count):
        many.create(steps)
    with processes("worker", "-c", "2", "-P", "prefork") as worker:
        wait_for(lambda: done(durable) > 0)
        cpu, commits, finished, started_at = cpu_seconds(worker), committed(durable), done(durable), time.perf_counter()
        wait_for(lambda: done(durable) >= count)
        took = time.perf_counter() - started_at
        ran = (count - finished) * steps
        result = ran / took, (cpu_seconds(worker) - cpu) / ran * 1000, (committed(durable) - commits) / ran
    with durable.internals.store.engine.begin() as conn:
        for table in reversed(durable.internals.store.tables.metadata.sorted_tables):
            conn.execute(sa.text(f"TRUNCATE {table.name}"))
    return result


def statements(durable, many, steps: int) -> float:
    """Client statements per step: one pass in this process, counted at the driver."""
    handle = many.create(steps)
    counted = 0

    def count(*_: object) -> None:
        nonlocal counted
        counted += 1

    ref = durable.internals.operations.queries.get("many", handle.id).instance.ref
    sa.event.listen(durable.internals.store.engine, "before_cursor_execute", count)
    durable.internals.runner.advance(ref, task_id="bench", node="bench")
    sa.event.remove(durable.internals.store.engine, "before_cursor_execute", count)
    return counted / steps


def superfluous(durable, many) -> str:
    """The cost of a duplicate delivery of a finished run."""
    handle = many.create(1)
    ref = durable.internals.operations.queries.get("many", handle.id).instance.ref
    durable.internals.runner.advance(ref, task_id="bench", node="bench")
    times = []
    for _ in range(500):
        started_at = time.perf_counter()
        durable.internals.runner.advance(ref, task_id="bench", node="bench")
        times.append((time.perf_counter() - started_at) * 1000)
    return f"1 statement, p50 {statistics.median(times):.2f} ms, p99 {statistics.quantiles(times, n=100)[98]:.2f} ms"


def wake_up(durable) -> str:
    """How late bodies start after sleeps of 2 to 6 s, spread, with real worker and beat."""
    from project import sleeper

    with processes("worker", "-c", "2", "-P", "prefork"), processes("beat", "-s", str(SCRATCH / "schedule")):
        sleeper.create(0.01).result(timeout=60)  # both are up
        with durable.internals.store.engine.begin() as conn:
            conn.execute(sa.text("TRUNCATE bench_start"))
        handles = [sleeper.create(2 + index * 0.02) for index in range(200)]
        for handle in handles:
            handle.result(timeout=60)
    with durable.internals.store.engine.connect() as conn:
        rows = conn.execute(
            sa.text(
                "SELECT b.at - s.wake_at / 1e6 FROM bench_start b JOIN workflow_instance i ON i.instance_id = b.id"
                " JOIN workflow_step s ON s.instance_pk = i.id AND s.step_key = 'nap'"
            )
        )
        late = sorted(float(row[0]) * 1000 for row in rows)
    return f"p50 {late[len(late) // 2]:.0f} ms, p99 {late[int(len(late) * 0.99)]:.0f} ms, {len(late)} timers"


def fan_out(tasks: int = 2000) -> str:
    """So many tasks that do next to nothing, as one step, against the same tasks sent by hand."""
    from project import count, counter, spread

    with processes("worker", "-c", "2", "-P", "prefork"):
        spread.create(1).result(timeout=60)  # it is up
        counter.set("durable-bench-count", 0)
        started_at = time.perf_counter()
        for number in range(tasks):
            count.delay(number)
        wait_for(lambda: int(counter.get("durable-bench-count")) == tasks)
        by_hand = tasks / (time.perf_counter() - started_at)
        started_at = time.perf_counter()
        spread.create(tasks).result(timeout=120)
        mapped = tasks / (time.perf_counter() - started_at)
    counter.delete("durable-bench-count")
    return f"{mapped:.0f} tasks/s with their answers recorded = {mapped / by_hand:.2f} of {by_hand:.0f}/s by hand"


def creation(durable, many) -> float:
    started_at = time.perf_counter()
    for _ in range(500):
        many.create(1)
    return 500 / (time.perf_counter() - started_at)


@contextmanager
def processes(kind: str, *options: str) -> Iterator[int]:
    """A Celery process in a session of its own, ended with all its children; its log is kept beside the others."""
    log = (SCRATCH / f"{kind}.log").open("w")
    command = [sys.executable, "-m", "celery", "-A", "project", kind, "-l", "warning", *options]
    process = subprocess.Popen(command, cwd=HERE, stdout=log, stderr=log, start_new_session=True)
    try:
        yield process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=30)
        log.close()


def cpu_seconds(session: int) -> float:
    """CPU time of all processes of a session, theirs and what they reaped."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except FileNotFoundError:
            continue
        if int(fields[3]) == session:
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def committed(durable) -> int:
    with durable.internals.store.engine.connect() as conn:
        conn.execute(sa.text("SELECT pg_stat_clear_snapshot()"))
        return conn.execute(
            sa.text("SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()")
        ).scalar_one()


def done(durable) -> int:
    with durable.internals.store.engine.connect() as conn:
        return conn.execute(sa.text("SELECT count(*) FROM workflow_instance WHERE status = 'complete'")).scalar_one()


def wait_for(condition, timeout: float = 120) -> None:
    end = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"the workers did not finish in time: see {SCRATCH}/worker.log")
        time.sleep(0.02)


if __name__ == "__main__":
    main()
