"""Mistakes that an author can make, one in each line that says so. Checked, never run.

`test_typing` wants each reported by mypy and by pyright, on its line, and nothing else reported. The comments keep
`make check` quiet, and it in turn complains of a comment without a mistake.
"""

from __future__ import annotations

from pydantic import BaseModel

from celery_durable import (
    Durable,
    Limit,
    Retries,
    Step,
    StepConfig,
    StepTx,
    WorkflowEvent,
    durable_step,
    durable_workflow,
)


class OrderIn(BaseModel):
    order_id: str
    cents: int


class Approval(BaseModel):
    approved: bool


def charge(tx: StepTx, order_id: str, cents: int) -> str:
    tx.commit()  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    tx.mutate(lambda: None)  # type: ignore[arg-type,misc]  # pyright: ignore[reportArgumentType]
    return f"{order_id} {cents}"


def count(text: str) -> int:
    return len(text)


@durable_step(retry=3)  # type: ignore[call-overload,untyped-decorator]  # pyright: ignore[reportCallIssue]
def misspelt() -> None: ...


@durable_workflow(name="order")
def order(event: WorkflowEvent[OrderIn], step: Step) -> str:
    step.do("charge", charge, "o-1", "five")  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    step.do("charge", charge, "o-1")  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    step.do("charge", charge, "o-1", 5, 6)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue,reportArgumentType]
    step.do("charge", charge, "o-1", dollars=5)  # type: ignore[arg-type,call-arg]  # pyright: ignore[reportCallIssue]
    step.do("count", count("text"))  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue,reportArgumentType]
    step.do("count", {"retries": 3}, count, "text")  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue,reportArgumentType]
    step.do("count", count, "text").upper()  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    step.submit("count", count, 5)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue,reportArgumentType]
    step.sleep_until("until", "tomorrow")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    step.child("approve", approve, Approval(approved=True))  # type: ignore[misc]  # pyright: ignore[reportArgumentType]
    print(step.child("approve", approve, event.payload).amount)  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    step.child("count", count, "text")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    step.submit_child("approve", approve, 5)  # type: ignore[misc]  # pyright: ignore[reportArgumentType]
    print(step.map("approve", approve, [event.payload])[0].amount)  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    step.map("approve", approve, [event.payload], countdown=5)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    step.task("resize", "media.resize", countdown=5)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    step.wait_for_event("ask", "approval", ask=7)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
    answer = step.wait_for_event("wait", "approval", schema=Approval)
    step.log.info("decided", by=answer.payload.by)  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    print(event.payload.amount)  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    event.payload = answer  # type: ignore[misc,assignment]  # pyright: ignore[reportAttributeAccessIssue]
    return step.gather(step.submit("count", count, "text"))  # type: ignore[return-value]  # pyright: ignore[reportReturnType]


@durable_workflow(name="approve")
def approve(event: WorkflowEvent[OrderIn], step: Step) -> Approval:
    return Approval(approved=True)


@durable_workflow(name="wrong-event")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType,reportCallIssue]
def wrong_event(event: str, step: Step) -> None: ...


@durable_workflow(title="order")  # type: ignore[call-overload,untyped-decorator]  # pyright: ignore[reportCallIssue]
def wrong_option(event: WorkflowEvent[OrderIn], step: Step) -> None: ...


@durable_workflow
async def fetched(event: WorkflowEvent[OrderIn], step: Step) -> str:
    return event.payload.order_id


@durable_workflow(name="fetched-later")
async def fetched_later(event: WorkflowEvent[OrderIn], step: Step) -> str:
    return event.payload.order_id


def operate() -> None:
    fetched.create(OrderIn(order_id="1", cents=5))  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    fetched_later.create(OrderIn(order_id="1", cents=5))  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    order.create()  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    order.create(id="o-1")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    order.create(None)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    order.delay()  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    order.restart_or_create(id="o-1")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    order.create({"order_id": "1", "cents": 5})  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    order.create(Approval(approved=True))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    order.create(OrderIn(order_id="1", cents=5), if_exists="ignore")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    order.create(OrderIn(order_id="1", cents=5), if_running="wait")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    order.create(OrderIn(order_id="1", cents=5), countdown=5)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    total: int = order.get("o-1").result()  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]
    order.get("o-1").send_event(5, total)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    Limit("stripe", at_once="20")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    StepConfig(limits=["stripe"])  # type: ignore[list-item]  # pyright: ignore[reportArgumentType]
    StepConfig(retries="three")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    StepConfig(on_lost="wait")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    Retries(backoff="quadratic")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    Durable(engine="sqlite://")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
