"""A worker's part in the search for lost tasks: it reports what it holds, and discards copies."""

from __future__ import annotations

import math
import socket
import threading
import uuid
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import redis
import sqlalchemy as sa
from celery import Celery, signals
from celery.exceptions import Reject
from kombu import Message

from celery_durable import Durable, Step, WorkflowEvent
from celery_durable.model import RunRef, TaskReference
from celery_durable.store import heartbeats, lost_tasks
from celery_durable.store.engine.server_info import ensure_database_id
from celery_durable.store.heartbeats import WorkerRow
from celery_durable.tasks.lost import reporter
from tests.support.celery_apps import MakeApp
from tests.support.databases import on_databases
from tests.support.embedded import until, worker
from tests.support.services import require_broker

database = on_databases("sqlite")

SENT: dict[str, str] = {}
"""The ids of the tasks that were sent, by their event type."""


def send(durable: Durable, name: str, number: int = 0, *, delivery: int = 0, store: str = "", **options: Any) -> str:
    """Send a task as a step does, of an instance that is not there any more; answers with its id."""
    reference = TaskReference(
        store or durable.internals.store.transact(ensure_database_id),
        RunRef("gone", "i-1", 1),
        f"item:1:{number}:1:gone",
        "0" * 32,
        "durable",
        delivery,
    )
    sent = durable.app.send_task(name, (number,), headers={"durable": reference.to_json()}, **options)
    SENT[reference.event_type] = str(sent.id)
    return str(sent.id)


def row(durable: Durable, node: str) -> WorkerRow | None:
    """What the worker has reported."""
    _, workers = durable.internals.store.read(heartbeats.read_workers)
    return next((each for each in workers if each.node == node), None)


def list_of(durable: Durable, node: str) -> frozenset[str]:
    """The ids of the tasks that the worker holds, by a list that it makes from now on."""
    store = durable.internals.store
    now, _ = store.read(heartbeats.read_workers)

    def is_listed() -> bool:
        durable.app.control.broadcast("ping")  # the worker's loop waits up to 2 s for a message before it turns
        return (found := row(durable, node)) is not None and (found.listed_at or now) > now

    until(is_listed)
    found = row(durable, node)
    assert found is not None
    (held,) = store.read(lambda tx: heartbeats.read_held(tx, [found.id])).values()
    return frozenset(SENT[each.event_type] for each in held)


@pytest.fixture(autouse=True)
def reports_are_frequent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporter, "_LIST_SECONDS", 0.05)
    monkeypatch.setattr(reporter, "_RENEW_SECONDS", 0.1)


@pytest.fixture
def started() -> list[int]:
    return []


@pytest.fixture
def tasks(app: Celery, durable: Durable, started: list[int]) -> threading.Event:
    """Tasks that record their start; `work` continues when the event is set."""
    may_end = threading.Event()

    @app.task(name="work", shared=False)
    def work(number: int) -> None:
        started.append(number)
        assert may_end.wait(30)

    @app.task(name="seldom", shared=False, rate_limit="1/h")
    def seldom(number: int) -> None:
        started.append(number)

    return may_end


@pytest.mark.parametrize("pool", ["threads", pytest.param("solo", marks=pytest.mark.slow)])
def test_a_worker_holds_what_it_has_received_until_it_has_ended(
    app: Celery, durable: Durable, tasks: threading.Event, started: list[int], pool: str
) -> None:
    """Also what no list of Celery's names: tasks with an ETA, and those that wait for their rate."""
    if pool == "solo":
        tasks.set()  # one that is at work answers nobody
    with worker(app, hostname="w@here", pool=pool):
        waiting = {send(durable, "work", 1, countdown=3600), send(durable, "seldom", 2), send(durable, "seldom", 3)}
        active = send(durable, "work", 4)
        app.send_task("work", (5,))  # of no step
        until(lambda: {2, 4} <= set(started))
        held = list_of(durable, "w@here")
        assert len(held & waiting) == 2  # one of the two that are rare has run
        assert held - waiting == ({active} if pool == "threads" else set())
        tasks.set()
        until(lambda: 5 in started)
        until(lambda: active not in (held := list_of(durable, "w@here")) and len(held) == 2)


@pytest.mark.parametrize("is_in_pool", [False, True], ids=["waits for its ETA", "waits in a pool of threads"])
def test_a_worker_holds_what_came_over_a_lost_connection_only_if_its_pool_has_it(
    make_app: MakeApp, is_in_pool: bool
) -> None:
    """The broker gives it to another consumer, while the worker's request still exists."""
    url = require_broker("rabbitmq")
    app = make_app(
        broker_url=url, broker_transport_options={}, worker_cancel_long_running_tasks_on_connection_loss=True
    )
    durable, requests, taken, may_end = Durable(app), list[Any](), list[str](), threading.Event()

    @app.task(name="work", shared=False)
    def work(number: int) -> None:
        assert may_end.wait(60)

    def keep(request: Any, **_: Any) -> None:  # as the garbage of an idle worker stays
        requests.append(request)

    def take(_: object, message: Message) -> None:
        taken.append(message.headers["id"])
        message.ack()

    signals.task_received.connect(keep)
    try:
        with worker(app, hostname="w@here", concurrency=1) as running, app.connection_for_read() as other:
            send(durable, "work", 0)  # keeps the only thread busy; its message is acknowledged
            waiting = send(durable, "work", 1, countdown=None if is_in_pool else 3600)
            until(lambda: waiting in list_of(durable, "w@here"))
            queue = app.amqp.queues[app.conf.task_default_queue](other.default_channel)
            queue.consumer_arguments = {"x-priority": 10}
            with other.Consumer(queue, callbacks=[take]):
                running.consumer.connection.connection.transport.sock.shutdown(socket.SHUT_RDWR)
                until(lambda: taken or other.drain_events(timeout=30))
            assert taken == [waiting]
            assert waiting in list_of(durable, "w@here")  # until the other consumer has listed it
            held = durable.internals.held_task_reporter.held.references(running.consumer, math.inf)
            assert (waiting in {SENT[each.event_type] for each in held}) == is_in_pool
            may_end.set()
            until(lambda: not list_of(durable, "w@here"))
        with app.connection_for_write() as connection:
            for name in (app.conf.task_default_queue, app.conf.durable_queue):
                connection.default_channel.queue_delete(name)
                connection.default_channel.exchange_delete(name)
    finally:
        may_end.set()
        signals.task_received.disconnect(keep)


def test_a_worker_beats_until_its_pool_has_ended(
    app: Celery, durable: Durable, tasks: threading.Event, started: list[int]
) -> None:
    """Stopping takes as long as the tasks that it has: they are no dead worker's."""
    with worker(app, hostname="w@here"):
        send(durable, "work", 1)
        until(lambda: started == [1])
        until(lambda: row(durable, "w@here"))
        durable.internals.processes.stop_worker()  # our first step to stop; the pool's comes later
        held = list_of(durable, "w@here")
        assert len(held) == 1
        tasks.set()
    until(lambda: row(durable, "w@here") is None)


@pytest.mark.parametrize(("delivery", "is_ours", "runs"), [(0, True, True), (1, True, False), (1, False, True)])
def test_a_copy_that_nobody_waits_for_does_not_run(
    app: Celery,
    durable: Durable,
    tasks: threading.Event,
    started: list[int],
    delivery: int,
    is_ours: bool,
    runs: bool,
) -> None:
    """Only a message with a delivery number, or one that comes again, is looked up; and in its own database."""
    tasks.set()
    with worker(app, hostname="w@here"):
        send(durable, "work", 1, delivery=delivery, store="" if is_ours else "another")
        send(durable, "work", 2, countdown=0.3)  # after the other
        until(lambda: set(started) >= ({1, 2} if runs else {2}))
        assert (1 in started) is runs


def test_a_copy_that_a_step_waits_for_runs(
    app: Celery, durable: Durable, tasks: threading.Event, started: list[int]
) -> None:
    tasks.set()

    @durable.workflow
    def flow(event: WorkflowEvent, step: Step) -> Any:
        return step.task("work", "work", timeout="1 hour") if event.payload else step.map("work", "work", [7])

    with worker(app, hostname="w@here"):
        instance = flow.create(None)
        assert instance.result("20 seconds") == [None]
        assert started == [7]


def test_a_retry_of_celerys_own_is_noted(app: Celery, durable: Durable) -> None:
    """A search that began before does not take the new message for lost."""
    seen: list[int] = []

    @app.task(name="again", bind=True, shared=False, max_retries=1)
    def again(self: Any, number: int) -> int:
        item = durable.internals.store.tables.item.c
        seen.append(durable.internals.store.read(lambda tx: tx.execute(sa.select(item.sent_at)).scalar_one()))
        if not self.request.retries:
            raise self.retry(countdown=0.3)
        return number

    @durable.workflow
    def flow(event: WorkflowEvent, step: Step) -> Any:
        return step.map("again", "again", [7])

    with worker(app):
        assert flow.create().result("20 seconds") == [7]
    first, second = seen
    assert timedelta(microseconds=second - first) >= timedelta(seconds=0.3)


def test_a_task_that_was_replaced_is_not_searched_for(app: Celery, durable: Durable) -> None:
    outs: list[int] = []

    @app.task(name="other", shared=False)
    def other(number: int) -> int:
        before = datetime.now(UTC) + timedelta(days=1)
        tasks, _ = durable.internals.store.read(lambda tx: lost_tasks.read_sent(tx, before=before, limit=9))
        outs.append(len(tasks))
        return number

    @app.task(name="replaced", bind=True, shared=False)
    def replaced(self: Any, number: int) -> Any:
        raise self.replace(other.s(number).set(countdown=0.3))

    @durable.workflow
    def flow(event: WorkflowEvent, step: Step) -> Any:
        return step.map("replaced", "replaced", [7])

    with worker(app):
        assert flow.create().result("20 seconds") == [7]
    assert outs == [0]


def test_a_message_that_redis_delivers_again_is_looked_up(make_app: MakeApp, started: list[int]) -> None:
    """As one that it restores after its visibility timeout; the memory broker does not say which they are."""
    url = require_broker("redis")
    prefix = f"lost-{uuid.uuid4().hex[:8]}:"
    app = make_app(broker_url=url, broker_transport_options={"global_keyprefix": prefix})
    durable = Durable(app)

    @app.task(name="back", shared=False, acks_late=True)
    def back(number: int) -> None:
        started.append(number)
        if number == 1:
            raise Reject("not now", requeue=True)

    with worker(app, hostname="w@here"):
        send(durable, "back", 1)
        until(lambda: started == [1])
        send(durable, "back", 2, countdown=1)  # after the other
        until(lambda: 2 in started)
    with redis.Redis.from_url(url) as client:
        for key in client.scan_iter(f"{prefix}*", count=1000):
            client.delete(key)
    assert started == [1, 2]
