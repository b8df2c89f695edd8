"""``celery -A tests.stops.project``: a workflow whose step may not be repeated, and a plain task that does the same."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from celery import Celery

from celery_durable import Durable, Retries, Step, StepConfig, StepTx, WorkflowEvent, signals
from celery_durable.tasks import ADVANCE
from tests.stops import witness

folder = Path(os.environ["STOPS_FOLDER"])
app = Celery("stops", broker=os.environ["STOPS_BROKER"], backend=os.environ["STOPS_BROKER"], set_as_current=False)
app.conf.update(
    task_default_queue="plain",
    task_create_missing_queues=True,
    worker_prefetch_multiplier=1,
    durable_database_url=os.environ["STOPS_DATABASE"],
    durable_queue="durable",
    durable_lease_seconds=witness.LEASE_SECONDS,
    durable_pass_seconds=3600.0,
    durable_poll_seconds=0.1,
    durable_grace_seconds=0.5,
)
durable = Durable(app)


def pay(tx: StepTx, job: str, uses_session: bool) -> None:
    if uses_session:
        tx.session.execute(sa.text("SELECT 1"))
    witness.work(folder, job, tx.attempt, raises_first=True)


@durable.workflow(name="payment")
def payment(event: WorkflowEvent[bool], step: Step) -> None:
    once = StepConfig(on_lost="fail", retries=Retries(limit=3, delay=0))
    step.do("pay", once, pay, event.instance_id, event.payload)


@app.task(name="payment", shared=False)
def plain(job: str) -> None:
    witness.work(folder, job, 1, raises_first=False)


@signals.step_failed.connect(weak=False)
def report(instance_id: str, error_name: str, **_: Any) -> None:
    if error_name == "OutcomeUnknown":
        witness.note(folder, "reported", instance_id)


if limit := int(os.environ.get("STOPS_LIMIT", "0")):
    for task in (app.tasks[ADVANCE], app.tasks["payment"]):
        task.time_limit, task.soft_time_limit = limit, None
