"""A worker in this process, and a look into the memory broker's queues."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from celery import Celery
from celery._state import _set_task_join_will_block
from celery.contrib.testing.worker import start_worker
from celery.worker.state import revoked
from kombu import Message


@contextmanager
def worker(app: Celery, **options: Any) -> Iterator[Any]:
    """An embedded worker; its pool is ``threads`` unless the test says otherwise."""
    options = {"pool": "threads", "concurrency": 2, "perform_ping_check": False, "loglevel": "critical", **options}
    is_over = threading.Event()
    alarm = threading.Thread(target=_wake_until, args=(app, is_over))
    try:
        with start_worker(app, **options) as started:
            try:
                yield started
            finally:
                alarm.start()
    finally:
        is_over.set()
        # Tasks of two threads set this to what they have found, so it may stay for all tests after this one.
        _set_task_join_will_block(False)
        # A worker never runs an id again that has expired, and fresh databases derive the same ids for their tasks.
        revoked.clear()


def _wake_until(app: Celery, is_over: threading.Event) -> None:
    """The worker's loop waits up to 2 s for a message before it sees that it is to stop: send it some."""
    while not is_over.wait(0.02):
        app.control.broadcast("ping")


def until(condition: Callable[[], Any], seconds: float = 60.0) -> None:
    """Look until it is so, for as long as that takes on a machine whose disk others keep busy."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


def messages(app: Celery, name: str | None = None) -> list[Message]:
    """Take all messages out of a queue, by default the durable one."""
    taken: list[Message] = []
    with app.connection_for_read() as connection:
        simple = connection.SimpleQueue(app.amqp.queues[name or app.conf.durable_queue])
        try:
            while True:
                taken.append(simple.get(block=False))
                taken[-1].ack()
        except queue.Empty:
            return taken
        finally:
            simple.close()
