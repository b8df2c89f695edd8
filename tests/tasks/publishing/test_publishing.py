"""Publishing is best effort: it fails nobody, rests after a failure, and what it missed the sweep makes good."""

from __future__ import annotations

import contextlib
import math
import os
import re
import socket
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from celery import Celery
from kombu.exceptions import OperationalError

from celery_durable import CreateOptions, Durable, Step, WorkflowEvent
from celery_durable.model import DueRun, from_us, to_us
from celery_durable.runtime import Runtime
from celery_durable.store.instances import instances
from celery_durable.store.runs import schedule
from celery_durable.tasks.dispatcher import Sweeper
from celery_durable.tasks.publishing import PublishReport, SendState
from tests.support.brokerless import a_refused_port, approval
from tests.support.celery_apps import MakeApp
from tests.support.databases import on_databases
from tests.support.embedded import messages, until, worker
from tests.support.services import BROKERS, missing


class SteppedRuntime(Runtime):
    """A monotonic clock that only the test moves, so that a rest after a failure ends when the test says so."""

    def __init__(self) -> None:
        self.seconds = 100.0
        self.checkpoints: list[str] = []

    def monotonic(self) -> float:
        return self.seconds

    def checkpoint(self, name: str) -> None:
        self.checkpoints.append(name)


database = on_databases("sqlite", "postgresql")


# --- no broker ----------------------------------------------------------------------------------


def test_every_verb_succeeds_without_a_broker(brokerless: Celery, caplog: pytest.LogCaptureFixture) -> None:
    durable = Durable(brokerless)
    workflow = approval(durable)
    instance = workflow.create(id="i-1")
    assert instance.send_event("approval", "yes")
    instance.pause()
    instance.resume()
    assert instance.restart() == 2
    assert [made.id for made in workflow.create_batch([CreateOptions(id="i-2"), CreateOptions(id="i-3")])] == [
        "i-2",
        "i-3",
    ]
    assert {item.id for item in workflow.list().items} == {"i-1", "i-2", "i-3"}
    warnings = [record.getMessage() for record in caplog.records if record.name == "celery_durable.tasks"]
    assert len(warnings) == 1  # then calls no longer wait for a broker, and say nothing
    sentence = (
        r"The broker (redis|amqp)://.*127\.0\.0\.1:\d+// takes no messages; "
        r"due work is published when it takes messages again: "
    )
    assert re.match(sentence + "OperationalError: .*refused", warnings[0])
    assert list(durable.internals.publisher.outages()) == [None]


def test_a_broker_url_that_cannot_be_used_fails_no_call(make_app: MakeApp, caplog: pytest.LogCaptureFixture) -> None:
    """As with redis:// without the package redis: the instance is committed when the message cannot be sent."""
    workflow = approval(Durable(make_app(broker_url="reds://127.0.0.1:1//")))
    instance = workflow.create(id="i-1")
    assert instance.send_event("approval", "yes")
    assert instance.restart() == 2
    errors = [record.getMessage() for record in caplog.records if record.name == "celery_durable.tasks"]
    assert errors[0].startswith("A message for approval/i-1#1 cannot be sent; a dispatcher will retry: ")
    assert "No such transport: reds" in errors[0]


def test_a_broker_that_hangs_up_is_called_once(make_app: MakeApp) -> None:
    """Kombu's own patience is seconds for each message, and longer where the application turned its retries off."""
    calls = []
    listener = socket.create_server(("127.0.0.1", 0))

    def hang_up() -> None:
        with contextlib.suppress(OSError):
            while True:
                calls.append(listener.accept()[0].close())

    thread = threading.Thread(target=hang_up)
    thread.start()
    port = listener.getsockname()[1]
    approval(Durable(make_app(broker_url=f"amqp://127.0.0.1:{port}//", task_publish_retry=False))).create()
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()
    assert len(calls) == 1


def test_after_a_failure_the_broker_is_tried_again_in_the_background_and_ever_more_rarely(make_app: MakeApp) -> None:
    runtime = SteppedRuntime()
    app = make_app(broker_url=f"redis://127.0.0.1:{a_refused_port()}//")
    durable = Durable(app, runtime=runtime)
    workflow = approval(durable)

    def failures() -> int:
        return durable.internals.publisher.outages()[None].failures

    workflow.create()
    assert failures() == 1
    for rest in (1, 2, 4, 5, 5):
        before = failures()
        runtime.seconds += 0.7 * rest
        workflow.create()
        assert failures() == before
        runtime.seconds += 0.6 * rest  # up to a fifth sooner or later
        workflow.create()
        until(lambda before=before: failures() == before + 1)
    assert runtime.checkpoints.count("before-publish") == 1  # no caller has waited since


@pytest.mark.parametrize("broker", BROKERS)
def test_a_connection_that_died_in_the_pool_is_replaced_and_the_message_sent(
    make_app: MakeApp, broker: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A broker that restarted, or a fork: the child shuts down the connections that it inherited."""
    app = make_app(broker_url=BROKERS[broker])
    with app.connection_for_write() as connection:
        try:
            connection.ensure_connection(max_retries=0)
        except OperationalError as error:
            missing(broker, str(error))
    durable = Durable(app)
    workflow = approval(durable)
    try:
        workflow.create(id="i-1")
        child = os.fork()
        if child == 0:
            app.pool.force_close_all()  # as Celery does after a fork
            os._exit(0)
        os.waitpid(child, 0)
        workflow.create(id="i-2")
        assert [message.payload[0][1] for message in messages(app)] == ["i-1", "i-2"]
        assert durable.internals.publisher.outages() == {}
        assert caplog.text == ""
    finally:
        with app.connection_for_write() as connection:
            connection.default_channel.queue_delete(durable.internals.settings.queue)


def test_what_was_created_without_a_broker_runs_when_there_is_one(make_app: MakeApp, store_url: str) -> None:
    offline = make_app(broker_url=f"redis://127.0.0.1:{a_refused_port()}//", durable_grace_seconds=0.01)
    online = make_app(durable_queue=offline.conf.durable_queue)
    created = approval(Durable(offline)).create(id="i-1")
    created.send_event("approval", "yes")
    workflow = approval(Durable(online))
    with worker(online):
        assert workflow.get("i-1").result("20 seconds") == "yes"


def test_a_sweep_whose_messages_the_broker_refuses_offers_them_again_soon(make_app: MakeApp, store_url: str) -> None:
    """Not only after the redispatch time, which doubles: nobody has been told."""
    app = make_app(
        broker_url=f"redis://127.0.0.1:{a_refused_port()}//",
        durable_grace_seconds=0.001,
        durable_redispatch_seconds=600.0,
    )
    durable = Durable(app)
    workflow = approval(durable)
    workflow.create(id="i-1")
    _until_due(durable)
    assert durable.internals.sweeper.sweep() == 0
    assert durable.internals.sweeper.seconds_to_next() <= 1.0
    with durable.internals.store.engine.connect() as connection:
        assert connection.execute(sa.select(durable.internals.store.tables.instance.c.dispatch_count)).scalar_one() == 0


def test_what_waits_in_its_queue_is_not_published_again(make_app: MakeApp) -> None:
    app = make_app(durable_grace_seconds=0.001)
    durable = Durable(app)
    for number in range(3):
        approval(durable).create(id=f"i-{number}")
    _until_due(durable)
    assert durable.internals.sweeper.sweep() == 0
    assert durable.internals.sweeper.sweep() == 0
    assert [message.payload[0][1] for message in messages(app)] == ["i-0", "i-1", "i-2"]  # create's own
    found = durable.internals.store.read(schedule.read)
    assert 1700 < found.seconds_until(found.next_at) < math.inf


def test_while_the_queue_is_long_nothing_is_published(make_app: MakeApp) -> None:
    """Priority lives in SQL, not behind a first-in first-out queue."""
    app = make_app(durable_grace_seconds=0.001, durable_queue_high_water=3)
    durable = Durable(app, runtime=SteppedRuntime())
    workflow = approval(durable)
    for number in range(3):
        workflow.create(id=f"i-{number}")
    _unsend(durable)
    before = _dues(durable)
    assert durable.internals.sweeper.sweep() == 0
    assert durable.internals.sweeper.seconds_to_next() == 1.0  # not before the queue is asked again, whatever is due
    assert len(messages(app)) == 3
    assert _dues(durable) == before
    durable.internals.runtime.seconds += 1  # the answer is a second old
    assert durable.internals.sweeper.sweep() == 3


@pytest.mark.parametrize("is_known", [False, True], ids=["met now", "met before"])
def test_a_long_queue_holds_up_only_its_own_workflows(make_app: MakeApp, is_known: bool) -> None:
    app = make_app(durable_grace_seconds=0.001, durable_queue_high_water=3, durable_sweep_batch=2)
    app.conf.task_create_missing_queues = True
    durable = Durable(app, runtime=SteppedRuntime())
    slow_queue = f"slow-{app.conf.durable_queue}"
    quick = approval(durable)

    @durable.workflow(name="slow", queue=slow_queue)
    def slow(event: WorkflowEvent[Any], step: Step) -> Any:
        return step.wait_for_event("wait", "approval").payload

    if is_known:
        slow.create(id="first")
        _unsend(durable)
        assert durable.internals.sweeper.sweep() == 1
        messages(app, slow_queue)
        slow.get("first").terminate()
        durable.internals.runtime.seconds += 1
    for number in range(4):
        slow.create(id=f"s-{number}")  # older than what is quick, and more than a batch
    quick.create(id="q-1")
    messages(app)
    _unsend(durable)
    before = _dues(durable)
    assert durable.internals.sweeper.sweep() == 1
    assert [message.payload[0] for message in messages(app)] == [["approval", "q-1", 1]]
    assert len(messages(app, slow_queue)) == 4  # create's own
    held = {key: value for key, value in _dues(durable).items() if key.startswith("s-")}
    assert held == {key: value for key, value in before.items() if key.startswith("s-")}  # not touched
    durable.internals.runtime.seconds += 1
    assert durable.internals.sweeper.sweep() == 3  # up to the mark, and the rest when there is room again
    durable.internals.runtime.seconds += 1
    published = [message.payload[0][1] for message in messages(app, slow_queue)]
    assert durable.internals.sweeper.sweep() == 1
    published += [message.payload[0][1] for message in messages(app, slow_queue)]
    assert published == ["s-0", "s-1", "s-2", "s-3"]


class Refusing:
    """A publisher whose broker takes nothing for some queues, or is away."""

    def __init__(self) -> None:
        self.queues: set[str] = set()
        self.is_away = False
        self.offered: list[DueRun] = []

    def publish(self, due_runs: Sequence[DueRun]) -> PublishReport:
        self.offered += due_runs
        if self.is_away:
            return PublishReport.of(len(due_runs), SendState.UNSENT)
        return PublishReport([SendState.REFUSED if due.queue in self.queues else SendState.SENT for due in due_runs])


@pytest.fixture
def refusing(make_app: MakeApp) -> tuple[Durable, Refusing, Sweeper]:
    """A broker over which 20 instances of queue "bad" and 20 of queue "good" are due."""
    durable, broker = Durable(make_app(), runtime=SteppedRuntime()), Refusing()
    for queue in ("bad", "good"):

        @durable.workflow(name=queue, queue=queue)
        def flow(event: WorkflowEvent[Any], step: Step) -> None: ...

        for number in range(20):
            durable.internals.operations.create.instance(queue, None, id=f"{queue}-{number}")
    _unsend(durable)
    return (
        durable,
        broker,
        Sweeper(
            durable.internals.store, durable.internals.settings, durable.internals.runtime, broker.publish, lambda _: 1
        ),
    )


def test_a_queue_that_refuses_is_tried_ever_more_rarely_and_holds_up_no_other(
    refusing: tuple[Durable, Refusing, Sweeper],
) -> None:
    durable, broker, sweeper = refusing
    broker.queues.add("bad")
    assert sweeper.sweep() == 20
    tried = [len([due for due in broker.offered if due.queue == "bad"])]
    gaps, since = [], 0.0
    while len(gaps) < 8:
        broker.offered.clear()
        durable.internals.runtime.seconds += 0.5
        since += 0.5
        _unsend(durable, "bad")
        sweeper.sweep()
        if broker.offered:
            tried.append(len(broker.offered))
            gaps.append(since)
            since = 0.0
    assert gaps == [1, 2, 4, 8, 16, 32, 60, 60]
    assert tried == [20, *[10] * 8]  # then only so many as it takes to find out
    broker.queues.clear()
    durable.internals.runtime.seconds += 60
    _unsend(durable, "bad")
    assert sweeper.sweep() == 20
    broker.queues.add("bad")  # another outage begins as the first one did
    for count in (20, 10):
        broker.offered.clear()
        _unsend(durable, "bad")
        sweeper.sweep()
        assert len(broker.offered) == count
        durable.internals.runtime.seconds += 1


def test_a_broker_that_is_away_is_tried_every_second_with_a_few(refusing: tuple[Durable, Refusing, Sweeper]) -> None:
    durable, broker, sweeper = refusing
    broker.is_away = True
    assert sweeper.sweep() == 0
    assert len(broker.offered) == 40
    for _ in range(3):
        broker.offered.clear()
        _unsend(durable)
        assert (sweeper.sweep(), broker.offered) == (0, [])
        assert sweeper.seconds_to_next() == 1.0
        durable.internals.runtime.seconds += 1
        assert sweeper.sweep() == 0
        assert len(broker.offered) == 10
    broker.is_away = False
    durable.internals.runtime.seconds += 1
    _unsend(durable)
    assert sweeper.sweep() == 40


def test_what_a_caller_could_not_send_is_sent_when_the_broker_is_back(brokerless: Celery) -> None:
    durable = Durable(brokerless)
    approval(durable).create(id="i-1")
    row = durable.internals.store.read(lambda tx: instances.read(tx, "approval", "i-1"))
    assert row.sent_at is None
    assert row.next_check_at is not None
    assert row.next_check_at - row.created_at < timedelta(seconds=30)  # a second after the broker refused


def _unsend(durable: Durable, queue: str | None = None) -> None:
    """No hint of what is due has left."""
    i = durable.internals.store.tables.instance
    wanted = [i.c.claim_token.is_(None), i.c.next_check_at.is_not(None)] + (
        [] if queue is None else [i.c.queue == queue]
    )
    with durable.internals.store.engine.begin() as connection:
        connection.execute(sa.update(i).where(*wanted).values(sent_at=None, next_check_at=i.c.run_at))


def _dues(durable: Durable) -> dict[str, tuple[int | None, int]]:
    """When each instance is looked at, and how often it was published."""
    i = durable.internals.store.tables.instance.c
    with durable.internals.store.engine.connect() as connection:
        rows = connection.execute(sa.select(i.instance_id, i.next_check_at, i.dispatch_count)).all()
    return {row.instance_id: (row.next_check_at, row.dispatch_count) for row in rows}


def _until_due(durable: Durable) -> None:
    """Until what comes next is due, and with it what comes within a second of it."""
    while True:
        found = durable.internals.store.read(schedule.read)
        assert found.next_at is not None
        soon = to_us(found.next_at) + 1_000_000
        last = from_us(
            max(
                next_check_at
                for next_check_at, _ in _dues(durable).values()
                if next_check_at is not None and next_check_at <= soon
            )
        )
        if found.now >= last:
            return
        durable.internals.runtime.sleep((last - found.now).total_seconds())
