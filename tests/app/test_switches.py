"""The switches: new instances are refused, and passes stop, while a setting says so."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from celery import Celery
from starlette.testclient import TestClient

from celery_durable import CreateOptions, Durable, Step, WorkflowEvent
from celery_durable.errors import ConfigInvalid, CreateDisabled
from celery_durable.http import asgi
from celery_durable.model import REFERENCE_HEADER, TaskReference
from celery_durable.tasks import ADVANCE
from tests.cli.installations import findings
from tests.support.celery_apps import MakeApp
from tests.support.embedded import messages, until, worker


class Switch:
    """A feature flag of the application."""

    def __init__(self) -> None:
        self.is_on = True

    def __call__(self) -> bool:
        return self.is_on


class Shop:
    """An application whose workflow does two steps and then waits for an approval."""

    def __init__(self, app: Celery) -> None:
        self.durable, self.ran = Durable(app), list[str]()
        self.on_first = lambda: None

        @self.durable.workflow(name="ship")
        def ship(event: WorkflowEvent[Any], step: Step) -> None:
            step.do("ship", self.ran.append, "ship")

        @self.durable.workflow(name="order")
        def order(event: WorkflowEvent[Any], step: Step) -> None:
            step.do("first", self._first)
            step.do("second", self.ran.append, "second")
            step.wait_for_event("approval", "approved", timeout="1 day")
            step.child("child", ship)

        self.order, self.ship = order, ship

    def _first(self) -> None:
        self.ran.append("first")
        self.on_first()

    def tick_all(self) -> int:
        return sum(iter(self.durable.tick, 0))


@pytest.fixture
def switch() -> Switch:
    return Switch()


# --- new instances ------------------------------------------------------------------------------


def test_new_instances_are_refused_and_existing_ones_continue(make_app: MakeApp, switch: Switch) -> None:
    shop = Shop(make_app(durable_create_enabled=switch))
    order = shop.order
    instance = order.create(id="o-1")
    switch.is_on = False
    for create in (
        order.create,
        lambda: order.create(id="o-1", if_exists="return"),
        lambda: order.create_batch([CreateOptions("o-2")]),
        lambda: order.restart_or_create(id="o-2"),
        lambda: instance.fork("first"),
    ):
        with pytest.raises(CreateDisabled) as refused:
            create()
        assert str(refused.value) == (
            "New instances are refused while durable_create_enabled is off. Existing instances continue. "
            "Turn the setting on, or try again later."
        )
    instance.send_event("approved")
    shop.tick_all()
    assert instance.status().status == "complete"
    assert (len(order.list().items), len(shop.ship.list().items)) == (1, 1)  # a workflow may create its child
    switch.is_on = True
    assert order.create(id="o-2").status().status == "active"


def test_the_api_refuses_new_instances_with_a_code(make_app: MakeApp) -> None:
    shop = Shop(make_app(durable_create_enabled=False))
    api = TestClient(asgi(shop.durable, allow_anonymous=True))
    answer = api.post("/workflows/order/instances", json={"id": "o-1"})
    assert (answer.status_code, answer.json()["code"]) == (409, "CREATE_DISABLED")


# --- passes -------------------------------------------------------------------------------------


def test_a_pass_ends_at_the_next_boundary_and_nothing_is_lost(make_app: MakeApp, switch: Switch) -> None:
    app = make_app(durable_execution_enabled=switch)
    shop = Shop(app)
    instance = shop.order.create(id="o-1")
    shop.on_first = lambda: setattr(switch, "is_on", False)
    with worker(app, queues=[app.conf.durable_queue]):
        until(lambda: instance.explain().code == "EXECUTION_DISABLED")
    other = shop.order.create(id="o-2")
    declined = "noop: this worker takes no runs now, and leaves the run to a later sweep"
    assert app.tasks[ADVANCE].apply(("order", "o-2", 1)).get() == declined
    instance.send_event("approved")
    assert (shop.durable.tick(), shop.durable.internals.sweeper.sweep()) == (0, 0)
    assert (shop.ran, instance.status().status) == (["first"], "active")
    assert other.explain().sentence.endswith(
        ", but workers take no runs, because durable_execution_enabled is off. It continues when the setting is on."
    )
    shop.on_first, switch.is_on = lambda: None, True
    with worker(app, queues=[app.conf.durable_queue]):
        until(lambda: (instance.status().status, other.status().status) == ("complete", "waiting"))
    assert sorted(shop.ran) == ["first", "first", "second", "second", "ship"]


def test_a_task_whose_process_has_died_is_sent_again_when_execution_is_on(make_app: MakeApp, switch: Switch) -> None:
    app = make_app(durable_execution_enabled=switch)
    durable = Durable(app)

    @app.task(name="print", shared=False)
    def print_page() -> None:
        """Never run here."""

    @durable.workflow
    def page(event: WorkflowEvent[None], step: Step) -> None:
        step.task("print", print_page.s())

    page.create(id="p-1")
    app.tasks[ADVANCE].apply(("page", "p-1", 1))
    (sent,) = messages(app, app.conf.task_default_queue)
    reference = TaskReference.read(sent.headers[REFERENCE_HEADER])
    switch.is_on = False
    assert durable.internals.operations.answers.report_lost([(reference, None)], why="its process died") == 1
    assert durable.internals.sweeper.sweep() == 0
    assert messages(app, app.conf.task_default_queue) == []
    switch.is_on = True
    until(durable.internals.sweeper.sweep)
    (again,) = messages(app, app.conf.task_default_queue)
    assert again.headers["id"] == sent.headers["id"]


def test_a_map_sends_no_further_items(make_app: MakeApp, switch: Switch) -> None:
    """The task that has been sent runs, and its result is stored."""
    app = make_app(durable_execution_enabled=switch)
    durable, ran = Durable(app), list[int]()

    @app.task(name="print", shared=False)
    def print_page(page: int) -> int:
        ran.append(page)
        if page == 0:
            switch.is_on = False
        return page

    @durable.workflow
    def book(event: WorkflowEvent[Any], step: Step) -> list[int]:
        return step.map("print", print_page.s(), range(3), max_concurrency=1)

    instance = book.create(id="b-1")
    with worker(app, queues=[app.conf.durable_queue, app.conf.task_default_queue]):
        until(lambda: instance.explain().code == "EXECUTION_DISABLED")
        until(lambda: instance.history().steps[0].items.done == 1)
        assert (ran, durable.internals.sweeper.sweep()) == ([0], 0)
        switch.is_on = True
        until(lambda: instance.status().output == [0, 1, 2])
    assert ran == [0, 1, 2]


def test_doctor_names_what_is_switched_off(make_app: MakeApp) -> None:
    app = make_app(durable_create_enabled=False, durable_execution_enabled=False)
    Durable(app)
    assert findings(app)["switches"] == [
        ("WARN", "durable_create_enabled is off: new instances are refused.", "Turn it on."),
        (
            "FAIL",
            "durable_execution_enabled is off: workers take no runs, and dispatchers send nothing.",
            "Turn it on.",
        ),
    ]


def test_a_function_that_fails_counts_as_on(make_app: MakeApp, caplog: pytest.LogCaptureFixture) -> None:
    shop = Shop(make_app(durable_create_enabled=lambda: 1 / 0))
    with caplog.at_level(logging.WARNING):
        shop.order.create()
    assert "The function durable_create_enabled failed, so the setting counts as on" in caplog.text


def test_a_switch_is_true_or_false_or_a_function(make_app: MakeApp) -> None:
    durable = Durable(make_app(durable_execution_enabled="no"))
    with pytest.raises(ConfigInvalid) as refused:
        _ = durable.internals.settings
    assert str(refused.value) == (
        "Setting durable_execution_enabled='no' cannot be used: use True, False, or a function without arguments that "
        "returns one of them"
    )
