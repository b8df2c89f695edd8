"""The application of test_beside: it runs on today's code and on the code of earlier commits."""

from __future__ import annotations

import os
from typing import Any

from celery import Celery

from celery_durable import Durable, Step, WorkflowEvent

NAME = os.environ["BESIDE_NAME"]
SIDE = os.environ["BESIDE_SIDE"]
"""Which code runs here: "new", or the commit of the old one."""

app = Celery(NAME, broker=os.environ["BESIDE_BROKER"])
app.conf.update(
    task_default_queue=f"celery-{NAME}",
    broker_transport_options={"global_keyprefix": f"{NAME}:"},
    durable_queue=f"durable-{NAME}",
    durable_database_url=os.environ["BESIDE_DATABASE"],
    durable_dispatcher="worker",
    durable_poll_seconds=0.1,
)
durable = Durable(app)


@app.task(name="beside.double", shared=False)
def double(number: int) -> int:
    return 2 * number


@durable.workflow
def order(event: WorkflowEvent[int], step: Step) -> dict[str, Any]:
    started = step.do("start", lambda: SIDE)
    doubled = step.task("double", double.s(event.payload), timeout="1 hour")
    mapped = step.map("double all", double.s(), [1, 2], timeout="1 hour")
    answer = step.wait_for_event("go", "go", timeout="1 hour").payload
    step.sleep("nap", "1 second")
    finished = step.do("finish", lambda: SIDE)
    return {"sides": [started, finished], "doubled": doubled, "mapped": mapped, "answer": answer}
