"""DBOS Transact: workflows of trivial steps on the same PostgreSQL.

Two processes create and run their workflows, 16 at a time each. This is faster than its queues, in which workflows
would wait as those of the other contenders do: here the measurement contains the creation, and no polling. The settings
are the defaults: a pool of 20 connections, no tracing, no Conductor.

`python dbos_peer.py COUNT STEPS` is one of these processes.
"""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from measuring import Answer, Question, measure, processes, wait_for
from peers import Peer
from servers import NAME, SERVER, address, execute, fresh_database, query_one
from wire import CountingProxy

PROCESSES, IN_FLIGHT = 2, 16
DATABASE = f"{NAME}_dbos"
PACKAGES = ("dbos",)
START = 1
"""The advisory lock for which the processes wait, so that all of them begin together."""
WAITING = f"""SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objid = {START} AND NOT granted
AND database = (SELECT oid FROM pg_database WHERE datname = '{DATABASE}')"""


def questions(instances: int) -> dict[str, Question]:
    peer = Peer("DBOS", "workflow", PACKAGES, run)
    return peer.speeds(instances // 5, instances // 40) | peer.counts(run, min(200, instances))


def run(steps: int, count: int, *, proxy: CountingProxy | None = None) -> Answer:
    prepare()
    count = max(PROCESSES, count // PROCESSES * PROCESSES)
    url = {"BENCH_POSTGRESQL_URL": proxy.url.render_as_string(hide_password=False)} if proxy else {}
    with ExitStack() as stack:
        share = str(count // PROCESSES)
        execute(f"SELECT pg_advisory_lock({START})", DATABASE)
        sessions = [stack.enter_context(processes(__file__, share, str(steps), **url)) for _ in range(PROCESSES)]
        wait_for(lambda: query_one(WAITING, DATABASE) == PROCESSES)
        execute(f"SELECT pg_advisory_unlock({START})", DATABASE)
        answer = measure(done, count * steps, sessions=sessions, proxy=proxy)
    execute("TRUNCATE dbos.workflow_status, dbos.operation_outputs CASCADE", DATABASE)
    return answer


@functools.cache
def prepare() -> None:
    """Make its tables, so that the processes need not wait for each other."""
    fresh_database(DATABASE)
    subprocess.run([sys.executable, __file__, "0", "0"], check=True, capture_output=True)


def done() -> int:
    return query_one("SELECT count(*) FROM dbos.operation_outputs", DATABASE)


def work(count: int, steps: int) -> None:
    many = launch()
    execute(f"SELECT pg_advisory_lock_shared({START})", DATABASE)
    with ThreadPoolExecutor(IN_FLIGHT) as threads:
        list(threads.map(many, [steps] * count))


def launch() -> Callable[[int], int]:
    from dbos import DBOS

    DBOS(
        config={
            "name": "durable-bench",
            "system_database_url": address(DATABASE, SERVER),
            "application_version": "bench",
            "log_level": "ERROR",
        }
    )

    @DBOS.step()
    def trivial(number: int) -> int:
        return number

    @DBOS.workflow()
    def many(steps: int) -> int:
        for number in range(steps):
            trivial(number)
        return steps

    DBOS.launch()
    return many


if __name__ == "__main__":
    work(int(sys.argv[1]), int(sys.argv[2]))
