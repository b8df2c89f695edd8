"""Housekeeping: no job delays another, calls are made in order and bounded, and a fork has nothing of it."""

from __future__ import annotations

import logging
import math
import os
import threading
from collections.abc import Iterator

import pytest

from celery_durable import housekeeping
from celery_durable.housekeeping import CallQueue, Job
from tests.support.embedded import until


class Hang:
    """The run of a job that does not end before it may."""

    def __init__(self) -> None:
        self.is_running, self.may_end, self.runs = threading.Event(), threading.Event(), 0

    def __call__(self) -> float:
        self.runs += 1
        self.is_running.set()
        self.may_end.wait()
        return math.inf


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(housekeeping, "_RETRY_SECONDS", 0.0)


@pytest.fixture
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(housekeeping, "_MAX_FORK_WAIT_SECONDS", 0.05)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What housekeeping has logged. Other loggers may speak at any time, when garbage is collected."""
    return [record.getMessage() for record in caplog.records if record.name == housekeeping.logger.name]


# --- jobs ---------------------------------------------------------------------------------------


def test_jobs_that_hang_delay_no_other_and_leave_one_thread_behind() -> None:
    hangs, runs = [Hang() for _ in range(5)], threading.Semaphore(0)
    jobs = [Job("durable-hanging", hang) for hang in hangs]
    other = Job("durable-other", lambda: runs.release() or 0.0)
    for job in (*jobs, other):
        job.start()
    assert all(hang.is_running.wait(30) for hang in hangs)
    assert all(runs.acquire(timeout=30) for _ in range(3))
    other.stop()
    for hang in hangs:
        hang.may_end.set()
    assert all(job.wait(30) for job in jobs)
    until(lambda: [thread.name for thread in threading.enumerate()].count("durable-idle") == 1)
    assert "durable-hanging" not in {thread.name for thread in threading.enumerate()}


def test_jobs_of_a_lane_run_one_after_another() -> None:
    hang, ran, other_ran = Hang(), threading.Event(), threading.Event()
    first = Job("durable-first", hang, lane="lane")
    second = Job("durable-second", lambda: ran.set() or math.inf, lane="lane")
    other = Job("durable-other", lambda: other_ran.set() or math.inf)
    first.start()
    assert hang.is_running.wait(30)
    second.start()
    other.start()
    assert other_ran.wait(30)
    assert not ran.is_set()
    hang.may_end.set()
    assert second.wait(30)
    assert ran.is_set()


def test_a_job_that_is_started_while_it_runs_runs_once_more_and_not_twice_at_the_same_time() -> None:
    hang = Hang()
    job = Job("durable-test", hang)
    job.start()
    assert hang.is_running.wait(30)
    job.start()
    job.wake()
    assert not job.wait(0.01)
    assert hang.runs == 1
    hang.may_end.set()
    assert job.wait(30)
    assert hang.runs == 2
    job.wake()  # it has ended
    assert not job.is_started()


def test_a_job_that_is_stopped_ends_with_its_run() -> None:
    is_running, may_end = threading.Event(), threading.Event()
    job = Job("durable-test", lambda: (is_running.set(), may_end.wait())[1] - 1.0)
    job.start()
    assert is_running.wait(30)
    job.stop()
    job.wake()
    assert job.is_started()
    may_end.set()
    assert job.wait(30)


@pytest.mark.parametrize("is_quick", [False, True])
def test_a_job_that_fails_is_logged_and_done_again(caplog: pytest.LogCaptureFixture, is_quick: bool) -> None:
    failures = iter([SystemExit(3)])

    def fail_first() -> float:
        for failure in failures:
            raise failure
        return math.inf

    job = Job("durable-test", fail_first, is_quick=is_quick)
    job.start()
    assert job.wait(30)
    assert said(caplog) == ["durable-test failed and is done again"]


def test_an_outage_of_a_job_with_a_purpose_is_logged_when_it_begins_and_ends(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, housekeeping.logger.name)
    failures = [OSError("the server is away\nLINE 1")] * 3

    def work() -> float:
        if failures:
            raise failures.pop()
        return math.inf

    job = Job("durable-test", work, purpose="count sheep")
    job.start()
    assert job.wait(30)
    assert said(caplog) == [
        "This process cannot count sheep and will retry: the server is away",
        "This process can count sheep again",
    ]


def test_a_job_for_which_no_thread_can_be_started_is_late(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(housekeeping, "_process", housekeeping._Process())  # one without an idle thread of other tests
    hang, late = Hang(), threading.Event()
    first, second = Job("durable-first", hang), Job("durable-second", lambda: late.set() or math.inf)
    first.start()
    assert hang.is_running.wait(30)
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        monkeypatch.setattr(threading.Thread, "start", start)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    second.start()
    assert late.wait(30)
    assert said(caplog) == ["durable-second is late, because no thread can be started: can't start new thread"]
    hang.may_end.set()


# --- forks --------------------------------------------------------------------------------------


def exit_code_of_child(check: object) -> int:
    if not (child := os.fork()):
        try:
            os._exit(0 if check() else 1)  # type: ignore[operator]
        finally:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_waits_for_a_job_and_takes_none_along() -> None:
    lock, is_held = threading.Lock(), threading.Event()

    def hold() -> float:
        with lock:
            is_held.set()
            until(lambda: housekeeping._process.fork_count)
        return math.inf

    job = Job("durable-test", hold)
    job.start()
    assert is_held.wait(30)

    def check() -> bool:
        is_free, ran = lock.acquire(blocking=False), threading.Event()
        other = Job("durable-child", lambda: ran.set() or math.inf)
        is_started = job.is_started()
        other.start()
        return is_free and not is_started and ran.wait(30)

    assert exit_code_of_child(check) == 0
    assert job.wait(30)


@pytest.mark.usefixtures("short_waits")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_does_not_wait_for_a_job_that_hangs() -> None:
    hang = Hang()
    job = Job("durable-test", hang)
    job.start()
    assert hang.is_running.wait(30)
    assert exit_code_of_child(lambda: not job.is_started()) == 0
    hang.may_end.set()
    assert job.wait(30)


# --- calls --------------------------------------------------------------------------------------


@pytest.fixture
def calls() -> Iterator[CallQueue]:
    calls = CallQueue("durable-calls", 2)
    yield calls
    calls.finish(5)


def test_calls_are_made_in_order_and_not_where_they_were_added(calls: CallQueue) -> None:
    made: list[object] = []
    assert calls.add(lambda: made.append(threading.current_thread().name), what="One")
    assert calls.add(lambda: made.append(2), what="Two")
    calls.finish(5)
    assert made == ["durable-calls", 2]


def test_a_call_that_fails_is_logged_and_the_next_one_is_made(
    calls: CallQueue, caplog: pytest.LogCaptureFixture
) -> None:
    made: list[int] = []
    calls.add(lambda: 1 / 0, what="The claim of a dead process")
    calls.add(lambda: made.append(2), what="Two")
    calls.finish(5)
    assert said(caplog) == ["The claim of a dead process is given up: division by zero"]
    assert made == [2]


def test_a_call_that_does_not_fit_is_refused_and_logged(calls: CallQueue, caplog: pytest.LogCaptureFixture) -> None:
    hang = Hang()
    calls.add(hang, what="One")
    assert hang.is_running.wait(30)
    assert calls.add(lambda: None, what="Two")
    assert calls.add(lambda: None, what="Three")
    assert not calls.add(lambda: None, what="Four")
    assert said(caplog) == ["Four is given up: 2 calls of this process are waiting already"]
    hang.may_end.set()


def test_finishing_does_not_wait_for_a_call_that_hangs(calls: CallQueue, caplog: pytest.LogCaptureFixture) -> None:
    hang, was_made = Hang(), threading.Event()
    calls.add(hang, what="One")
    assert hang.is_running.wait(30)
    calls.add(lambda: None, what="Two")
    calls.finish(0.05)
    assert said(caplog) == ["2 calls of this process are given up: they did not end in time"]
    hang.may_end.set()
    assert calls.add(was_made.set, what="Three")
    assert was_made.wait(30)


@pytest.mark.usefixtures("short_waits")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_child_makes_its_own_calls_and_not_those_of_its_parent(calls: CallQueue) -> None:
    hang, made = Hang(), list[str]()
    calls.add(hang, what="One")
    assert hang.is_running.wait(30)
    calls.add(lambda: made.append("parent"), what="The parent's")

    def check() -> bool:
        calls.add(lambda: made.append("child"), what="The child's")
        calls.finish(10)
        return made == ["child"]

    assert exit_code_of_child(check) == 0
    hang.may_end.set()
    calls.finish(5)
    assert made == ["parent"]
