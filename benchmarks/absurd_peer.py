"""Absurd: tasks of trivial steps on the same PostgreSQL. Its schema is the one that `absurdctl` of PyPI carries.

Two processes with one task at a time each: its documentation recommends to scale by processes, and the threads of one
process would share one connection. The tasks wait in the queue when the processes start.

`python absurd_peer.py` is one of these processes.
"""

from __future__ import annotations

import functools
import signal
import subprocess
import sys
from contextlib import ExitStack

from measuring import Answer, Question, measure, processes
from peers import Peer
from servers import NAME, SERVER, address, fresh_database, query_one
from wire import CountingProxy

PROCESSES = 2
DATABASE = f"{NAME}_absurd"
QUEUE = "bench"
PACKAGES = ("absurd-sdk", "absurdctl")


def questions(instances: int) -> dict[str, Question]:
    peer = Peer("Absurd", "task", PACKAGES, run)
    return peer.speeds(instances // 2, instances // 16) | peer.counts(run, min(200, instances))


def run(steps: int, count: int, *, proxy: CountingProxy | None = None) -> Answer:
    prepare()
    app, count = make_app(), max(PROCESSES, count)
    app.create_queue(QUEUE)
    for _ in range(count):
        app.spawn("many", steps)
    url = {"BENCH_POSTGRESQL_URL": proxy.url.render_as_string(hide_password=False)} if proxy else {}
    with ExitStack() as stack:
        sessions = [stack.enter_context(processes(__file__, **url)) for _ in range(PROCESSES)]
        answer = measure(done, count * steps, sessions=sessions, proxy=proxy)
    app.drop_queue(QUEUE)
    app.close()
    return answer


@functools.cache
def prepare() -> None:
    fresh_database(DATABASE)
    program = "from absurdctl import main; main()"
    subprocess.run([sys.executable, "-c", program, "init", "-d", address(DATABASE)], check=True, capture_output=True)


def done() -> int:
    return query_one(f"SELECT count(*) FROM absurd.c_{QUEUE}", DATABASE)


def make_app():
    from absurd_sdk import Absurd

    app = Absurd(address(DATABASE, SERVER), queue_name=QUEUE)

    @app.register_task(name="many")
    def many(steps: int, context) -> int:
        for number in range(steps):
            context.step(f"step {number}", lambda number=number: number)
        return steps

    return app


def main() -> None:
    app = make_app()
    signal.signal(signal.SIGTERM, lambda *_: app.stop_worker())
    app.start_worker(concurrency=1)


if __name__ == "__main__":
    main()
