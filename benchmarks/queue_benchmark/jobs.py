"""The job: the smallest workflow, which one pass starts and ends. The Celery app whose worker runs it.

BENCH_QUEUE_COUNT is the number of queues. Each queue has a workflow of its own; all of them are the same function.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import TypedDict

import sqlalchemy as sa
from celery import Celery
from meters import LatencyMeter, RateMeter

from celery_durable import Durable, Step, WorkflowEvent
from celery_durable.signals import workflow_completed

DATABASE = sa.make_url(os.environ["DATABASE_URL"]).set(drivername="postgresql+psycopg")
BROKER = os.environ.get("BENCH_BROKER", "redis://127.0.0.1:6379/9")
KEY_PREFIX = f"{os.environ.get('BENCH_NAME', DATABASE.database)}:"
WORK_SECONDS = float(os.environ.get("JOB_WORK_MS", "1")) / 1000
QUEUES = [f"jobs{number}" for number in range(int(os.environ.get("BENCH_QUEUE_COUNT", "1")))]

claims, completions, ends = LatencyMeter(), RateMeter(), LatencyMeter()
claims_by_queue = {queue: LatencyMeter() for queue in QUEUES}

app = Celery("queue_benchmark", broker=BROKER)
app.conf.update(
    broker_transport_options={"global_keyprefix": KEY_PREFIX},
    durable_database_url=DATABASE.render_as_string(hide_password=False),
    durable_dispatcher="worker",
    worker_prefetch_multiplier=4,
    worker_hijack_root_logger=False,
)
durable = Durable(app)


class Job(TypedDict):
    """``created_at``: seconds since the epoch, before the transaction that created the job."""

    created_at: float
    queue: str
    padding: str


def work(created_at: float, queue: str) -> None:
    latency = (time.time() - created_at) * 1000
    claims.note(latency)
    claims_by_queue[queue].note(latency)
    time.sleep(WORK_SECONDS)


def job(event: WorkflowEvent[Job], step: Step) -> None:
    step.do("work", work, event.payload["created_at"], event.payload["queue"])


workflows = {queue: durable.workflow(name=queue, queue=queue)(job) for queue in QUEUES}


@workflow_completed.connect(weak=False)
def note_completion(duration: timedelta, **_: object) -> None:
    completions.add()
    ends.note(duration.total_seconds() * 1000)
