"""What is measured: each scenario fills a room of its own, and returns figures beside their bounds."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from celery_durable.store.migrations import migrate
from tests.backlog.figures import Figure, late
from tests.backlog.plans import dispatcher_plans
from tests.backlog.room import ASIDE, Room
from tests.smoke.host import HostConfig, build
from tests.smoke.proc import PostgresqlCluster, RedisServer, until
from tests.smoke.test_guest import start_worker

TIMERS = 5
ONE = {"steps": 1}
_LONG = 600.0


def outbox(folder: Path, *, messages: int = 100_000) -> list[Figure]:
    """Five timers become due while the outbox is full, and while it is empty."""
    found: dict[int, list[float]] = {}
    for count in (0, messages):
        with Room(folder / str(count)) as room:
            room.site.beat()
            room.site.worker()
            room.store_messages(count, due_in=3.0)
            _timers(room, begin=4.0)
            room.wait_for_completed(TIMERS, _LONG)
            found[count] = room.lateness()
            left = room.count("workflow_outbox")
            began = time.monotonic()
            until("the outbox is empty", lambda room=room: not room.count("workflow_outbox"), _LONG, pause=0.2)
            took = time.monotonic() - began
    return [
        *late("timers, empty outbox", found[0], most=None),
        *late(f"timers, {messages:,} messages", found[messages], most=1.0),
        Figure("messages left when all timers had ended", left, ""),
        Figure("messages sent per second after that", (left / took) if took else 0.0, "/s"),
    ]


def full(folder: Path, *, instances: int = 1_000_000, seconds: float = 20.0) -> list[Figure]:
    """So many instances are due for a queue that is full; messages of the outbox and timers leave beside them."""
    figures = []
    for are_sent in (False, True):
        with Room(folder / str(are_sent)) as room:
            room.store_due(instances, are_sent=are_sent)
            room.fill_queue(ASIDE, 20_000)
            room.site.beat()
            room.site.worker()
            load, calls = room.database_load(seconds)
            _timers(room, begin=2.0)
            room.wait_for_completed(TIMERS, 60)
            began = time.monotonic()
            room.store_messages(1_000)
            until("1,000 messages have left", lambda room=room: not room.count("workflow_outbox"), 60, pause=0.05)
            took = time.monotonic() - began
            assert room.length(ASIDE) == 21_000, "nothing but the outbox may go to a full queue"
            blocks, slowest = dispatcher_plans(room)
            case = "dispatched" if are_sent else "not dispatched"
            figures += [
                Figure(f"{case}: database, per second", load * 1000, "ms", 50.0),
                Figure(f"{case}: statements, per second", calls, "", 100.0),
                *late(f"{case}: timers", room.lateness(), most=1.0),
                Figure(f"{case}: 1,000 outbox messages", took, "s", 5.0),
                Figure(f"{case}: most blocks that one statement reads", blocks, "blocks", 1_000),
                Figure(f"{case}: slowest statement", slowest, "ms", 50.0),
            ]
    return figures


def standing(folder: Path, *, instances: int = 1_500, seconds: float = 600.0) -> list[Figure]:
    """Instances are created and no worker takes them for ten minutes."""
    with Room(folder) as room:
        room.site.beat()
        room.create(instances, ONE)
        time.sleep(seconds)  # the length of the measurement
        stands = room.length(room.queue)
        worker = room.site.worker()
        took = room.wait_for_completed(instances, _LONG)
        until("the queue is empty", lambda: not room.length(room.queue), _LONG)
        room.site.check()
        return [
            Figure(f"messages per instance after {seconds:g} s", stands / instances, "", 1.2),
            Figure("messages per instance, those sent later included", room.passes(worker) / instances, "", 1.2),
            Figure("all complete", took, "s"),
        ]


def behind(folder: Path, *, foreign: int = 5_000, instances: int = 500, seconds: float = 10.0) -> list[Figure]:
    """So many messages of others stand before ours in the queue, for so long, in which sweeps could send ours again."""
    with Room(folder) as room:
        room.site.beat()
        mark = room.site.app.signature("media.double", args=(1,)).set(queue=room.queue)
        for _ in range(foreign):
            mark.apply_async()
        room.create(instances, ONE)
        time.sleep(seconds)  # many times the grace time: a sweep that sends messages again would have done so
        worker = room.site.worker()
        took = room.wait_for_completed(instances, _LONG)
        until("the queue is empty", lambda: not room.length(room.queue), _LONG)
        room.site.check()
        return [
            Figure("superfluous messages", room.passes(worker) - instances, "", 0),
            Figure("all complete", took, "s"),
        ]


def half(folder: Path, *, instances: int = 5_000) -> list[Figure]:
    """Half of the messages are removed from the broker's list; then a worker starts."""
    with Room(folder) as room:
        room.site.beat()
        room.create(instances, ONE)
        room.remove_half(room.queue)
        worker = room.site.worker()
        until("the queue is drained", lambda: not room.length(room.queue), _LONG)
        drained, completed = time.monotonic(), room.completed()
        room.wait_for_completed(instances, _LONG)
        took = time.monotonic() - drained
        room.site.check()
        return [
            Figure("complete when the queue was drained", completed, ""),
            Figure("all complete after that", took, "s", 30.0),
            Figure("superfluous messages", room.passes(worker) - instances, ""),
        ]


def lost(folder: Path, *, times: int = 5) -> list[Figure]:
    """A hint is lost on a queue that is empty."""
    seconds = []
    with Room(folder) as room:
        room.site.beat()
        for _ in range(times):
            room.create(1, ONE)
            began = time.monotonic()
            room.remove_all(room.queue)
            until("it is offered again", lambda: room.length(room.queue), 60)
            seconds.append(time.monotonic() - began)
            room.remove_all(room.queue)
            room.execute("UPDATE workflow_instance SET status = 'terminated', next_check_at = NULL, sent_at = NULL")
    return late("a lost hint is offered again after", seconds, most=6.0)


def flushed(folder: Path, *, instances: int = 2_000, times: int = 3) -> list[Figure]:
    """FLUSHALL, several times, while a worker is at it."""
    with Room(folder) as room:
        room.site.beat()
        room.create(instances, ONE)
        room.redis.flush()
        room.site.worker()
        for turn in range(1, times):
            room.wait_for_completed(turn * instances // (times + 1), 120)
            room.redis.flush()
        took = room.wait_for_completed(instances, 120)
        room.site.check()
        return [Figure("not complete", instances - room.completed(), "", 0), Figure("last flush to the end", took, "s")]


def slow(folder: Path, *, code: float = 60.0, write: float = 90.0) -> list[Figure]:
    """Code between two steps, and a transaction of the author, that outlast the lease by far."""
    with Room(folder) as room:
        room.site.beat()
        worker = room.site.worker()
        given = {"code": {"code": code, "write": 0.0}, "write": {"code": 0.0, "write": write}}
        made = {name: room.site.create("slow", params, id=name) for name, params in given.items()}
        room.site.finish(code + write + 60)
        bodies = {name: len(room.site.bodies(instance)) for name, instance in made.items()}
        rows = room.count("author_ledger")
        return [
            Figure(f"bodies run, {code:g} s of code between two steps", bodies["code"], "", 2),
            Figure(f"bodies run, a tx.mutate of {write:g} s", bodies["write"], "", 2),
            Figure("rows of the authors' transactions", rows, "", 2),
            Figure("passes taken over", worker.text().count("PassStalled") + worker.text().count("superseded"), "", 0),
        ]


def guest(folder: Path, *, seconds: float = 57.0, idle: int = 8) -> list[Figure]:
    """Three late-acknowledged tasks of others fill a worker whose Redis closes idle connections."""
    database = PostgresqlCluster()
    try:
        with ThreadPoolExecutor() as both:
            plain = both.submit(_host, folder / "plain", None, seconds, idle)
            ours = both.submit(_host, folder / "durable", database.url, seconds, idle)
            (begins, reconnects), (our_begins, our_reconnects) = plain.result(), ours.result()
    finally:
        database.clean_up()
    return [
        Figure("begins of 3 tasks, plain Celery", begins, ""),
        Figure("begins of 3 tasks, with Durable", our_begins, "", begins),
        Figure("reconnects, plain Celery", reconnects, ""),
        Figure("reconnects, with Durable", our_reconnects, "", reconnects),
    ]


def _host(folder: Path, database_url: str | None, seconds: float, idle: int) -> tuple[int, int]:
    folder.mkdir(parents=True)
    server = RedisServer(folder, "--timeout", str(idle))
    config = HostConfig("host", str(folder), server.url, database_url)
    app = build(config)
    if database_url is not None:
        migrate.upgrade(vars(app)["durable"].internals.store)
    worker = start_worker(config, "--concurrency=1")
    try:
        for _ in range(3):
            app.tasks["late"].delay(seconds)
        until("all have run", lambda: config.runs_so_far().count("end") >= 3, 6 * seconds + 60, pause=0.2)
        return config.runs_so_far().count("begin"), worker.text().count("Trying to re-establish the connection")
    finally:
        worker.clean_up()
        app.close()
        server.proc.clean_up()


def _timers(room: Room, *, begin: float) -> None:
    """Instances that sleep, and that become due one a second after another."""
    for number in range(TIMERS):
        room.site.create("nap", begin + number, id=f"timer-{number}")


SCENARIOS: dict[str, Callable[[Path], list[Figure]]] = {
    each.__name__: each for each in (outbox, full, standing, behind, half, lost, flushed, slow, guest)
}
