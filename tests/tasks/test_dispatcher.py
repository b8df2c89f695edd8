"""The dispatcher: in a worker, in beat, through a database outage."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from celery import Celery
from celery.beat import Service

from celery_durable import Durable, Step, WorkflowEvent
from celery_durable.errors import StoreUnavailable
from celery_durable.housekeeping import Job
from celery_durable.model import DueRun, RunRef, to_us
from celery_durable.runtime import Runtime
from celery_durable.store import heartbeats
from celery_durable.store.engine import Store
from celery_durable.store.heartbeats import HeartbeatUpdate, WorkerRow
from celery_durable.store.runs import claims, schedule
from celery_durable.store.runs.claims import ClaimRequest
from celery_durable.tasks import SWEEP
from celery_durable.tasks.dispatcher import Dispatcher, Sweeper
from celery_durable.tasks.publishing import PublishReport, SendState
from tests.support.celery_apps import MakeApp
from tests.support.embedded import messages, until, worker


def nap(durable: Durable) -> Any:
    @durable.workflow(name="nap")
    def nap(event: WorkflowEvent[Any], step: Step) -> str:
        step.sleep("nap", 0.05)
        return "rested"

    return nap


@contextmanager
def beat(app: Celery, tmp_path: Path) -> Iterator[Any]:
    app.conf.beat_schedule_filename = str(tmp_path / "schedule")
    service = Service(app, max_interval=0.05)
    thread = threading.Thread(target=service.start)
    thread.start()
    try:
        until(lambda: "scheduler" in vars(service) and service.scheduler._heap is not None)  # it has ticked
        yield service
    finally:
        service.stop()
        thread.join(20)


# --- where it runs ------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["beat", "worker", "both"])
def test_timers_fire_wherever_the_dispatcher_runs(make_app: MakeApp, tmp_path: Path, where: str) -> None:
    app = make_app(durable_dispatcher=where)
    workflow = nap(Durable(app))
    with worker(app), beat(app, tmp_path):
        assert workflow.create().result("20 seconds") == "rested"


def test_the_sweep_task_alone_is_enough(make_app: MakeApp, tmp_path: Path) -> None:
    """For a beat that hosts no thread: it sends `sweep`, a worker sweeps."""
    workers = make_app(durable_dispatcher="none")
    beats = make_app(durable_dispatcher="worker", durable_queue=workers.conf.durable_queue)
    workflow = nap(Durable(workers))
    Durable(beats)
    queue = {"queue": workers.conf.durable_queue}
    beats.conf.beat_schedule = {SWEEP: {"task": SWEEP, "schedule": 0.05, "options": queue}}
    with worker(workers), beat(beats, tmp_path):
        assert workflow.create().result("20 seconds") == "rested"


def test_a_schedule_that_is_assigned_later_loses_the_sweep_and_beat_puts_it_back(
    make_app: MakeApp, tmp_path: Path
) -> None:
    app = make_app(durable_dispatcher="beat")
    Durable(app)
    assert SWEEP in app.conf.beat_schedule
    app.conf.beat_schedule = {"mine": {"task": "mine", "schedule": 60.0}}
    with beat(app, tmp_path) as service:
        entries = dict(service.scheduler.schedule)
    entry = entries[SWEEP]
    assert (entry.task, entry.schedule.seconds, entry.options) == (SWEEP, 5.0, {"queue": app.conf.durable_queue})
    assert "mine" in entries


@pytest.mark.parametrize("scheduler", ["celery.beat:PersistentScheduler", "celery.beat:Scheduler"])
def test_beat_sends_no_sweep_while_its_dispatcher_sweeps(
    make_app: MakeApp, tmp_path: Path, caplog: pytest.LogCaptureFixture, scheduler: str
) -> None:
    """And logs none. Other entries are sent."""
    app = make_app(durable_dispatcher="beat", beat_scheduler=scheduler)
    durable = Durable(app)
    app.conf.beat_schedule[SWEEP]["schedule"] = 0.01
    app.conf.beat_schedule["mine"] = {"task": "mine", "schedule": 0.01}
    with beat(app, tmp_path) as service, caplog.at_level("INFO", logger="celery.beat"):

        def wait_for_ticks() -> None:
            before = {name: service.scheduler.schedule[name].total_run_count for name in (SWEEP, "mine")}
            until(lambda: all(service.scheduler.schedule[name].total_run_count > n + 3 for name, n in before.items()))

        until(lambda: durable.internals.is_sweeping)
        wait_for_ticks()  # beat may have sent one before the first sweep
        messages(app)
        caplog.clear()
        wait_for_ticks()
        assert messages(app) == []
        assert {record.args[0] for record in caplog.records if "Sending due task" in record.msg} == {"mine"}
        durable.internals.sweeper._store = None  # the dispatcher does not reach the database any more
        durable.internals.sweeper._last_check_at = -math.inf
        found: list[Any] = []
        until(lambda: found.extend(messages(app)) or found)
        assert {message.headers["task"] for message in found} == {SWEEP}


def test_a_scheduler_that_does_not_ask_sends_no_sweep_while_the_dispatcher_sweeps(
    make_app: MakeApp, tmp_path: Path
) -> None:
    """As one that replaces the loop of Celery's schedulers."""
    app = make_app(durable_dispatcher="beat")
    durable = Durable(app)
    with beat(app, tmp_path) as service:
        until(lambda: durable.internals.is_sweeping)
        messages(app)
        assert service.scheduler.apply_async(service.scheduler.schedule[SWEEP]) is None
        assert messages(app) == []


def test_beat_has_no_sweep_for_dispatchers_in_workers(make_app: MakeApp, tmp_path: Path) -> None:
    app = make_app(durable_dispatcher="worker")
    Durable(app)
    with beat(app, tmp_path) as service:
        assert SWEEP not in service.scheduler.schedule


def test_monitors_get_no_events_of_sweeps(make_app: MakeApp) -> None:
    app = make_app()
    Durable(app)
    assert app.tasks[SWEEP].send_events is False


def test_beat_of_another_app_gets_nothing_from_us(make_app: MakeApp, tmp_path: Path) -> None:
    ours, other = make_app(durable_dispatcher="beat"), make_app()
    durable = Durable(ours)
    with beat(other, tmp_path) as service:
        assert SWEEP not in service.scheduler.schedule
    assert "dispatcher" not in vars(durable.internals)


def test_without_a_dispatcher_neither_beat_nor_worker_runs_one(make_app: MakeApp, tmp_path: Path) -> None:
    app = make_app(durable_dispatcher="none")
    durable = Durable(app)
    with worker(app), beat(app, tmp_path) as service:
        assert SWEEP not in service.scheduler.schedule
    assert "dispatcher" not in vars(durable.internals)


def test_two_dispatchers_publish_what_is_due_once(make_app: MakeApp, tmp_path: Path) -> None:
    app = make_app(durable_grace_seconds=0.001, durable_redispatch_seconds=600.0, durable_sweep_batch=5)
    durable = Durable(app)
    workflow = nap(durable)
    for number in range(40):
        workflow.create(id=f"n-{number}")
    messages(app)
    _unsend(durable)
    second = Sweeper(
        durable.internals.store, durable.internals.settings, Runtime(), durable.internals.publisher.publish, lambda _: 0
    )
    both = [Dispatcher(sweeper, durable.internals.settings) for sweeper in (durable.internals.sweeper, second)]
    for dispatcher in both:
        dispatcher.start()
    try:
        until(lambda: (found := durable.internals.store.read(schedule.read)).next_at > found.now + timedelta(minutes=5))
    finally:
        for dispatcher in both:
            dispatcher.stop()
    assert sorted(m.payload[0][1] for m in messages(app)) == sorted(f"n-{number}" for number in range(40))


def test_a_dispatcher_starts_once_and_stops(durable: Durable, caplog: pytest.LogCaptureFixture) -> None:
    dispatcher = durable.internals.dispatcher
    for _ in range(2):
        with caplog.at_level(logging.INFO, "celery_durable.dispatcher"):
            dispatcher.start()
            dispatcher.start()
        assert caplog.messages == ["The durable dispatcher is running"]
        caplog.clear()
        assert dispatcher.is_running()
        dispatcher.stop()
        assert not dispatcher.is_running()


# --- outages ------------------------------------------------------------------------------------


class Outage(Runtime):
    """A database that is away while ``is_down``, and a monotonic clock that the test moves."""

    def __init__(self) -> None:
        self.seconds, self.is_down = 0.0, False

    def monotonic(self) -> float:
        return self.seconds

    def back_off(self, times: int) -> None:
        pass

    def install(self, engine: sa.Engine) -> None:
        def refuse(*_: Any) -> None:
            if self.is_down:
                raise sa.exc.OperationalError("SELECT 1", {}, OSError("the server is away"))

        sa.event.listen(engine, "do_connect", refuse)
        sa.event.listen(engine, "before_cursor_execute", refuse)


@pytest.fixture
def outage(make_app: MakeApp) -> tuple[Durable, Outage, Sweeper, list[DueRun]]:
    runtime = Outage()
    app = make_app(durable_lease_seconds=0.05, durable_grace_seconds=0.001)
    durable = Durable(app, runtime=runtime)
    runtime.install(durable.internals.store.engine)
    published: list[DueRun] = []

    def publish(due_runs: Any) -> PublishReport:
        published.extend(due_runs)
        return PublishReport.of(len(due_runs), SendState.SENT)

    sweeper = Sweeper(durable.internals.store, durable.internals.settings, runtime, publish, lambda _: None)
    nap(durable).create(id="n-1")
    return durable, runtime, sweeper, published


def _claim(durable: Durable) -> Any:
    ref = RunRef("nap", "n-1", 1)
    lease = durable.internals.settings.lease
    return durable.internals.store.transact(
        lambda tx: claims.claim(tx, ClaimRequest(ref, token="t" * 36, task_id="task", node="node", lease=lease))
    )


def _crashes(durable: Durable) -> int:
    with durable.internals.store.engine.connect() as connection:
        return int(connection.execute(sa.select(durable.internals.store.tables.instance.c.crash_count)).scalar_one())


def _until_due(sweeper: Sweeper) -> None:
    until(lambda: sweeper.seconds_to_next() <= 0)


def _unsend(durable: Durable) -> None:
    """No hint of what is due has left."""
    i = durable.internals.store.tables.instance
    with durable.internals.store.engine.begin() as connection:
        connection.execute(sa.update(i).values(sent_at=None, next_check_at=i.c.run_at))


def _settled(runtime: Outage, sweeper: Sweeper) -> None:
    """Have the sweeper see the database for as long as it takes to trust its leases."""
    for _ in range(2):
        sweeper.seconds_to_next()
        runtime.seconds += 0.05


def test_an_expired_claim_is_released_as_a_crash(outage: Any) -> None:
    durable, runtime, sweeper, published = outage
    _settled(runtime, sweeper)
    assert _claim(durable)
    _until_due(sweeper)
    assert sweeper.sweep() == 1
    assert published == [DueRun(RunRef("nap", "n-1", 1), durable.internals.settings.queue)]
    assert _crashes(durable) == 1


@pytest.mark.parametrize("first_to_see", ["sweep", "seconds_to_next"])
def test_after_an_outage_no_claim_expires_for_one_lease(outage: Any, first_to_see: str) -> None:
    """The database was away, and with it every heartbeat: the workers live, and get time to say so."""
    durable, runtime, sweeper, published = outage
    _settled(runtime, sweeper)
    assert _claim(durable)
    _until_due(sweeper)
    runtime.is_down = True
    with pytest.raises(StoreUnavailable):
        getattr(sweeper, first_to_see)()
    runtime.is_down = False
    assert sweeper.sweep() == 0
    assert (published, _crashes(durable)) == ([], 0)
    runtime.seconds += 0.04
    _until_due(sweeper)
    assert sweeper.sweep() == 0
    runtime.seconds += 0.02
    _until_due(sweeper)
    assert sweeper.sweep() == 1
    assert _crashes(durable) == 1


@pytest.mark.parametrize("gap", ["is new", "slept"])
def test_a_sweeper_that_did_not_see_the_database_lately_lets_no_claim_expire_for_one_lease(
    outage: Any, gap: str
) -> None:
    """Nobody told it whether the database was away: a beat that starts with it, a pool process that had no sweep."""
    durable, runtime, sweeper, published = outage
    if gap == "slept":
        _settled(runtime, sweeper)
        runtime.seconds += 0.06
    assert _claim(durable)
    _until_due(sweeper)
    assert sweeper.sweep() == 0
    assert (published, _crashes(durable)) == ([], 0)
    for _ in range(2):
        runtime.seconds += 0.03
        _until_due(sweeper)
    assert sweeper.sweep() == 1
    assert _crashes(durable) == 1


def test_sweepers_that_are_all_new_release_an_expired_claim_after_one_lease_in_sum(outage: Any) -> None:
    """As pool processes that live for one task: each is as patient as if it were the first."""
    durable, runtime, sweeper, _ = outage
    assert _claim(durable)
    answers = []
    for _ in range(4):
        new = Sweeper(durable.internals.store, durable.internals.settings, runtime, _taken, lambda _: None)
        _until_due(new)
        answers.append(new.sweep())
    assert answers == [0, 0, 0, 1]
    assert _crashes(durable) == 1


def test_an_outage_does_not_hold_up_what_is_due(outage: Any) -> None:
    durable, runtime, sweeper, published = outage
    _unsend(durable)
    runtime.is_down = True
    with pytest.raises(StoreUnavailable):
        sweeper.sweep()
    runtime.is_down = False
    assert sweeper.sweep() == 1
    assert [due.ref.instance_id for due in published] == ["n-1"]


def test_the_dispatcher_survives_an_outage(make_app: MakeApp, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "celery_durable")
    runtime = Outage()
    app = make_app(durable_dispatcher="worker", durable_grace_seconds=0.001, durable_redispatch_max_seconds=0.2)
    durable = Durable(app, runtime=runtime)
    runtime.install(durable.internals.store.engine)
    workflow = nap(durable)

    def told(start: str) -> list[str]:
        return [line for line in caplog.messages if line.startswith(start)]

    durable.internals.dispatcher.start()
    runtime.is_down = True
    until(lambda: told("This process cannot check for due work and will retry: "))
    runtime.is_down = False
    workflow.create(id="n-1")
    messages(app)
    until(lambda: messages(app))
    until(lambda: told("This process can check for due work again"))  # said when its turn is over
    assert len(told("This process cannot check for due work")) == 1  # said once, not at every try
    assert len(told("This process can check for due work again")) == 1


def test_after_an_outage_the_dispatcher_gives_silent_workers_their_time_again(
    make_app: MakeApp, caplog: pytest.LogCaptureFixture
) -> None:
    runtime = Outage()
    durable = Durable(make_app(durable_dispatcher="worker"), runtime=runtime)
    store = durable.internals.store
    runtime.install(store.engine)
    worker, h = HeartbeatUpdate("w-1", "worker", "w@here", 1), store.tables.heartbeat
    long_ago = datetime(2020, 1, 1, tzinfo=UTC)
    silent = {"seen_at": to_us(long_ago), "silent_at": to_us(long_ago), "held_tasks": heartbeats.encode_held([])}
    store.transact_once(lambda tx: heartbeats.upsert(tx, worker))
    store.transact_once(lambda tx: tx.execute(sa.update(h).values(silent)))
    runtime.is_down = True
    durable.internals.dispatcher.start()
    until(lambda: "This process cannot search for lost tasks" in caplog.text)
    runtime.is_down = False
    until(lambda: worker_row(store).silent_at != long_ago)
    assert worker_row(store).has_list  # its tasks are not lost


def test_a_job_beside_the_sweeps_that_hangs_delays_no_sweep(make_app: MakeApp) -> None:
    durable = Durable(make_app(durable_dispatcher="worker", durable_grace_seconds=0.001))
    hangs, may_end = threading.Event(), threading.Event()
    durable.internals.upkeep = [Job("durable-hanging", lambda: (hangs.set(), may_end.wait())[1] - 1.0)]
    durable.internals.dispatcher.start()
    try:
        assert hangs.wait(30)
        nap(durable).create(id="n-1")
        messages(durable.app)
        _unsend(durable)
        until(lambda: messages(durable.app))
    finally:
        durable.internals.dispatcher.stop(0.0)
        may_end.set()


def test_the_dispatcher_stops_the_jobs_beside_it(make_app: MakeApp) -> None:
    durable = Durable(make_app(durable_dispatcher="worker"))
    durable.internals.dispatcher.start()
    assert all(job.is_started() for job in durable.internals.upkeep)
    durable.internals.dispatcher.stop()
    assert not any(job.is_started() for job in durable.internals.upkeep)


def worker_row(store: Store) -> WorkerRow:
    _, (row,) = store.read(heartbeats.read_workers)
    return row


def _taken(due_runs: Any) -> PublishReport:
    return PublishReport.of(len(due_runs), SendState.SENT)
