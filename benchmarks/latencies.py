"""How long something waits for this engine: from a call, an event, a due time or a kill to the start of a function.

`python benchmarks/run.py event recovery takeover | grep '^{' > docs/pictures/latency.txt && make pictures` draws the
picture of the README anew.
"""

from __future__ import annotations

import functools
import os
import signal
import statistics
import struct
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from measuring import PREFORK, SCRATCH, Answer, Question, beat, kill, wait_for, worker
from servers import query_one

from celery_durable import CreateOptions

STARTS = SCRATCH / "starts"
VICTIM = STARTS.with_suffix(".pid")
WAITS, TIMERS, KILLS = 200, 2_000, 5
PAUSE_SECONDS = 0.02
"""Between the ends of two sleeps, so that the worker is idle at each."""


def questions(instances: int) -> dict[str, Question]:
    waits, timers = min(WAITS, instances), min(TIMERS, instances)
    return {
        "start": Question("ms from create() to the start of the function, p50", None, lambda: start(waits)),
        "event": Question("ms from send_event() to the start of the next function, p50", None, lambda: event(waits)),
        "wakeup": Question("ms from due to the start of the function, p50", None, lambda: wake_up(waits)),
        "recovery": Question("s from kill -9 of a pool process to the next start of its step, p50", None, recover),
        "takeover": Question("s from kill -9 of a whole worker to the next start of its step", None, take_over),
        "noops_at_once": Question(
            f"ms from the first delay() to the start of the last of {timers:,} Celery tasks",
            None,
            lambda: noops_at_once(timers),
        ),
        "burst": Question(
            f"ms from due to the last start, {timers:,} due at once", "noops_at_once", lambda: burst(timers)
        ),
    }


def start(count: int) -> Answer:
    """How long after `create()` is called the first function of an instance starts, and how long the call takes."""
    from project import noting

    with running():
        return _called(functools.partial(noting.create, None) for _ in range(count))


def event(count: int) -> Answer:
    """How long after `send_event()` is called the function behind the wait starts, and how long the call takes."""
    from project import told

    with running():
        handles = [told.create(None) for _ in range(count)]
        wait_for(lambda: all(handle.status().status == "waiting" for handle in handles))
        return _called(functools.partial(handle.send_event, "go") for handle in handles)


def wake_up(count: int) -> Answer:
    """How late functions start after sleeps that end one after the other."""
    with running(), dispatching():
        first = time.time() + 6
        due = [first + number * PAUSE_SECONDS for number in range(count)]
        set_alarms(due)
        return _percentiles([at - was_due for at, was_due in zip(started(count), due, strict=True)])


def burst(count: int) -> Answer:
    """How late the last function starts of many sleeps that end at the same time."""
    with running(), dispatching():
        due = time.time() + 10 + count / 100
        set_alarms([due] * count)
        wait_for(lambda: query_one("SELECT count(*) FROM workflow_instance WHERE status = 'waiting'") >= count)
        assert time.time() < due, "some were due before all slept: this machine is too slow for so many"
        late = [(at - due) * 1000 for at in started(count)]
        return {"last_ms": late[-1], "p50_ms": statistics.median(late)}


def recover() -> Answer:
    """How long after a pool process is killed its step starts in another one."""
    with running(), dispatching():
        took = []
        for _ in range(KILLS):
            pid = start_victim()
            killed_at = time.time()
            os.kill(pid, signal.SIGKILL)
            took.append(started(2)[1] - killed_at)
        return {"p50_s": statistics.median(took), "longest_s": max(took)}


def take_over() -> Answer:
    """How long after all processes of a worker are killed its step starts in another worker."""
    with running() as first, dispatching():
        start_victim()
        query = "SELECT count(*) FROM workflow_heartbeat WHERE kind = 'worker'"
        known = query_one(query)
        with worker(*PREFORK, BENCH_LOG=str(STARTS)):
            wait_for(lambda: query_one(query) > known)
            killed_at = time.time()
            kill(first)
            return {"s": started(2)[1] - killed_at}


def start_victim() -> int:
    """The process that executes a step, which waits to be killed."""
    from project import victim

    STARTS.unlink(missing_ok=True)
    VICTIM.unlink(missing_ok=True)
    victim.create(None)
    wait_for(lambda: VICTIM.exists() and VICTIM.read_text() != "")
    return int(VICTIM.read_text())


def noops_at_once(count: int) -> Answer:
    """How long after they are sent, one after the other without a pause, the last of so many tasks starts."""
    from project import stamp

    with running("-Q", "durable,stamps"):
        began = time.time()
        for number in range(count):
            stamp.delay(number)
        late = [(at - began) * 1000 for at in started(count)]
        return {"last_ms": late[-1], "p50_ms": statistics.median(late)}


@contextmanager
def running(*options: str) -> Iterator[int]:
    """A worker that has run a function, and whose functions note when they start. Its session."""
    from project import noting

    STARTS.unlink(missing_ok=True)
    with worker(*PREFORK, *options, BENCH_LOG=str(STARTS)) as session:
        for handle in [noting.create(None) for _ in range(8)]:  # both processes have compiled their statements
            handle.result(timeout=60)
        STARTS.unlink()
        yield session


@contextmanager
def dispatching() -> Iterator[None]:
    """A beat that has woken a sleeping instance."""
    from project import alarm

    with beat():
        alarm.create(time.time() + 1).result(timeout=60)
        STARTS.unlink()
        yield


def set_alarms(due: list[float]) -> None:
    """An instance for each of these times, which sleeps until then and notes when it starts again."""
    from project import alarm

    run = uuid.uuid4().hex[:8]
    for first in range(0, len(due), 500):
        part = enumerate(due[first : first + 500], first)
        alarm.create_batch([CreateOptions(f"{run}-{number}", at) for number, at in part])


def started(count: int) -> list[float]:
    """When so many functions started, in order."""
    wait_for(lambda: STARTS.exists() and STARTS.stat().st_size >= 8 * count)
    return sorted(struct.unpack(f"{count}d", STARTS.read_bytes()))


def _called(calls: Iterable[Callable[[], object]]) -> Answer:
    began, took = [], []
    for call in calls:
        began.append(time.time())
        call()
        took.append((time.time() - began[-1]) * 1000)
        started(len(began))  # the worker is idle when the next call is made
    answer = _percentiles([at - then for at, then in zip(started(len(began)), began, strict=True)])
    return answer | {"call_p50_ms": statistics.median(took)}


def _percentiles(seconds: list[float]) -> Answer:
    late = sorted(each * 1000 for each in seconds)
    return {"p50_ms": statistics.median(late), "p99_ms": late[int(len(late) * 0.99)]}
