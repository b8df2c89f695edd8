"""The workflows whose signals the tests receive."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import sqlalchemy as sa

from celery_durable import (
    Completed,
    Dead,
    LinearContext,
    LinearStep,
    LinearWorkflow,
    NonRetryableError,
    Retry,
    Step,
    StepFailed,
    StepTx,
    TaskType,
    Waiting,
    WorkflowEvent,
    values,
)
from celery_durable.model import RunRef, task_event_type
from celery_durable.testing import DurableHarness
from tests.support.references import reference_of

on_sqlite = pytest.mark.parametrize("database", ["sqlite"], indirect=True)
RUN = {"workflow": "order", "instance_id": "o-1", "run_number": 1}


def charge(tx: StepTx) -> str:
    if tx.attempt == 1:
        raise OSError("the bank is closed")
    return "paid"


def refuse() -> None:
    raise NonRetryableError("over the limit", name="TooExpensive")


def order(event: WorkflowEvent[Any], step: Step) -> str:
    step.do("charge", charge)
    step.sleep("rest", "1 minute")
    step.wait_for_event("approval", "approved", timeout="1 hour")
    try:
        step.do("refuse", refuse)
    except StepFailed as failure:
        return failure.error_name
    return "never"


def failing(event: WorkflowEvent[Any], step: Step) -> None:
    raise LookupError("no such order")


def shipping(event: WorkflowEvent[Any], step: Step) -> Any:
    return step.task("ship", "shop.ship", timeout="1 day")


def to_step_row(name: str, type_: str = "do", attempt: int = 1) -> dict[str, Any]:
    return {**RUN, "step": name, "step_key": name, "type": type_, "attempt": attempt}


listed = LinearWorkflow("listed", 1, [LinearStep("CHECK", delay="10s", backoff="constant"), LinearStep("PAY")])


@listed.handler("CHECK")
def check(ctx: LinearContext) -> Completed | Retry:
    return Completed() if ctx.attempt > 1 else Retry(None, "not yet")


@listed.handler("PAY")
def pay(ctx: LinearContext) -> Waiting | Dead:
    return Waiting("paid", "1 hour") if ctx.task_type is TaskType.RUN else Dead("nobody has paid")


def stuck(event: WorkflowEvent[Any], step: Step) -> None:
    step.wait_for_event("approval", "approved")
    step.do("refuse", refuse)


actions: list[Any] = []


def slow(event: WorkflowEvent[Any], step: Step) -> None:
    step.do("slow", lambda: actions.pop()() and None)


def writing(event: WorkflowEvent[Any], step: Step) -> None:
    def write(tx: StepTx) -> None:
        tx.session.execute(sa.text("SELECT 1"))

    step.do("write", write)


def told(harness: DurableHarness) -> None:
    """Make everything happen that there is a signal for."""
    instance = harness.create(order, id="o-1")
    instance.send_event("approved")
    harness.create(failing)
    harness.advance("70 seconds")
    instance.restart()
    instance.terminate()
    other = harness.create(order, id="o-2")
    harness.run_until_idle()
    other.skip("charge", by="eve")
    harness.create(shipping, id="s-1")
    harness.run_until_idle()
    operations, ref = harness.durable.internals.operations, RunRef("shipping", "s-1", 1)
    type_ = task_event_type("shop.ship", operations.queries.get(ref.workflow, ref.instance_id).instance.pk, 1, 1)
    true = reference_of(harness.durable.internals.store, ref, type_)
    operations.answers.accept(dataclasses.replace(true, token="0" * 32), values.encode_answer("1"))
