"""The Celery project that the benchmark's workers and beat run."""

import os
import time

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


@durable.workflow
def sleeper(event: WorkflowEvent[float], step: Step) -> None:
    step.sleep("nap", event.payload)
    step.do("note", note_start, event.instance_id)
