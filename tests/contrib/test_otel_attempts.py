"""The spans of attempts: which call they are of, how they end and when, as the real OpenTelemetry SDK records them."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from typing import Any

import pytest
from celery import Celery
from opentelemetry.trace import StatusCode

from celery_durable import (
    Completed,
    Durable,
    LinearContext,
    LinearStep,
    LinearWorkflow,
    Step,
    StepConfig,
    StepFailed,
    StepTx,
    Waiting,
    WorkflowEvent,
    durable_workflow,
)
from celery_durable.contrib.log_context import WorkflowContext
from celery_durable.testing import DurableHarness
from tests.contrib.traces import Traces, attributes, end_of, exceptions, parent_of, start_of
from tests.support.attempts import LOST
from tests.support.embedded import until, worker

on_sqlite = pytest.mark.parametrize("database", ["sqlite"], indirect=True)


@durable_workflow(name="missing")
def missing(event: WorkflowEvent[Any], step: Step) -> None: ...


def reach_nobody(tx: StepTx) -> None:
    tx.send_event(missing, "nobody", "paid")


@pytest.mark.parametrize(
    ("outcome", "error"),
    [(lambda tx: {1, object()}, "NotSerializable"), (reach_nobody, "InstanceNotFound")],
    ids=["its result is no JSON", "its commit is refused"],
)
def test_an_attempt_that_fails_after_its_body_shows_in_its_span(traces: Traces, outcome: Any, error: str) -> None:
    def charge(tx: StepTx) -> Any:
        return outcome(tx)

    def shop(event: WorkflowEvent[Any], step: Step) -> None:
        step.do("charge", StepConfig(retries=0), charge)
        step.sleep("rest", "1 day")

    with DurableHarness([shop, missing]) as harness:
        harness.create(shop)
        harness.run_until_idle()
    (attempt,), (run,) = traces.named("durable.step charge"), traces.named("durable.pass shop")
    assert (attempt.status.status_code, attempt.status.description) == (StatusCode.ERROR, error)
    assert [name.rpartition(".")[2] for name in exceptions(attempt)] == [error]
    assert (run.status.status_code, run.status.description) == (StatusCode.ERROR, error)
    assert [name.rpartition(".")[2] for name in exceptions(run)] == ["StepFailed"]


def test_the_exception_of_a_body_is_recorded_once(traces: Traces) -> None:
    def fail() -> None:
        raise OSError("the bank is closed")

    def order(event: WorkflowEvent[Any], step: Step) -> None:
        step.gather(step.submit("pay", StepConfig(retries=0), fail), step.submit("count", int))

    with DurableHarness([order]) as harness:
        harness.create(order)
        harness.run_until_idle()
    (failed,), (counted,) = traces.named("durable.step pay"), traces.named("durable.step count")
    assert exceptions(failed) == ["OSError"]
    assert counted.status.status_code is StatusCode.UNSET


@on_sqlite
@pytest.mark.parametrize("is_branch", [False, True])
def test_an_attempt_that_times_out_shows_in_its_span(
    traces: Traces, app: Celery, durable: Durable, is_branch: bool
) -> None:
    """Its span ends then, also if its body goes on."""
    released = threading.Event()

    @durable.workflow
    def order(event: WorkflowEvent[Any], step: Step) -> str:
        config = StepConfig(timeout=0.2, retries=0)
        try:
            if is_branch:
                step.gather(step.submit("hang", config, released.wait, 60))
            else:
                step.do("hang", config, released.wait, 60)
        except StepFailed as exc:
            return exc.error_name
        return "in time"

    with worker(app):
        assert order.create(id="o-1").result("20 seconds") == "StepTimeout"
        until(lambda: traces.named("durable.pass order"))
        (attempt,) = traces.named("durable.step hang")
        released.set()
    assert (attempt.status.status_code, attempt.status.description) == (StatusCode.ERROR, "StepTimeout")
    assert len(traces.named("durable.step hang")) == 1


def test_calls_that_share_a_name_have_the_outcomes_of_their_own(traces: Traces) -> None:
    """Also if all of them fail with the same error."""
    full = ValueError("full")

    def book(item: int) -> int:
        with traces.tracer.start_as_current_span(f"item {item}"):
            if item % 2:
                raise full
        return item

    def order(event: WorkflowEvent[Any], step: Step) -> str:
        config = StepConfig(retries=0, repeat=True)
        branches = [step.submit("book", config, book, item) for item in range(4)]
        try:
            step.gather(*branches)
        except StepFailed:
            return "full"
        return "booked"

    with DurableHarness([order]) as harness:
        instance = harness.create(order)
        harness.run_until_idle()
        assert instance.result() == "full"
    spans = {span.context.span_id: span for span in traces.named("durable.step book")}
    of_item = {item: spans[parent_of(traces.named(f"item {item}")[0])] for item in range(4)}
    codes = {item: span.status.status_code for item, span in of_item.items()}
    assert codes == {0: StatusCode.UNSET, 1: StatusCode.ERROR, 2: StatusCode.UNSET, 3: StatusCode.ERROR}
    assert {item: exceptions(span) for item, span in of_item.items()} == {
        0: [],
        1: ["ValueError"],
        2: [],
        3: ["ValueError"],
    }
    assert len(spans) == 4


def test_a_body_that_runs_again_has_a_span_for_each_call(traces: Traces) -> None:
    """The database lost the transaction of the first call, which has no outcome. The last call fails."""
    calls: list[int] = []
    ended_at: list[int] = []

    def book(tx: StepTx) -> str:
        tx.session  # noqa: B018  # opens a transaction
        calls.append(tx.attempt)
        ended_at.append(time.time_ns())
        if len(calls) == 1:
            tx.mutate(lose)
            return "booked"
        raise OSError("the hotel is closed")

    def lose(session: Any) -> None:
        ended_at.append(time.time_ns())
        raise LOST

    def order(event: WorkflowEvent[Any], step: Step) -> None:
        step.do("book", StepConfig(retries=0), book)

    with DurableHarness([order]) as harness:
        harness.create(order)
        harness.run_until_idle()
    assert calls == [1, 1]
    lost, failed = traces.named("durable.step book")
    assert (lost.status.status_code, exceptions(lost)) == (StatusCode.UNSET, [])
    assert (failed.status.status_code, exceptions(failed)) == (StatusCode.ERROR, ["OSError"])
    body_ended, commit_lost, _ = ended_at
    assert body_ended <= end_of(lost) <= commit_lost
    assert end_of(lost) <= start_of(failed)


def test_a_linear_step_that_waits_ends_the_span_of_its_call(traces: Traces) -> None:
    """The event is there already, so the same attempt calls its handler again in the same pass."""
    shipping = LinearWorkflow("shipping", 1, [LinearStep("PAY"), LinearStep("SHIP")])
    waits = []

    @shipping.handler("PAY")
    def pay(ctx: LinearContext) -> Waiting | Completed:
        waits.append(time.time_ns())
        return Waiting("paid", "1 hour") if ctx.event is None else Completed()

    @shipping.handler("SHIP")
    def ship(ctx: LinearContext) -> Completed:
        return Completed()

    with DurableHarness([shipping]) as harness:
        harness.create(shipping).send_event("paid")
        harness.run_until_idle()
    (run,) = traces.named("durable.pass shipping")
    first, second = traces.named("durable.step PAY")
    (shipped,) = traces.named("durable.step SHIP")
    assert attributes(first) == attributes(second)
    assert waits[0] <= end_of(first) <= start_of(second) <= waits[1] <= end_of(second) <= start_of(shipped)
    assert end_of(shipped) <= end_of(run)


@on_sqlite
def test_what_an_async_function_traces_and_logs_belongs_to_its_step(
    traces: Traces, app: Celery, durable: Durable
) -> None:
    logged: list[tuple[str, str, int]] = []

    async def ask(number: int) -> int:
        record = logging.makeLogRecord({})
        await asyncio.sleep(0)
        with traces.tracer.start_as_current_span("request"):
            await asyncio.create_task(asyncio.sleep(0))
        WorkflowContext().filter(record)
        logged.append((vars(record)["workflow"], vars(record)["step"], vars(record)["attempt"]))
        return number

    @durable.workflow(name="order")
    def order(event: WorkflowEvent[Any], step: Step) -> list[int]:
        return [step.do("ask 0", ask, 0), *step.gather(*(step.submit(f"ask {n}", ask, n) for n in (1, 2)))]

    with worker(app):
        assert order.create().result("20 seconds") == [0, 1, 2]
        until(lambda: traces.named("durable.pass order"))
    requests = {f"durable.pass order > durable.step ask {n} > request" for n in range(3)}
    assert {each for each in traces.tree if each.endswith("request")} == requests
    assert sorted(logged) == [("order", f"ask {n}", 1) for n in range(3)]
