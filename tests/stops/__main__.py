"""`python -m tests.stops`: stop real workers a thousand times, and count how often each function was called.

A round fills a worker with functions that work, stops it in one way, and lets the system recover. The witness is a
file (`tests/stops/witness.py`). For celery_durable it exits with 1 if a call followed one whose end is unknown, if a
call was made twice, or if an unknown end was not reported once.

It makes a database of its own on the PostgreSQL of the tests, and starts a Redis.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.smoke.proc import RedisServer
from tests.smoke.proxy import TcpProxy
from tests.stops.systems import COMPLETED, REPORTED, SILENT, SYSTEMS, DbosStops, System
from tests.stops.witness import Testimony
from tests.support.databases import empty_database

_COLUMNS = ("stop", "rounds", "calls stopped", "called again", COMPLETED, REPORTED, SILENT)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.stops", description=__doc__)
    parser.add_argument("system", choices=SYSTEMS, nargs="?", default="durable")
    parser.add_argument("-n", type=int, default=1000, help="how many calls to stop at least")
    parser.add_argument("--size", type=int, default=16, help="how many functions run in a worker at the same time")
    parser.add_argument("--stop", nargs="+", help="only these")
    parser.add_argument("--dbos", default="python", help="a Python that has dbos")
    given = parser.parse_args(argv)
    folder = Path(tempfile.mkdtemp(prefix="durable-stops-"))
    redis = RedisServer(folder)
    DbosStops.program = given.dbos
    try:
        with empty_database("postgresql", "stops") as engine:
            proxy = TcpProxy((engine.url.host or "", engine.url.port or 5432))
            url = engine.url.set(host="127.0.0.1", port=proxy.port)
            environment = {
                "STOPS_FOLDER": str(folder),
                "STOPS_BROKER": redis.url,
                "STOPS_DATABASE": _address(given.system, url),
                "STOPS_DIRECT": _address(given.system, engine.url),
            }
            os.environ |= environment | {"STOPS_DATABASE": environment["STOPS_DIRECT"]}
            if given.system != "dbos":
                from celery_durable.store.migrations import migrate
                from tests.stops.project import durable

                migrate.upgrade(durable.internals.store)
            system = SYSTEMS[given.system](folder, environment, proxy, given.size)
            try:
                is_right = _measure(system, given.stop or system.stops, given.n)
            finally:
                system.close()
                proxy.close()
                if given.system != "dbos":
                    durable.close()
    finally:
        redis.proc.clean_up()
    if given.system == "durable" and not is_right:
        return 1
    shutil.rmtree(folder)
    return 0


def _address(system: str, url: object) -> str:
    text = url.render_as_string(hide_password=False)  # type: ignore[attr-defined]
    return text.replace("postgresql+psycopg", "postgresql") if system == "dbos" else text


def _measure(system: System, stops: Sequence[str], count: int) -> bool:
    began, totals, broken = time.monotonic(), {stop: Counter[str]() for stop in stops}, []
    print(f"| {' | '.join(_COLUMNS)} |\n|{'---|' * len(_COLUMNS)}", flush=True)
    rounds = -(-count // (system.size * len(stops)))
    for stop in stops:
        for number in range(rounds):
            prefix = f"{stop.replace(' ', '-')}-{number}"
            said, states = system.go_round(stop, f"{prefix}x")
            again, wrong = _judge(said, states)
            broken += [f"{prefix}: {each}" for each in wrong]
            totals[stop].update(states, **{"rounds": 1, "calls stopped": system.size, "called again": again})
        print(_row(stop, totals[stop]), flush=True)
    print(_row("all", sum(totals.values(), Counter())))
    print(f"{time.monotonic() - began:.0f} s; {len(broken)} wrong", *broken[:20], sep="\n")
    return not broken


def _row(name: str, total: Counter[str]) -> str:
    return f"| {' | '.join([name, *(f'{total[column]:,}' for column in _COLUMNS[1:])])} |"


def _judge(said: Testimony, states: Counter[str]) -> tuple[int, list[str]]:
    """How many calls followed one that did not raise, and what should not be."""
    calls = Counter(job for job, _ in said.called.elements())
    raised = Counter(job for job, _ in said.raised.elements())
    again = sum(max(0, calls[job] - raised[job] - 1) for job in calls)
    wrong = [f"{call} was called {times} times" for call, times in said.called.items() if times > 1]
    wrong += [f"{again} calls followed one whose end was unknown"] if again else []
    wrong += [f"{job} was reported {times} times" for job, times in said.reported.items() if times > 1]
    open_calls = len(said.running)
    if states[SILENT] or states[REPORTED] < open_calls:
        wrong.append(f"{open_calls} calls have not come back, and what is reported is {dict(states)}")
    return again, wrong


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by the way that ends what was started
    sys.exit(main())
