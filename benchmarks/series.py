"""How costs grow, as the charts of docs/explanation/scale.md show it: `python benchmarks/series.py history`.

The series are ``history``, ``payload``, ``processes`` and ``sleepers``. Prints JSON lines: what the chart is, then its
points. A point is measured again while others use the machine, up to ``--tries`` times; the exit status is 1 if a point
stayed noisy. `python benchmarks/series.py history > docs/pictures/scale-history.txt && make pictures` draws it anew.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import sqlalchemy as sa
from engine import EngineQuestions
from machine import OTHERS_AT_MOST, OthersMeter, wait_until_quiet
from measuring import Answer
from servers import drop_database, forget_keys, fresh_database

RECORDINGS, REPLAYS, WRITES = 3, 20, 50
DUE_LATER = 4_000_000_000_000_000
"""The time at which all sleepers are due, in microseconds since 1970."""
FILL = (
    """INSERT INTO workflow_instance (workflow, instance_id, kind, run_number, status, run_at, next_check_at,
    wake_reason, priority, dispatch_count, crash_count, pause_requested, version, queue, created_at, updated_at)
    SELECT 'sleeper', 's-' || n, 'replay', 1, 'waiting', :due + n, :due + n, 'wake', 0, 0, 0, false, 2, :queue, n, n
    FROM generate_series(CAST(:first AS bigint), CAST(:last AS bigint)) n""",
    """INSERT INTO workflow_run (instance_pk, run_number, params, created_at, commit_id, log_count, dropped_log_count)
    SELECT id, 1, '1', created_at, 'c', 0, 0 FROM workflow_instance WHERE created_at BETWEEN :first AND :last
    AND workflow = 'sleeper'""",
    """INSERT INTO workflow_step (instance_pk, run_number, step_key, seq, name, type, status, attempts, wake_at,
    commit_id, created_at)
    SELECT id, 1, 'nap', 1, 'nap', 'sleep', 'waiting', 0, run_at, 'c', 0 FROM workflow_instance
    WHERE created_at BETWEEN :first AND :last AND workflow = 'sleeper'""",
)


class Chart(NamedTuple):
    title: str
    x: str
    y: str
    points: Callable[[], Iterator[tuple[int, Callable[[], Answer]]]]
    """Each value of x, and what measures the series there."""


class Series:
    """The charts, measured with the engine of this process and its workers."""

    def __init__(self, most_sleepers: int) -> None:
        fresh_database()
        self._engine, self._most_sleepers = EngineQuestions(), most_sleepers
        self._durable = self._engine.durable
        self._record_and_replay(10, 10)  # compiles the statements
        self.charts = {
            "history": Chart("A pass that replays its steps", "recorded steps", "ms", self._history),
            "payload": Chart("A step and the size of its result", "bytes of the result", "ms", self._payload),
            "processes": Chart(
                "Steps in a second, 10 in a workflow", "processes or threads", "steps/s", self._processes
            ),
            "sleepers": Chart("Work among sleeping instances", "sleeping instances", "ms", self._sleepers),
        }

    def close(self) -> None:
        self._durable.close()
        drop_database()
        forget_keys()

    def _history(self) -> Iterator[tuple[int, Callable[[], Answer]]]:
        for steps in (10, 30, 100, 300, 1000):

            def measure(steps: int = steps) -> Answer:
                sizes = {"results of 10 bytes": 10, "results of 1,000 bytes": 1000}
                return {name: self._record_and_replay(steps, size)[1] for name, size in sizes.items()}

            yield steps, measure

    def _payload(self) -> Iterator[tuple[int, Callable[[], Answer]]]:
        for size in (100, 1_000, 10_000, 100_000, 1_000_000):

            def measure(size: int = size) -> Answer:
                recorded, replayed = self._record_and_replay(WRITES, size)
                return {"recorded": recorded / WRITES, "replayed": replayed / WRITES}

            yield size, measure

    def _processes(self) -> Iterator[tuple[int, Callable[[], Answer]]]:
        for number in (1, 2, 4, 8, 16, 32):

            def measure(number: int = number) -> Answer:
                pools = ("prefork", "threads") if number <= 8 else ("threads",)
                run = self._engine.run
                return {
                    f"{pool}, one worker": run(10, 600, options=("-c", str(number), "-P", pool))["per_second"]
                    for pool in pools
                }

            yield number, measure

    def _sleepers(self) -> Iterator[tuple[int, Callable[[], Answer]]]:
        number, there = 1000, 0
        while number <= self._most_sleepers:
            self._fill(there + 1, number)
            yield number, self._among_sleepers
            number, there = number * 10, number

    def _record_and_replay(self, steps: int, size: int) -> tuple[float, float]:
        """The median milliseconds of the first pass of a run, and of a later one, which finds the steps recorded."""
        from project import held

        operations, recorded, replayed = self._durable.internals.operations, [], []
        for _ in range(RECORDINGS):
            handle = held.create({"steps": steps, "bytes": size})
            ref = operations.queries.get("held", handle.id).instance.ref
            recorded.append(time_ms(lambda ref=ref: self._advance(ref)))
        for _ in range(REPLAYS):
            operations.lifecycle.wake("held", handle.id)
            replayed.append(time_ms(lambda: self._advance(ref)))
        return statistics.median(recorded), statistics.median(replayed)

    def _among_sleepers(self) -> Answer:
        from project import many, sleeper

        creations, passes, events = [], [], []
        for number in range(WRITES):
            began = time.perf_counter()
            handle = many.create(1)
            creations.append((time.perf_counter() - began) * 1000)
            ref = self._durable.internals.operations.queries.get("many", handle.id).instance.ref
            passes.append(time_ms(lambda ref=ref: self._advance(ref)))
            event = sleeper.get(f"s-{number + 1}").send_event
            events.append(time_ms(lambda event=event: event("end", 1)))
        sweeps = [time_ms(self._durable.internals.sweeper.sweep) for _ in range(WRITES)]
        series = {
            "create and publish": creations,
            "a pass of one step": passes,
            "send an event": events,
            "sweep, nothing due": sweeps,
        }
        return {name: statistics.median(times) for name, times in series.items()}

    def _fill(self, first: int, last: int) -> None:
        store = self._durable.internals.store
        given = {"first": first, "last": last, "due": DUE_LATER, "queue": self._durable.internals.settings.queue}
        with store.engine.begin() as conn:
            for statement in FILL:
                used = {name: value for name, value in given.items() if f":{name}" in statement}
                conn.execute(sa.text(statement), used)
        with store.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as conn:
            conn.execute(sa.text("VACUUM ANALYZE workflow_instance, workflow_run, workflow_step"))

    def _advance(self, ref) -> None:
        self._durable.internals.runner.advance(ref, task_id="bench", node="bench")


def time_ms(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return (time.perf_counter() - began) * 1000


def measure_quietly(measure: Callable[[], Answer], tries: int) -> tuple[Answer, float]:
    """The answer and the share of others, of the first try in which they left the machine alone, or of the last."""
    for number in range(tries):
        if number:
            wait_until_quiet(60)
        others = OthersMeter()
        answer = measure()
        used = others.share()
        if used <= OTHERS_AT_MOST:
            break
    return answer, used


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("chart", choices=["history", "payload", "processes", "sleepers"])
    parser.add_argument("--tries", type=int, default=20, help="how often a point is measured at most")
    parser.add_argument("--sleepers", type=int, default=1_000_000, help="the most; 10,000,000 take about 8 GB")
    parser.add_argument("--points", type=int, help="only the first points of the chart")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    series = Series(args.sleepers)
    chart, is_quiet = series.charts[args.chart], True
    try:
        print(json.dumps({"chart": chart.title, "x": chart.x, "y": chart.y}), flush=True)
        for number, (x, measure) in enumerate(chart.points()):
            if number == args.points:
                break
            answer, used = measure_quietly(measure, args.tries)
            is_quiet &= used <= OTHERS_AT_MOST
            for name, y in answer.items():
                point = {"series": name, "x": x, "y": round(y, 3), "others_cpu": round(used, 2)}
                print(json.dumps(point), flush=True)
    finally:
        series.close()
    return 0 if is_quiet else 1


if __name__ == "__main__":
    sys.exit(main())
