"""Background work: in order, bounded, never lost without a word, and nothing of it in a fork."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator

import pytest

from celery_durable.tasks.background_queue import BackgroundQueue


@pytest.fixture
def background() -> Iterator[BackgroundQueue]:
    background = BackgroundQueue(size=2)
    yield background
    background.close(5)


def test_jobs_run_in_order_and_not_where_they_were_submitted(background: BackgroundQueue) -> None:
    ran: list[object] = []
    assert background.submit(lambda: ran.append(threading.current_thread().name), what="One")
    assert background.submit(lambda: ran.append(2), what="Two")
    assert background.close(5)
    assert ran == ["durable-background", 2]


def test_a_job_that_fails_is_logged_and_the_next_one_runs(
    background: BackgroundQueue, caplog: pytest.LogCaptureFixture
) -> None:
    ran: list[int] = []
    with caplog.at_level(logging.WARNING):
        background.submit(lambda: 1 / 0, what="The claim of a dead process")
        background.submit(lambda: ran.append(2), what="Two")
        background.close(5)
    assert caplog.messages == ["The claim of a dead process is left to the sweep: division by zero"]
    assert ran == [2]


def test_what_does_not_fit_is_refused_and_logged(background: BackgroundQueue, caplog: pytest.LogCaptureFixture) -> None:
    is_at_work, may_end = threading.Event(), threading.Event()
    background.submit(lambda: (is_at_work.set(), may_end.wait(30)), what="One")
    assert is_at_work.wait(30)
    assert background.submit(lambda: None, what="Two")
    assert background.submit(lambda: None, what="Three")
    with caplog.at_level(logging.WARNING):
        assert not background.submit(lambda: None, what="Four")
    assert caplog.messages == ["Four is left to the sweep: 2 background jobs of this process are waiting already"]
    may_end.set()


def test_closing_does_not_wait_for_a_job_that_hangs(
    background: BackgroundQueue, caplog: pytest.LogCaptureFixture
) -> None:
    is_at_work, may_end = threading.Event(), threading.Event()
    background.submit(lambda: (is_at_work.set(), may_end.wait(30)), what="One")
    assert is_at_work.wait(30)
    background.submit(lambda: None, what="Two")
    with caplog.at_level(logging.WARNING):
        assert not background.close(0.05)
    assert caplog.messages == ["3 background jobs of this process are left to the sweep: they did not end in time"]
    may_end.set()
    ran = threading.Event()
    assert background.submit(ran.set, what="Three")
    assert ran.wait(30)


def test_a_fork_begins_with_an_empty_queue_and_a_thread_of_its_own(background: BackgroundQueue) -> None:
    is_at_work, may_end = threading.Event(), threading.Event()
    background.submit(lambda: (is_at_work.set(), may_end.wait(30)), what="One")
    assert is_at_work.wait(30)
    background.submit(lambda: None, what="The parent's")
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        try:
            background.submit(lambda: os.write(write, b"child"), what="The child's")
            background.close(10)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    may_end.set()
    assert os.read(read, 5) == b"child"
    os.close(read)
    os.close(write)
