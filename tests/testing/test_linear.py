"""Linear workflows in a harness: driven like others, and safe wherever their runners die."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa
from celery import Celery
from fastapi.testclient import TestClient

from celery_durable import (
    Completed,
    Durable,
    LinearContext,
    LinearStep,
    LinearWorkflow,
    OutboundEvent,
    TaskType,
    Waiting,
)
from celery_durable.errors import DefinitionInvalid, WorkflowNameTaken
from celery_durable.http import asgi
from celery_durable.testing import DurableHarness, assert_crash_safe

rows = sa.MetaData()
books = sa.Table(
    "books", rows, sa.Column("id", sa.Integer, primary_key=True), sa.Column("step", sa.String(50), nullable=False)
)

parcel = LinearWorkflow(
    "parcel",
    version=3,
    steps=[
        LinearStep("PACK", max_attempts=None),
        LinearStep("PAY", max_attempts=None),
        LinearStep("SHIP", max_attempts=None),
    ],
)


@parcel.handler("PACK", "SHIP")
def book(ctx: LinearContext) -> Completed:
    ctx.tx.session.execute(sa.insert(books).values(step=ctx.step))
    return Completed({"booked": ctx.step, "paid": ctx.results.get("PAY")})


@parcel.handler("PAY")
def pay(ctx: LinearContext) -> Completed | Waiting:
    ctx.tx.mutate(lambda session: session.execute(sa.insert(books).values(step=f"PAY {ctx.task_type}")))
    if ctx.task_type is TaskType.RUN:
        return Waiting("paid", "1 day", outbound_events=[("PaymentRequested", ctx.params)])
    return Completed(None if ctx.event is None else ctx.event.payload)


def test_a_linear_workflow_is_driven_like_others() -> None:
    asked: list[OutboundEvent] = []
    with DurableHarness([parcel]) as harness:
        harness.create_tables(rows)
        harness.outbound("PaymentRequested")(asked.append)
        instance = parcel.create({"cents": 5}, id="p-1")  # the module's own handle
        harness.run_until_idle()
        running = harness.instance(parcel, "p-1")
        assert running.statuses() == {"0": "DONE", "1": "WAITING", "2": "PENDING"}
        assert [(event.payload, event.instance_id) for event in asked] == [({"cents": 5}, "p-1")]
        assert [message.name for message in harness.drain_outbox()] == ["PaymentRequested"]
        assert running.explain().sentence == ('Waits for event "paid" at step "PAY"; times out in 1 d.')
        harness.advance("1 day")
        assert instance.result() == {"booked": "SHIP", "paid": None}


def test_a_mocked_event_answers_each_wait_of_a_step() -> None:
    bids, asked = LinearWorkflow("bids", version=1, steps=[LinearStep("ASK", max_attempts=None)]), list[Any]()

    @bids.handler("ASK")
    def ask(ctx: LinearContext) -> Completed | Waiting:
        asked.append(ctx.event)
        return Completed("sold") if len(asked) == 4 else Waiting("bid", "1 day")

    with DurableHarness([bids]) as harness:
        bid = harness.mocks.mock_event("bid")
        instance = harness.create(bids)
        harness.run_until_idle()
        assert (instance.result(), bid.calls) == ("sold", 3)


@pytest.mark.gate
def test_a_linear_workflow_is_crash_safe() -> None:
    report = assert_crash_safe(parcel, {"cents": 5}, events=[("paid", "cash")], side_effects=rows, schedules=40)
    assert report.crashes > 10


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_the_http_api_shows_a_linear_instance(store_url: str) -> None:
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.conf.durable_database_url = store_url
    durable = Durable(app)
    durable.internals.registry.add(parcel.definition)
    rows.create_all(durable.internals.store.engine)
    api = TestClient(asgi(durable, allow_anonymous=True, tick=True))
    assert api.post("/workflows/parcel/instances", json={"id": "p-1", "params": {}}).status_code == 201
    durable.tick()
    shown = api.get("/workflows/parcel/instances/p-1").json()
    assert shown["details"]["status"] == "waiting"
    assert (shown["meta"]["currentStep"]["name"], shown["meta"]["currentStep"]["status"]) == ("PAY", "waiting")
    steps = api.get("/workflows/parcel/instances/p-1/history").json()["steps"]
    assert [(step["name"], step["type"], step["status"]) for step in steps] == [
        ("PACK", "linear", "done"),
        ("PAY", "linear", "waiting"),
        ("SHIP", "linear", "planned"),
    ]
    durable.close()
    app.close()


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_the_http_api_goes_on_with_a_linear_instance_from_its_step(store_url: str) -> None:
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.conf.durable_database_url = store_url
    durable = Durable(app)
    durable.internals.registry.add(parcel.definition)
    rows.create_all(durable.internals.store.engine)
    api = TestClient(asgi(durable, allow_anonymous=True, tick=True))
    path = "/workflows/parcel/instances/p-1"
    api.post("/workflows/parcel/instances", json={"id": "p-1", "params": {}})
    durable.tick()
    early = api.post(f"{path}/rewind", json={"step": "SHIP"})
    assert (early.status_code, early.json()["code"]) == (400, "VALUE_REFUSED")
    settled = api.post(f"{path}/set-result", json={"step": "PAY", "result": "cash", "by": "eve"})
    assert (settled.status_code, settled.json()) == (200, {"ok": True, "runNumber": 1})
    durable.tick()
    assert api.get(path).json()["details"] == {"status": "complete", "output": {"booked": "SHIP", "paid": "cash"}}
    [record] = api.get(f"{path}/history", params={"includeRun": True}).json()["run"]["audit"]
    assert (record["by"], record["before"]) == ("eve", {"status": "waiting", "attempts": 0})
    assert api.post(f"{path}/retry").json()["code"] == "INSTANCE_NOT_ERRORED"
    assert api.post(f"{path}/rewind", json={"step": "SHIP"}).json() == {"ok": True, "runNumber": 2}
    durable.tick()
    assert api.get(path).json()["details"]["status"] == "complete"
    durable.close()
    app.close()


def test_a_linear_workflow_is_no_function() -> None:
    call: Any = parcel
    with pytest.raises(DefinitionInvalid) as refused:
        call(None, None)
    assert str(refused.value) == "Workflow 'parcel' is linear: call one of its handlers instead."


def test_a_name_that_another_module_has_taken_is_refused() -> None:
    namespace: dict[str, Any] = {"__name__": "elsewhere", "LinearWorkflow": LinearWorkflow, "LinearStep": LinearStep}
    with pytest.raises(WorkflowNameTaken) as refused:
        exec("LinearWorkflow('parcel', 1, [LinearStep('PACK')])", namespace)  # as another module would
    assert str(refused.value) == (
        "Workflow name 'parcel' is already taken by tests.testing.test_linear:parcel; elsewhere:parcel needs another: "
        "@durable_workflow(name=...)."
    )
