"""The Celery project that the benchmark's workers and beat run."""

import asyncio
import os
import struct
import time
from datetime import UTC, datetime
from pathlib import Path

import redis
from celery import Celery
from servers import BROKER, DATABASE, KEY_PREFIX

from celery_durable import Durable, Step, StepTx, WorkflowEvent

app = Celery("bench", broker=BROKER)
app.conf.update(
    broker_transport_options={"global_keyprefix": KEY_PREFIX},
    durable_database_url=os.environ.get("BENCH_DATABASE_URL") or DATABASE.render_as_string(hide_password=False),
    durable_dispatcher="beat",
    worker_prefetch_multiplier=4,
    worker_hijack_root_logger=False,
)
durable = Durable(app)

counter = redis.Redis.from_url(BROKER)
COUNTED, QUEUE_KEY = f"{KEY_PREFIX}count", f"{KEY_PREFIX}durable"


def trivial(number: int) -> int:
    return number


@durable.workflow
def many(event: WorkflowEvent[int], step: Step) -> int:
    for number in range(event.payload):
        step.do(f"step {number}", trivial, number)
    return event.payload


def text(size: int) -> str:
    return "x" * size


@durable.workflow
def held(event: WorkflowEvent[dict[str, int]], step: Step) -> None:
    """Waits behind its steps, so that a pass can replay them as often as wanted."""
    for number in range(event.payload["steps"]):
        step.do(f"step {number}", text, event.payload["bytes"])
    step.wait_for_event("the end", "end")


@app.task
def count(number: int) -> int:
    """As little as a task can do and be seen."""
    counter.incr(COUNTED)
    return number


@durable.workflow
def spread(event: WorkflowEvent[int], step: Step) -> int:
    return len(step.map("count", count, range(event.payload)))


def note_time() -> None:
    with Path(os.environ["BENCH_LOG"]).open("ab", buffering=0) as log:
        log.write(struct.pack("d", time.time()))


@app.task(queue="stamps", ignore_result=True)
def stamp(number: int) -> int:
    """As little as a task can do and leave the time at which it was done."""
    note_time()
    return number


@durable.workflow
def stamps(event: WorkflowEvent[dict[str, int | None]], step: Step) -> int:
    tasks, limit = event.payload["tasks"] or 0, event.payload["limit"]
    return len(step.map("stamps", stamp, range(tasks), max_concurrency=limit))


@durable.workflow
def sleeper(event: WorkflowEvent[float], step: Step) -> None:
    step.sleep("nap", event.payload)


async def awaited_trivial(number: int) -> int:
    await asyncio.sleep(0)
    return trivial(number)


@durable.workflow
def awaited(event: WorkflowEvent[int], step: Step) -> int:
    for number in range(event.payload):
        step.do(f"step {number}", awaited_trivial, number)
    return event.payload


@durable.workflow
def logged(event: WorkflowEvent[int], step: Step) -> int:
    """As `many`, with a line in the durable log for each step."""
    for number in range(event.payload):
        step.log.info("the next step", number=number)
        step.do(f"step {number}", trivial, number)
    return event.payload


@durable.workflow
def noting(event: WorkflowEvent, step: Step) -> None:
    step.do("note", note_time)


@durable.workflow
def told(event: WorkflowEvent, step: Step) -> None:
    step.wait_for_event("the word", "go")
    step.do("note", note_time)


@durable.workflow
def alarm(event: WorkflowEvent[float], step: Step) -> None:
    step.sleep_until("due", datetime.fromtimestamp(event.payload, UTC))
    step.do("note", note_time)


def note_process(tx: StepTx) -> None:
    """Notes when it starts. At the first attempt, it also notes its process, and then waits to be killed."""
    note_time()
    if tx.attempt == 1:
        Path(os.environ["BENCH_LOG"]).with_suffix(".pid").write_text(str(os.getpid()))
        time.sleep(60)


@durable.workflow
def victim(event: WorkflowEvent, step: Step) -> None:
    step.do("note", note_process)
