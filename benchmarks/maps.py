"""What the items of a map cost, against the same tasks sent by hand: `python benchmarks/maps.py [tasks [rounds]]`.

Needs PostgreSQL and Redis, as `benchmarks/run.py`. All tasks wait in their queue before a prefork worker with two
processes starts. The rate is that from the tenth percentile of the tasks to the last one. The ways are interleaved,
since a machine's speed drifts: compare inside a round.
"""

from __future__ import annotations

import os
import statistics
import struct
import sys

from machine import cpu_seconds
from measuring import SCRATCH, wait_for, worker
from servers import KEY_PREFIX, fresh_database

LOG = SCRATCH / "bodies"
os.environ["BENCH_LOG"] = str(LOG)


def main() -> None:
    tasks, rounds = (int(each) for each in (sys.argv[1:] + ["2000", "3"][len(sys.argv) - 1 :]))
    fresh_database()
    from project import durable

    durable.migrate()
    found: dict[str, list[float]] = {}
    for number in range(rounds):
        ways = ("by hand", "map", "map, 50 at a time")
        for way in ways if number % 2 == 0 else ways[::-1]:
            rate, cpu = measure(durable, way, tasks)
            found.setdefault(way, []).append(rate)
            print(f"round {number}: {way:18} {rate:6.0f} tasks/s, worker CPU {cpu:.2f} ms each", flush=True)
    for way, rates in found.items():
        ratios = [rate / by_hand for rate, by_hand in zip(rates, found["by hand"], strict=True)]
        print(f"{way:18} {statistics.median(ratios):.2f} of by hand ({' '.join(f'{each:.2f}' for each in ratios)})")
    durable.close()


def measure(durable, way: str, tasks: int) -> tuple[float, float]:
    from project import app, stamp, stamps

    LOG.unlink(missing_ok=True)
    with app.connection_for_write() as connection:
        for queue in ("durable", "stamps"):
            connection.default_channel.queue_declare(queue, durable=True, auto_delete=False)
            connection.default_channel.queue_purge(queue)
    if way == "by hand":
        for number in range(tasks):
            stamp.delay(number)
        return consume(tasks)
    limit = 50 if "50" in way else None
    with worker("-P", "solo", "-Q", "durable", "-n", "passes@%h"):
        instance = stamps.create({"tasks": tasks, "limit": limit})
        wait_for(lambda: queue_length("stamps") >= min(tasks, limit or tasks))
        measured = consume(tasks)
        assert instance.result(timeout=60) == tasks
        return measured


def queue_length(queue: str) -> int:
    from project import counter

    return counter.llen(f"{KEY_PREFIX}{queue}")


def consume(tasks: int) -> tuple[float, float]:
    with worker("-c", "2", "-P", "prefork", "-Q", "stamps", "-n", "tasks@%h") as pid:
        wait_for(lambda: LOG.exists() and LOG.stat().st_size >= 8 * tasks)
        cpu = cpu_seconds(pid)
    times = sorted(struct.unpack(f"{tasks}d", LOG.read_bytes()[: 8 * tasks]))
    first = tasks // 10
    return (tasks - first) / (times[-1] - times[first]), cpu / tasks * 1e3


if __name__ == "__main__":
    main()
