"""Step timeouts: by a timer on the main thread, by a watched thread elsewhere. Real time, kept short."""

from __future__ import annotations

import signal
import threading
import time

import pytest
import sqlalchemy as sa

from celery_durable import Step, StepConfig, StepFailed, StepTimeout, StepTx, WorkflowEvent
from tests.support.flows import flow_of
from tests.support.world import SerializationFailure, World, insert_name, on_one_database

# The timer may go off in the garbage collector's callback that hypothesis installs: Python drops what it raises there,
# and the timer goes off again a second later.
pytestmark = pytest.mark.filterwarnings("ignore:Exception ignored in. <function gc_cumulative_time")

SHORT = 0.05
LONG = 10
ONCE = StepConfig(timeout=SHORT, retries=0)


@pytest.fixture(params=["main thread", "worker thread"])
def drive(request: pytest.FixtureRequest, world: World):
    """Run until idle where a worker would: on its main thread (prefork, solo), or on one of several."""

    def on_a_thread() -> None:
        thread = threading.Thread(target=world.run_until_idle)
        thread.start()
        thread.join(LONG)
        assert not thread.is_alive()

    return world.run_until_idle if request.param == "main thread" else on_a_thread


@pytest.fixture
def release():
    """An event that bodies wait for; at the latest, they go on when the test is over."""
    release = threading.Event()
    yield release
    release.set()


def test_a_timeout_is_the_same_error_on_both_passes(world: World, drive, release) -> None:
    seen = []

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        try:
            step.do("work", ONCE, lambda: release.wait(LONG))
        except (StepFailed, TimeoutError) as exc:
            seen.append((type(exc), str(exc)))
            step.sleep("rest", 60)
            raise

    instance = order.create()
    drive()
    world.advance(60)
    drive()
    text = "attempt 1 took longer than 50 ms"
    assert instance.error == f"StepTimeout: {text}"
    assert seen == [(StepTimeout, f"Step 'work' failed after 1 attempt: StepTimeout: {text}")] * 2


def test_a_body_that_runs_again_because_its_transaction_was_lost_has_its_timeout_too(
    world: World, drive, release
) -> None:
    attempts = []

    def work(tx: StepTx) -> None:
        attempts.append(tx.attempt)
        if len(attempts) == 1:
            insert_name("lost")(tx.session)
            raise sa.exc.OperationalError("UPDATE ...", {}, SerializationFailure("could not serialize access"))
        release.wait(LONG)

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        # Not 50 ms: the first transaction must end before, on a machine whose disk is busy too.
        step.do("work", StepConfig(timeout=1, retries=0), work)

    instance = order.create()
    drive()
    assert instance.error == "StepTimeout: attempt 1 took longer than 1 s"
    assert attempts == [1, 1]


@on_one_database
@pytest.mark.parametrize("is_reading", [False, True], ids=["idle", "with a half-read query"])
def test_on_sqlite_a_late_body_loses_the_write_lock_when_its_attempt_is_given_up(
    world: World, release, is_reading: bool
) -> None:
    has_ended, met = threading.Event(), []

    def book(tx: StepTx, instance_id: str, run: int) -> str:
        booked = world.book(tx, instance_id, run)
        cursor = tx.session.execute(sa.text("SELECT value FROM json_each('[1, 2, 3]')")) if is_reading else None
        if cursor is not None:
            cursor.fetchone()
        release.wait(LONG)
        try:
            return booked + world.book(tx, instance_id, run)
        except sa.exc.OperationalError as exc:
            met.append(str(exc.orig))
            raise
        finally:
            has_ended.set()

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        try:
            step.do("book", ONCE, book, event.instance_id, event.run_number)
        except StepTimeout:
            return step.do("go on", lambda tx: world.book(tx, event.instance_id, event.run_number))

    world.exempt["I9"] = "the body books twice"
    instance = order.create()
    thread = threading.Thread(target=world.run_until_idle)
    thread.start()
    thread.join(LONG)
    assert instance.output == "booked go on"  # while the late body still waits
    release.set()
    assert has_ended.wait(LONG)
    assert met == ["attempt to write a readonly database"]
    assert world.booked() == ["go on"]


def test_each_branch_has_its_own_timeout(world: World, release) -> None:
    world.exempt["I4"] = "branches end in any order"

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        results = step.gather(
            step.submit("slow", ONCE, lambda: release.wait(LONG)),
            step.submit("quick", lambda: "q"),
            step.submit("patient", StepConfig(timeout=None), lambda: "p"),
            return_exceptions=True,
        )
        return [str(result) for result in results]

    assert order.run().output == [
        "Step 'slow' failed after 1 attempt: StepTimeout: attempt 1 took longer than 50 ms",
        "q",
        "p",
    ]


def test_the_threads_of_bodies_that_timed_out_end_with_them(world: World, release) -> None:
    threads = []

    def work() -> None:
        threads.append(threading.current_thread())
        release.wait(LONG)

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.gather(*(step.submit(f"slow {n}", ONCE, work) for n in range(3)), return_exceptions=True)

    assert order.run().status == "complete"
    assert all(thread.is_alive() for thread in threads)
    release.set()
    for thread in threads:
        thread.join(LONG)
    assert len(threads) == 3
    assert not any(thread.is_alive() for thread in threads)


def test_the_timer_leaves_nothing_behind(world: World) -> None:
    handler = signal.getsignal(signal.SIGALRM)

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
        return step.do("work", StepConfig(timeout=600), lambda: signal.getitimer(signal.ITIMER_REAL)[0])

    assert 500 < order.run().output <= 600
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGALRM) is handler


def test_each_body_has_its_own_time_although_the_alarm_of_the_first_stays_armed(world: World) -> None:
    def left() -> float:
        return signal.getitimer(signal.ITIMER_REAL)[0]

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        lefts = [
            step.do(name, StepConfig(timeout=timeout), left) for name, timeout in (("a", 600), ("b", 30), ("c", 60))
        ]
        with pytest.raises(StepTimeout):
            step.do("slow", ONCE, lambda: time.sleep(LONG))
        return [*lefts, step.do("after", StepConfig(timeout=600), left)]

    first, shorter, kept, after = order.run().output
    assert 500 < first <= 600
    assert 20 < shorter <= 30
    assert 20 < kept <= shorter  # rings early for this body, and is then set again
    assert 500 < after <= 600


def test_an_alarm_that_rings_for_an_earlier_body_does_not_end_a_later_one(world: World) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.do("short", ONCE, lambda: None)
        return step.do(
            "long", StepConfig(timeout=60), lambda: time.sleep(4 * SHORT) or signal.getitimer(signal.ITIMER_REAL)[0]
        )

    assert 50 < order.run().output <= 60


def test_a_body_that_takes_the_alarm_for_itself_leaves_the_next_one_its_time_limit(world: World) -> None:
    def take_alarm() -> None:
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        signal.setitimer(signal.ITIMER_REAL, 0)

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.do("rude", StepConfig(timeout=600), take_alarm)
        step.do("slow", ONCE, lambda: time.sleep(LONG))

    assert order.run().error.startswith("StepTimeout")


def test_without_a_timeout_there_is_no_timer(world: World) -> None:
    order = flow_of(
        world, lambda step: step.do("work", StepConfig(timeout=None), lambda: signal.getitimer(signal.ITIMER_REAL)[0])
    )
    assert order.run().output == 0.0


def test_the_time_limit_of_a_step_is_on_record(world: World) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.do("default", lambda: 1)
        step.do("short", StepConfig(timeout="1.5 s"), lambda: 1)
        step.do("none", StepConfig(timeout=None), lambda: 1)

    found = {step.name: step.timeout and step.timeout.total_seconds() for step in order.run().steps()}
    assert found == {"default": 600, "short": 1.5, "none": None}
