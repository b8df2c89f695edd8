"""The outbox over Celery: tasks arrive as if their author had sent them, outbound events at their handler."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import sqlalchemy as sa
from celery import Celery
from celery.local import PromiseProxy

from celery_durable import Durable, OutboundEvent, Retries, Step, StepTx, WorkflowEvent
from celery_durable.errors import DefinitionInvalid
from tests.support.celery_apps import MakeApp
from tests.support.embedded import messages, until, worker


class Shop:
    """An application with a task, an outbound event and a workflow that sends both."""

    def __init__(self, app: Celery) -> None:
        self.app, self.durable = app, Durable(app)
        self.mailed: list[Any] = []
        self.shipped: list[OutboundEvent] = []

        @app.task(name="mail", bind=True, shared=False)
        def mail(task: Any, order: int, *, urgent: bool) -> None:
            self.mailed.append((task.request.id, task.request.delivery_info["routing_key"], order, urgent))

        @self.durable.outbound("OrderShipped")
        def shipped(event: OutboundEvent) -> None:
            self.shipped.append(event)

        def announce(tx: StepTx, order: int) -> list[str]:
            queue = self.app.conf.durable_queue
            sent = tx.send_task(mail.s(order, urgent=True).set(queue=queue))
            return [sent, tx.send_task("elsewhere", order), tx.send_outbound("OrderShipped", {"order": order})]

        @self.durable.workflow(name="order")
        def order(event: WorkflowEvent[int], step: Step) -> list[str]:
            return step.do(announce, event.payload)

        self.order, self.ours = order, shipped

    def left(self) -> int:
        count = sa.select(sa.func.count()).select_from(self.durable.internals.store.tables.outbox)
        return self.durable.internals.store.read(lambda tx: tx.execute(count).scalar_one())


def test_a_worker_gets_what_a_step_sent(app: Celery) -> None:
    shop = Shop(app)
    with worker(app, queues=[app.conf.durable_queue]):
        instance = shop.order.create(7)
        ids = instance.result(timeout=20)
        until(lambda: shop.mailed and shop.shipped and not shop.left())
    assert shop.mailed == [(ids[0], app.conf.durable_queue, 7, True)]
    assert shop.shipped == [OutboundEvent("OrderShipped", {"order": 7}, ids[2], "order", instance.id, 1, 1)]
    (unknown,) = messages(app, app.conf.task_default_queue)  # the app's own routes count
    assert (unknown.headers["task"], unknown.headers["id"]) == ("elsewhere", ids[1])


def test_run_eagerly_a_task_runs_when_its_step_is_recorded(make_app: MakeApp) -> None:
    shop = Shop(make_app(broker_url="redis://127.0.0.1:1/0", task_always_eager=True))
    instance = shop.order.create(7)
    assert instance.status().status == "complete"
    assert [order for _, _, order, _ in shop.mailed] == [7]
    assert [event.payload for event in shop.shipped] == [{"order": 7}]
    assert shop.left() == 0


def telling(shop: Shop) -> list[Any]:
    """Workflows whose ends a task is told; the task takes a list down."""
    told: list[Any] = []

    @shop.app.task(name="tell", bind=True, shared=False)
    def tell(task: Any, ending: dict[str, Any]) -> None:
        told.append((task.request.id, ending["instanceId"], ending["status"], ending["output"] or ending["error"]))

    @shop.durable.workflow(name="quote", on_complete=tell, on_failure="tell")
    def quote(event: WorkflowEvent[int], step: Step) -> int:
        return 100 // event.payload

    return told


def test_a_worker_runs_the_task_that_is_told_the_end_of_a_run(app: Celery) -> None:
    queue = app.conf.durable_queue
    shop = Shop(app)
    app.conf.task_routes = {"tell": {"queue": queue}}
    told = telling(shop)
    with worker(app, queues=[queue]):
        for id_, divisor in (("q-1", 4), ("q-2", 0)):
            shop.durable.workflows["quote"].create(divisor, id=id_)
        until(lambda: len(told) == 2 and not shop.left())
    error = {"name": "ZeroDivisionError", "message": "integer division or modulo by zero"}
    assert sorted(each[1:] for each in told) == [("q-1", "complete", 25), ("q-2", "errored", error)]
    assert len({each[0] for each in told}) == 2


def test_run_eagerly_the_task_that_is_told_the_end_runs_after_it(make_app: MakeApp) -> None:
    shop = Shop(make_app(broker_url="redis://127.0.0.1:1/0", task_always_eager=True))
    told = telling(shop)
    assert shop.durable.workflows["quote"].create(4, id="q-1").result() == 25
    assert [each[1:] for each in told] == [("q-1", "complete", 25)]
    assert shop.left() == 0


def test_a_task_that_its_app_has_not_made_yet_is_not_made_for_a_definition(make_app: MakeApp) -> None:
    shop = Shop(make_app(broker_url="redis://127.0.0.1:1/0"))
    made = []
    lazy = PromiseProxy(lambda: made.append("made") or shop.app.tasks["mail"])
    flow = shop.durable.workflow(name="lazy", on_complete=lazy)(lambda event, step: None)
    assert made == []
    assert flow.definition.hooks.on_complete.name == "mail"


def test_a_task_that_cannot_be_sent_holds_up_no_other(app: Celery, caplog: pytest.LogCaptureFixture) -> None:
    shop = Shop(app)

    @shop.durable.workflow(name="careless")
    def careless(event: WorkflowEvent[int], step: Step) -> None:
        step.do("announce", lambda tx: [tx.send_task("mail"), tx.send_task("elsewhere", event.payload)])

    shop.durable.internals.operations.create.instance("careless", 7)
    assert shop.durable.tick()
    (sent,) = messages(app, app.conf.task_default_queue)
    assert (sent.headers["task"], shop.left()) == ("elsewhere", 1)
    assert "Task 'mail' (" in caplog.text
    assert "cannot be sent; its row stays in workflow_outbox: TypeError: " in caplog.text


def test_an_async_handler_is_awaited_and_retried(durable: Durable, app: Celery) -> None:
    calls: list[int] = []

    @durable.outbound("OrderShipped", retries=Retries(limit=1, delay=0))
    async def ship(event: OutboundEvent) -> None:
        await asyncio.sleep(0)
        calls.append(event.attempt)
        if event.attempt == 1:
            raise asyncio.CancelledError

    @durable.workflow
    def order(event: WorkflowEvent[None], step: Step) -> None:
        step.do("announce", lambda tx: tx.send_outbound("OrderShipped", 7))

    with worker(app):
        order.create().result(timeout=20)
        until(lambda: calls == [1, 2])


def test_two_handlers_of_one_event_are_refused(durable: Durable) -> None:
    @durable.outbound("OrderShipped")
    def first(event: OutboundEvent) -> None: ...

    assert durable.outbound("OrderShipped")(first) is first  # the module was imported again

    def second(event: OutboundEvent) -> None: ...

    with pytest.raises(DefinitionInvalid) as refused:
        durable.outbound("OrderShipped")(second)
    where = "tests.tasks.test_outbox.test_two_handlers_of_one_event_are_refused.<locals>"
    assert str(refused.value) == (
        f"Outbound event 'OrderShipped' has a handler already, {where}.first: call {where}.second from it, "
        "or send another event."
    )
