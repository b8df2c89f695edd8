"""DBOS Transact: workflows of trivial steps on the same PostgreSQL, in the two forms that its documentation shows.

Direct: two processes create and run their workflows, 16 threads each call them. The measurement contains the creation.
Queue: the workflows wait in a registered queue when two processes start, as the work of the other contenders does; the
queue has the default settings: no limit of concurrency, polled every second. All other settings are the defaults, too:
a pool of 20 connections, no tracing, no Conductor.

`python dbos_peer.py direct|queue COUNT STEPS NAME` is one of these processes.
"""

from __future__ import annotations

import functools
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

from measuring import Answer, Question, measure, processes, wait_for
from peers import Peer
from servers import NAME, SERVER, address, execute, fresh_database, query_one
from wire import CountingProxy

PROCESSES, IN_FLIGHT = 2, 16
DATABASE = f"{NAME}_dbos"
QUEUE, VERSION = "bench", "bench"
PACKAGES = ("dbos",)
START = 1
"""The advisory lock for which the processes wait, so that all of them begin together."""
WAITING = f"""SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objid = {START} AND NOT granted
AND database = (SELECT oid FROM pg_database WHERE datname = '{DATABASE}')"""


def questions(instances: int) -> dict[str, Question]:
    direct, queue = (
        Peer(name, "workflow", PACKAGES, run) for name, run in (("DBOS", run_direct), ("DBOS_queue", run_queued))
    )
    few, fewest = instances // 5, instances // 40
    return direct.speeds(few, fewest) | queue.speeds(few, fewest) | direct.counts(run_direct, min(200, instances))


def run_direct(steps: int, count: int, *, proxy: CountingProxy | None = None) -> Answer:
    prepare()
    share = max(1, count // PROCESSES)
    url = {"BENCH_POSTGRESQL_URL": proxy.url.render_as_string(hide_password=False)} if proxy else {}
    with ExitStack() as stack:
        execute(f"SELECT pg_advisory_lock({START})", DATABASE)
        sessions = [
            stack.enter_context(processes(__file__, "direct", str(share), str(steps), f"direct{number}", **url))
            for number in range(PROCESSES)
        ]
        wait_for(lambda: query_one(WAITING, DATABASE) == PROCESSES)
        execute(f"SELECT pg_advisory_unlock({START})", DATABASE)
        answer = measure(done, share * PROCESSES * steps, sessions=sessions, proxy=proxy)
    forget()
    return answer


def run_queued(steps: int, count: int) -> Answer:
    from dbos import DBOSClient

    prepare()
    client = DBOSClient(system_database_url=address(DATABASE, SERVER))
    for _ in range(count):
        client.enqueue({"queue_name": QUEUE, "workflow_name": many.__qualname__, "app_version": VERSION}, steps)
    client.destroy()
    with ExitStack() as stack:
        sessions = [
            stack.enter_context(processes(__file__, "queue", "0", "0", f"queue{number}")) for number in range(PROCESSES)
        ]
        answer = measure(done, count * steps, sessions=sessions)
    forget()
    return answer


@functools.cache
def prepare() -> None:
    """Make its tables, so that the processes need not wait for each other."""
    fresh_database(DATABASE)
    subprocess.run([sys.executable, __file__, "direct", "0", "0", "prepare"], check=True, capture_output=True)


def forget() -> None:
    execute("TRUNCATE dbos.workflow_status, dbos.operation_outputs CASCADE", DATABASE)


def done() -> int:
    return query_one("SELECT count(*) FROM dbos.operation_outputs", DATABASE)


def trivial(number: int) -> int:
    return number


def many(steps: int) -> int:
    step = _step()
    for number in range(steps):
        step(number)
    return steps


@functools.cache
def _step() -> Callable[[int], int]:
    from dbos import DBOS

    return DBOS.step()(trivial)


def launch(executor: str) -> Any:
    """DBOS and its form of `many`."""
    from dbos import DBOS

    DBOS(
        config={
            "name": "durable-bench",
            "system_database_url": address(DATABASE, SERVER),
            "application_version": VERSION,
            "executor_id": executor,
            "log_level": "ERROR",
        }
    )
    _step()
    workflow = DBOS.workflow()(many)
    DBOS.launch()
    return workflow


def main(form: str, count: int, steps: int, executor: str) -> None:
    workflow = launch(executor)
    if form == "queue":
        from dbos import DBOS

        DBOS.register_queue(QUEUE)
        threading.Event().wait()
    execute(f"SELECT pg_advisory_lock_shared({START})", DATABASE)
    with ThreadPoolExecutor(IN_FLIGHT) as threads:
        list(threads.map(workflow, [steps] * count))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
