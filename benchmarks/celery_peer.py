"""Plain Celery: a task that does nothing, and chains of ten tasks whose results are kept in Redis. Neither is durable.

This module is also the Celery app that the workers run. Each link of a chain gets the result of the one before.
"""

from __future__ import annotations

from collections.abc import Sequence

from celery import Celery, chain
from measuring import PREFORK, PREFORK8, Answer, Question, measure, wait_for, worker
from redis import Redis
from servers import BROKER, KEY_PREFIX

LINKS = 10
QUEUE = "peer"

app = Celery("celery_peer", broker=BROKER, backend=BROKER)
app.conf.update(
    task_default_queue=QUEUE,
    worker_prefetch_multiplier=4,
    worker_hijack_root_logger=False,
    broker_transport_options={"global_keyprefix": KEY_PREFIX},
    result_backend_transport_options={"global_keyprefix": KEY_PREFIX},
    result_expires=600,
)
redis = Redis.from_url(BROKER)
STARTED, ENDED = f"{KEY_PREFIX}started", f"{KEY_PREFIX}ended"


@app.task(ignore_result=True)
def noop() -> None:
    """Nothing."""


@app.task
def first(number: int) -> int:
    """The beginning of a chain, which is counted: when all have started, a tenth of the work is done."""
    redis.incr(STARTED)
    return number + 1


@app.task
def link(number: int) -> int:
    return number + 1


@app.task
def last(number: int) -> int:
    """The end of a chain, which is counted."""
    redis.incr(ENDED)
    return number + 1


def questions(instances: int) -> dict[str, Question]:
    return {
        "noop": Question("Celery tasks that do nothing, prefork 2", None, lambda: run_noops(instances * 2)),
        "noop8": Question("Celery tasks that do nothing, prefork 8", None, lambda: run_noops(instances * 2, PREFORK8)),
        "chain": Question(
            f"tasks in Celery chains of {LINKS}, results in Redis, prefork 2",
            "limit2",
            lambda: run_chains(max(20, instances // 5)),
        ),
    }


def run_noops(count: int, options: Sequence[str] = PREFORK) -> Answer:
    """The length of the queue says how many are left."""
    for _ in range(count):
        noop.delay()
    with worker(*options, "-n", "noops@localhost", app="celery_peer") as pid:
        return measure(lambda: count - redis.llen(f"{KEY_PREFIX}{QUEUE}"), count, sessions=[pid])


def run_chains(count: int) -> Answer:
    redis.mset({STARTED: 0, ENDED: 0})
    signature = chain(first.s(0), *[link.s()] * (LINKS - 2), last.s())
    for _ in range(count):
        signature.delay()
    with worker(*PREFORK, "-n", "chains@localhost", app="celery_peer") as pid:
        answer = measure(count_links, count * LINKS, sessions=[pid])
        wait_for(lambda: redis.llen(f"{KEY_PREFIX}{QUEUE}") == 0)
    forget_results()
    return answer


def count_links() -> int:
    """How many have ended, exactly when no or every chain has: the queue is a line, so all chains advance together."""
    started, ended = map(int, redis.mget(STARTED, ENDED))
    return started + ended * (LINKS - 1)


def forget_results() -> None:
    for key in redis.scan_iter(f"{KEY_PREFIX}celery-task-meta-*", count=1000):
        redis.delete(key)
