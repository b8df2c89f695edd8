"""What a dispatch message costs, against send_task: `python benchmarks/publish.py [broker URL ...]`.

CPU time of this process and messages per second, in batches of several sizes. Queues of its own are made and deleted.
"""

from __future__ import annotations

import functools
import logging
import sys
import time
import uuid
from collections.abc import Callable

from celery import Celery

from celery_durable.model import DueRun, RunRef
from celery_durable.runtime import Runtime
from celery_durable.tasks.publishing import Publisher, SendState

BROKERS = ("redis://127.0.0.1:6379/9", "amqp://guest:guest@127.0.0.1:5672//")
MESSAGES = 10_000


def main() -> None:
    logging.disable(logging.INFO)
    for url in sys.argv[1:] or BROKERS:
        measure(url)


def measure(url: str) -> None:
    queue = f"bench-{uuid.uuid4().hex[:8]}"
    app = Celery("bench", broker=url, set_as_current=False)
    publisher = Publisher(
        app, "advance", Runtime(), deliver="deliver", answer_task_names=("done", "failed"), queue=lambda: queue
    )
    print(app.connection_for_write().as_uri())
    report("send_task", MESSAGES // 10, lambda count: send_by_celery(app, queue, count))
    for size in (1, 50, 200, 1000):
        count = MESSAGES if size > 1 else MESSAGES // 10
        report(f"Publisher, {size} at once", count, functools.partial(publish, publisher, queue, size))
    assert publisher.queue_length(queue) == 2 * (MESSAGES // 10) + 3 * MESSAGES
    publisher.close()
    with app.connection_for_write() as connection:
        connection.default_channel.queue_delete(queue)


def report(what: str, count: int, send: Callable[[int], None]) -> None:
    began, cpu = time.perf_counter(), time.process_time()
    send(count)
    took, spent = time.perf_counter() - began, time.process_time() - cpu
    print(f"  {what:<24} {count / took:8.0f} /s  {spent / count * 1e6:6.1f} us of CPU each")


def send_by_celery(app: Celery, queue: str, count: int) -> None:
    with app.producer_pool.acquire() as producer:
        for number in range(count):
            app.send_task(
                "advance", args=("order", f"o-{number}", 1), queue=queue, producer=producer, ignore_result=True
            )


def publish(publisher: Publisher, queue: str, size: int, count: int) -> None:
    for start in range(0, count, size):
        dues = [DueRun(RunRef("order", f"o-{number}", 1), queue) for number in range(start, start + size)]
        assert set(publisher.publish(dues).states) == {SendState.SENT}


if __name__ == "__main__":
    main()
