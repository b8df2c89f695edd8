"""The Celery project that the benchmark's workers and beat run."""

import os
import time

import redis
import sqlalchemy as sa
from celery import Celery

from celery_durable import Durable, Step, WorkflowEvent

app = Celery("bench", broker=os.environ["BENCH_BROKER"])
app.conf.update(
    durable_database_url=os.environ["BENCH_DATABASE"],
    durable_dispatcher="beat",
    worker_prefetch_multiplier=4,
    worker_hijack_root_logger=False,
)
durable = Durable(app)
latencies = sa.create_engine(os.environ["BENCH_DATABASE"], isolation_level="AUTOCOMMIT")

counter = redis.Redis.from_url(os.environ["BENCH_BROKER"])


def trivial(number: int) -> int:
    return number


def note_start(instance_id: str) -> None:
    with latencies.connect() as conn:
        conn.execute(sa.text("INSERT INTO bench_start VALUES (:id, :at)"), {"id": instance_id, "at": time.time()})


@durable.workflow
def many(event: WorkflowEvent[int], step: Step) -> int:
    for number in range(event.payload):
        step.do(f"step {number}", trivial, number)
    return event.payload


@app.task
def count(number: int) -> int:
    """As little as a task can do and be seen."""
    counter.incr("durable-bench-count")
    return number


@durable.workflow
def spread(event: WorkflowEvent[int], step: Step) -> int:
    return len(step.map("count", count, range(event.payload)))


@durable.workflow
def sleeper(event: WorkflowEvent[float], step: Step) -> None:
    step.sleep("nap", event.payload)
    step.do("note", note_start, event.instance_id)
