"""What authors are promised about types. Checked, never run: mypy --strict and pyright must accept every line."""

from __future__ import annotations

import functools
from datetime import UTC, datetime, timedelta
from typing import Any, assert_type

from celery import Celery
from pydantic import BaseModel
from sqlalchemy.orm import Session

from celery_durable import (
    CreateOptions,
    Durable,
    History,
    InstanceStatus,
    Limit,
    LinearStep,
    LinearWorkflow,
    NonRetryableError,
    Page,
    Published,
    ReceivedEvent,
    RestartOrCreateResult,
    Retries,
    Status,
    Step,
    StepConfig,
    StepFailed,
    StepFuture,
    StepTx,
    Workflow,
    WorkflowEvent,
    WorkflowInstance,
    durable_step,
    durable_workflow,
)
from celery_durable.testing import Barrier, DurableHarness, HarnessInstance, Mock
from celery_durable.testing.scenario import Context, Scenario, create, define_scenario, run_scenario


class OrderIn(BaseModel):
    order_id: str
    cents: int


stripe = Limit("stripe", at_once=20, rate="90 per second", by=lambda event: event.payload.order_id)


class Approval(BaseModel):
    approved: bool


# --- step functions -----------------------------------------------------------------------------


async def ask(question: str, *, words: int = 10) -> str:
    return question


async def ask_tx(tx: StepTx, question: str) -> int | None:
    return tx.attempt


async def pause() -> None: ...


def charge(tx: StepTx, order_id: str, cents: int, *, currency: str = "EUR") -> str:
    assert_type(tx.session, Session)
    assert_type(tx.attempt, int)
    assert_type(tx.idempotency_key, str)
    assert_type(tx.create(report, "x", id="r-1"), str)
    tx.mutate(lambda session: session.flush())
    tx.on_terminal_error(lambda session: session.flush())
    tx.send_event(order, "o-1", "approval", {"approved": True})
    return f"{order_id} {cents} {currency}"


@durable_step(retries=Retries(limit=3, delay="10 seconds", backoff="linear"), timeout=timedelta(minutes=1))
def count(text: str) -> int:
    return len(text)


@durable_step(retries=None, timeout=None, repeat=True, on_lost="fail")
def nothing() -> None:
    raise NonRetryableError("no", name="No")


class Mailer:
    def send(self, to: str, *, subject: str) -> bool:
        return bool(to and subject)


# --- workflows ----------------------------------------------------------------------------------


@durable_workflow(name="order", queue="orders", step_defaults=StepConfig(retries=2, timeout="1 minute"), max_steps=10)
def order(event: WorkflowEvent[OrderIn], step: Step) -> str:
    assert_type(event.payload, OrderIn)
    assert_type(event.timestamp, datetime)
    assert_type(event.instance_id, str)
    assert_type(event.run_number, int)

    # A name, a function and its arguments; StepTx is injected, so it is not among them.
    assert_type(step.do("charge", charge, event.payload.order_id, event.payload.cents), str)
    assert_type(step.do("charge", charge, "o-1", cents=5, currency="USD"), str)
    assert_type(step.do("charge", StepConfig(retries=3, timeout="30s", on_lost="resend"), charge, "o-1", 5), str)
    assert_type(step.do(charge, "o-1", 5), str)
    assert_type(step.do("count", count, "text"), int)
    assert_type(step.do(count, "text"), int)
    assert_type(step.do("nothing", nothing), None)
    assert_type(step.do("mail", Mailer().send, "ada", subject="hello"), bool)
    assert_type(step.do("lambda", lambda: 1.5), float)
    assert_type(step.do("partial", functools.partial(count, "text")), int)
    assert_type(step.do("model", Approval, approved=True), Approval)
    assert_type(step.do("ask", ask, "why?"), str)
    assert_type(step.do("ask", StepConfig(timeout="30s"), ask, "why?", words=5), str)
    assert_type(step.do(ask, "why?"), str)
    assert_type(step.do("ask tx", ask_tx, "why?"), int | None)
    assert_type(step.do("partial ask", functools.partial(ask, "why?")), str)
    assert_type(step.do("pause", pause), None)

    step.sleep("text", "3 days")
    step.sleep("number", 1.5)
    step.sleep("timedelta", timedelta(hours=1))
    step.sleep_until("until", datetime(2030, 1, 1, tzinfo=UTC))

    answer = step.wait_for_event("typed", "approval", timeout="24 hours", schema=Approval)
    assert_type(answer, ReceivedEvent[Approval])
    assert_type(answer.payload, Approval)
    assert_type(step.wait_for_event("untyped", "approval").payload, Any)
    asked = step.wait_for_event("asked", "approval", schema=Approval, ask={"cents": 5}, to="finance")
    assert_type(asked, ReceivedEvent[Approval])
    assert_type(asked.by, str | None)

    assert_type(step.now(), datetime)
    assert_type(step.random(), float)
    assert_type(step.uuid(), str)

    assert_type(step.do("charge", StepConfig(limits=[stripe]), charge, "o-1", 5), str)
    assert_type(step.task("resize", "media.resize", timeout="1 hour", retries=3, limits=[stripe]), Any)
    assert_type(step.child("report", report, "some words", id="r-1", timeout="1 hour", labels={"of": "o-1"}), list[int])
    assert_type(step.child("again", order, event.payload, on_parent_end="continue"), str)
    assert_type(step.child("nothing given", nothing_given), Approval)
    assert_type(step.child("packing", packing, event.payload), Any)
    assert_type(step.child("of an app", durable.workflows["order"], 5), Any)
    assert_type(step.map("orders", order, [event.payload], max_concurrency=5, timeout="1 day", retries=2), list[str])
    caught = step.map("orders", order, [event.payload], return_exceptions=True)
    assert_type(caught, list[str | StepFailed])
    assert_type(step.submit_map("reports", report, ["some words"]), StepFuture[list[list[int]]])
    assert_type(step.map("of an app", durable.workflows["order"], [5]), list[Any])
    assert_type(step.map("thumbs", "media.resize", [1, 2], on_lost="fail", return_exceptions=True), list[Any])
    step.log.debug("said")
    step.log.warning("said", category="orders", amount=5)
    return event.payload.order_id


@durable_workflow(name="nothing-given")
def nothing_given(event: WorkflowEvent[None], step: Step) -> Approval:
    return Approval(approved=True)


packing = LinearWorkflow("packing", 1, steps=[LinearStep("PACK")], params=OrderIn)


@durable_workflow
def report(event: WorkflowEvent[str], step: Step) -> list[int]:
    one = step.submit("one", count, "a")
    assert_type(one, StepFuture[int])
    assert_type(step.submit("tx", charge, "o-1", 5), StepFuture[str])
    assert_type(step.submit("config", StepConfig(retries=0), count, "a"), StepFuture[int])
    assert_type(step.submit(count, "a"), StepFuture[int])
    assert_type(step.submit("ask", ask, "why?"), StepFuture[str])
    assert_type(step.submit("ask tx", StepConfig(retries=0), ask_tx, "why?"), StepFuture[int | None])
    assert_type(step.submit(ask, "why?"), StepFuture[str])
    assert_type(one.result(), int)
    assert_type(step.gather(one, step.submit("two", count, "b")), list[int])
    assert_type(step.gather(one, return_exceptions=True), list[int | Exception])
    assert_type(step.first("first", one, step.submit("three", count, "c")), int)

    child = step.submit_child("child", nothing_given)
    assert_type(child, StepFuture[Approval])
    assert_type(child.result().approved, bool)
    assert_type(step.submit_task("resize", "media.resize"), StepFuture[Any])
    pages = [step.submit_child(f"page {word}", report, word) for word in event.payload.split()]
    assert_type(step.gather(*pages), list[list[int]])

    # Branches of several kinds together: the results are of any of them.
    event_or_time = step.first(
        "which", step.submit_wait_for_event("event", "approval", schema=Approval), step.submit_sleep("time", "1 h")
    )
    if event_or_time is not None:
        step.log.info("came", approved=event_or_time.payload.approved)

    try:
        step.do("count", count, event.payload)
    except StepFailed as failure:
        assert_type(failure.attempts, int)
        assert_type(failure.error_name, str)
    return step.gather(*[step.submit(f"count {word}", count, word) for word in event.payload.split()])


durable = Durable(Celery("shop"))


@durable.workflow(name="bound")
def bound(event: WorkflowEvent[None], step: Step) -> dict[str, int]:
    return {"steps": step.do(lambda: event.run_number)}


@durable_workflow
def maybe(event: WorkflowEvent[OrderIn | None], step: Step) -> str:
    return "nothing" if event.payload is None else event.payload.order_id


@durable_workflow(name="untyped")
def untyped(event: WorkflowEvent[Any], step: Step) -> int:
    return len(event.payload)


# --- handles ------------------------------------------------------------------------------------


def operate(session: Session) -> None:
    assert_type(order, Workflow[OrderIn, str])
    assert_type(report, Workflow[str, list[int]])
    assert_type(bound, Workflow[None, dict[str, int]])

    made = order.create(OrderIn(order_id="1", cents=5), id="o-1", if_exists="return", session=session)
    assert_type(made, WorkflowInstance[str])
    assert_type(made.result(timeout="5 seconds"), str)
    assert_type(bound.create().result(), dict[str, int])
    assert_type(bound.create(id="b-1", labels={"of": "o-1"}), WorkflowInstance[dict[str, int]])
    assert_type(bound.restart_or_create(id="b-1", reason="again"), RestartOrCreateResult)
    late = order.create(OrderIn(order_id="1", cents=5), id="o-1", if_exists="postpone", run_at="30 s", at_latest=300)
    assert_type(late, WorkflowInstance[str])
    assert_type(bound.create(id="b-1", if_running="queue"), WorkflowInstance[dict[str, int]])
    assert_type(maybe.create(), WorkflowInstance[str])
    assert_type(maybe.delay(OrderIn(order_id="1", cents=5)), WorkflowInstance[str])
    assert_type(untyped.create(), WorkflowInstance[int])
    assert_type(untyped.create({"any": "thing"}), WorkflowInstance[int])
    assert_type(order.delay(OrderIn(order_id="1", cents=5)), WorkflowInstance[str])
    assert_type(order.create_batch([CreateOptions("o-2", OrderIn(order_id="2", cents=6))]), list[WorkflowInstance[str]])
    assert_type(order.get("o-1").status(), InstanceStatus)
    assert_type(order.get("o-1").history(), History)
    assert_type(order.get("o-1").published(), dict[str, Published])
    assert_type(made.send_event("approval", {"approved": True}, id="e-1"), bool)
    assert_type(made.answer("approve", Approval(approved=True), by="ada", run=1), bool)
    assert_type(made.restart(), int)
    made.pause()
    made.resume()
    made.cancel(reason="sold twice", by="eve")
    made.terminate(reason="changed our mind", by="eve")
    for page in (order.list(status=Status.ERRORED, limit=5), order.list(status="errored")):
        assert_type(page.items[0].id, str)
        assert_type(page.cursor, str | None)
    assert_type(durable.workflows["order"], Workflow[Any, Any])
    durable.limits["stripe"].set(at_once=40, by="eve")
    assert_type(durable.limits["stripe"].get(key="o-1").limit.rate, str | None)


async def operate_async() -> None:
    assert_type(await bound.acreate(), WorkflowInstance[dict[str, int]])
    assert_type(await maybe.adelay(), WorkflowInstance[str])
    assert_type(await order.arestart_or_create(OrderIn(order_id="1", cents=5), id="o-1"), RestartOrCreateResult)
    made = await order.acreate(OrderIn(order_id="1", cents=5), id="o-1")
    assert_type(made, WorkflowInstance[str])
    assert_type(await made.aresult(timeout=5), str)
    assert_type(await made.astatus(), InstanceStatus)
    assert_type(await made.asend_event("approval"), bool)


def test() -> None:
    with DurableHarness([order], seed=7, settings={"durable_lease_seconds": 10}) as harness:
        assert_type(harness, DurableHarness)
        made = harness.create(order, OrderIn(order_id="1", cents=5), id="o-1")
        assert_type(made, HarnessInstance[str])
        assert_type(made.result(), str)
        assert_type(made.statuses(), dict[str, str])
        assert_type(harness.create("order", {"order_id": "1"}), HarnessInstance[Any])
        assert_type(harness.mocks.mock_step_result("charge", None), Mock)
        assert_type(harness.faults.hold("charge"), Barrier)
        assert_type(harness.clock.now, datetime)
        harness.advance(timedelta(days=3))
    scenario = define_scenario("one", workflows=[order], steps=[create(order, lambda ctx: ctx["params"], id="o-2")])
    assert_type(scenario, Scenario)
    assert_type(run_scenario(scenario, seed=3), Context)


def pages(page: Page[str]) -> Page[object]:
    return page
