"""Traces, as the real OpenTelemetry SDK records them."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from celery import Celery
from celery.signals import before_task_publish
from opentelemetry import trace
from opentelemetry.trace import SpanKind, StatusCode

from celery_durable import (
    Durable,
    Step,
    StepTx,
    WorkflowEvent,
)
from celery_durable.contrib import otel
from celery_durable.testing import DurableHarness
from tests.contrib.traces import Traces, attributes
from tests.support.embedded import messages, until, worker

on_sqlite = pytest.mark.parametrize("database", ["sqlite"], indirect=True)


def test_passes_and_steps_have_spans(traces: Traces) -> None:
    def charge(tx: StepTx) -> str:
        with traces.tracer.start_as_current_span("call the bank"):
            if tx.attempt == 1:
                raise OSError("the bank is closed")
        return "paid"

    def order(event: WorkflowEvent[Any], step: Step) -> str:
        return step.do("charge", charge)

    with DurableHarness([order]) as harness:
        harness.create(order, id="o-1")
        harness.advance("10 seconds")
    a_pass = ["durable.pass order", *(f"durable.pass order > {rest}" for rest in (
        "durable.step charge", "durable.step charge > call the bank",
    ))]  # fmt: skip
    assert traces.tree == a_pass * 2
    run = {"workflow": "order", "instance_id": "o-1", "run_number": 1}
    first, second = traces.named("durable.pass order")
    assert attributes(first) == {**run, "latency": 0.0, "outcome": "waiting"}
    assert attributes(second) == {**run, "latency": 0.0, "outcome": "complete"}
    assert first.kind is SpanKind.CONSUMER
    assert first.context.trace_id != second.context.trace_id  # nobody's trace reached the second
    failed, paid = traces.named("durable.step charge")
    assert attributes(failed) == {**run, "step": "charge", "attempt": 1}
    assert (failed.status.status_code, failed.status.description) == (StatusCode.ERROR, "OSError")
    assert [event.name for event in failed.events] == ["exception"]
    assert paid.status.status_code is StatusCode.UNSET


def test_what_others_do_is_in_no_span_of_a_step(traces: Traces) -> None:
    def order(event: WorkflowEvent[Any], step: Step) -> int:
        return step.task("check", "stock.check") + step.do("count", int)

    with DurableHarness([order]) as harness:
        harness.mocks.mock_step_result("check", 7)
        harness.create(order)
        harness.run_until_idle()
    assert [span.name for span in traces.spans if span.name.startswith("durable.step")] == ["durable.step count"]
    passes = [attributes(span)["outcome"].partition(" ")[0] for span in traces.named("durable.pass order")]
    assert passes == ["waiting", "complete"]


def test_a_run_that_ends_by_an_error_shows_in_its_pass(traces: Traces) -> None:
    def failing(event: WorkflowEvent[Any], step: Step) -> None:
        raise LookupError("no such order")

    with DurableHarness([failing]) as harness:
        harness.create(failing)
        harness.run_until_idle()
    (span,) = traces.spans
    assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, "LookupError")
    assert attributes(span)["outcome"] == "errored"


def test_a_worker_that_was_superseded_is_no_error(traces: Traces) -> None:
    actions: list[Any] = []

    def slow(event: WorkflowEvent[Any], step: Step) -> None:
        step.do("slow", lambda: actions.pop()() and None)

    with DurableHarness([slow]) as harness:
        instance = harness.create(slow)
        actions.append(instance.terminate)
        harness.run_until_idle()
    (span,) = traces.named("durable.pass slow")
    assert attributes(span)["outcome"] == "Superseded"
    assert span.status.status_code is StatusCode.UNSET


def test_after_disconnecting_there_are_no_spans() -> None:
    traces = Traces()
    tracing = otel.instrument(traces.provider)
    tracing.disconnect()

    def hello(event: WorkflowEvent[Any], step: Step) -> str:
        return step.do("greet", lambda: "hello")

    with DurableHarness([hello]) as harness:
        harness.create(hello)
        harness.run_until_idle()
    assert traces.spans == []


@on_sqlite
def test_the_trace_of_a_request_reaches_the_worker(traces: Traces, app: Celery, durable: Durable) -> None:
    """Through the headers of the message; parallel branches run on threads of their own."""
    seen: dict[str, int] = {}

    def note(name: str) -> None:
        with traces.tracer.start_as_current_span(f"in {name}"):
            seen[name] = threading.get_ident()

    @durable.workflow
    def order(event: WorkflowEvent[Any], step: Step) -> None:
        step.gather(step.submit("a", note, "a"), step.submit("b", note, "b"))
        step.wait_for_event("approval", "approved")

    with worker(app):
        with traces.tracer.start_as_current_span("POST /orders"):
            instance = order.create(id="o-1")
        until(lambda: instance.status().status == "waiting")
        with traces.tracer.start_as_current_span("POST /approvals"):
            instance.send_event("approved")
        instance.result("20 seconds")
        until(lambda: len(traces.named("durable.pass order")) == 2)
    began = "POST /orders > durable.pass order"
    assert sorted(traces.tree) == [
        "POST /approvals",
        "POST /approvals > durable.pass order",
        "POST /orders",
        began,
        f"{began} > durable.step a",
        f"{began} > durable.step a > in a",
        f"{began} > durable.step b",
        f"{began} > durable.step b > in b",
    ]
    assert threading.get_ident() not in seen.values()


@on_sqlite
def test_the_message_itself_stays_what_it_was(traces: Traces, app: Celery, durable: Durable) -> None:
    @durable.workflow
    def order(event: WorkflowEvent[Any], step: Step) -> None: ...

    order.create(id="o-1")
    with traces.tracer.start_as_current_span("POST /orders") as span:
        order.create(id="o-2")
    without, with_ = messages(app)
    assert with_.payload[0] == ["order", "o-2", 1]
    assert with_.payload[1:] == without.payload[1:]
    assert set(with_.headers) - set(without.headers) == {"traceparent"}
    assert trace.format_trace_id(span.get_span_context().trace_id) in with_.headers["traceparent"]


@on_sqlite
def test_what_another_instrumentation_gave_the_message_stays(traces: Traces, app: Celery, durable: Durable) -> None:
    @durable.workflow
    def order(event: WorkflowEvent[Any], step: Step) -> None: ...

    carrier = {"traceparent": "theirs"}
    with traces.tracer.start_as_current_span("POST /orders"):
        before_task_publish.send(sender="celery_durable.advance", headers=carrier)
        assert carrier == {"traceparent": "theirs"}
        before_task_publish.send(sender="another.task", headers=(other := {}))
    assert other == {}
