"""task_always_eager: no broker, no worker; what a call wakes runs before the call returns, one run after the other."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import create_engine, make_url
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from celery_durable import Durable, Step, StepTx, WorkflowEvent
from celery_durable.errors import StoreUnavailable
from celery_durable.store.engine.time_limits import limit_database_time
from tests.smoke.fault_proxy import FaultProxy, Mode
from tests.support.celery_apps import MakeApp
from tests.support.embedded import worker


@pytest.fixture
def app(make_app: MakeApp) -> Celery:
    return make_app(broker_url="redis://127.0.0.1:1/0", task_always_eager=True, durable_grace_seconds=0.001)


def test_an_instance_has_ended_when_create_returns(durable: Durable) -> None:
    @durable.workflow
    def order(event: WorkflowEvent[int], step: Step) -> int:
        return step.do("double", lambda: event.payload * 2)

    assert order.create(21).status().output == 42


def test_a_run_has_its_own_time_if_the_request_that_creates_it_has_used_up_its_time(durable: Durable) -> None:
    with limit_database_time(60) as limit:

        @durable.workflow
        def order(event: WorkflowEvent[Any], step: Step) -> int:
            step.do("slow", lambda: setattr(limit, "until", 0.0))
            return step.do("next", lambda: 42)

        order.create(id="o-1")
    assert order.get("o-1").status().output == 42


def test_many_self_wakes_do_not_recurse(make_app: MakeApp) -> None:
    """Each pass ends after one step and wakes the next: nested calls would exceed Python's stack."""
    app = make_app(task_always_eager=True, durable_pass_seconds=1e-9)
    durable = Durable(app)
    passes = []

    @durable.workflow
    def long(event: WorkflowEvent[Any], step: Step) -> int:
        passes.append(1)
        return sum(step.do(f"step-{number}", lambda: 1) for number in range(80))

    assert long.create().status().output == 80
    assert len(passes) == 80


def test_an_event_is_answered_before_send_event_returns(durable: Durable) -> None:
    @durable.workflow
    def approval(event: WorkflowEvent[Any], step: Step) -> str:
        return step.wait_for_event("wait", "approval").payload

    instance = approval.create()
    assert instance.status().status == "waiting"
    instance.send_event("approval", "yes")
    assert instance.status().output == "yes"


def test_what_a_step_creates_runs_after_the_run_that_created_it(durable: Durable) -> None:
    told: list[str] = []

    @durable.workflow
    def child(event: WorkflowEvent[str], step: Step) -> None:
        told.append(f"child {event.payload}")

    @durable.workflow
    def parent(event: WorkflowEvent[Any], step: Step) -> None:
        def both(tx: StepTx) -> None:
            tx.create(child, "a")
            tx.create(child, "b")

        step.do("both", both)
        told.append("parent ends")

    parent.create()
    assert told == ["parent ends", "child a", "child b"]


def test_a_workflow_may_create_instances_by_their_handle(durable: Durable) -> None:
    told: list[str] = []

    @durable.workflow
    def child(event: WorkflowEvent[Any], step: Step) -> None:
        told.append("child")

    @durable.workflow
    def parent(event: WorkflowEvent[Any], step: Step) -> None:
        step.do("create", lambda: child.create(id="c-1").id)
        told.append("parent ends")

    parent.create()
    assert told == ["parent ends", "child"]


def test_a_session_runs_what_it_created_after_its_commit(durable: Durable, store_url: str) -> None:
    @durable.workflow
    def order(event: WorkflowEvent[Any], step: Step) -> int:
        return step.do("one", lambda: 1)

    engine = create_engine(store_url)
    with Session(engine) as session:
        instance = order.create(session=session)
        session.commit()
    engine.dispose()
    assert instance.status().output == 1


def test_a_sleep_ends_with_a_sweep(durable: Durable) -> None:
    @durable.workflow
    def nap(event: WorkflowEvent[Any], step: Step) -> str:
        step.sleep("nap", 0.01)
        return "rested"

    instance = nap.create()
    while not instance.status().status.is_terminal:
        durable.internals.runtime.sleep(max(0.0, durable.internals.sweeper.seconds_to_next()))
        durable.internals.sweeper.sweep()
    assert instance.status().output == "rested"


def test_each_thread_has_its_own_queue_of_runs(durable: Durable) -> None:
    inside, go_on = threading.Event(), threading.Event()

    @durable.workflow
    def order(event: WorkflowEvent[bool], step: Step) -> bool:
        if event.payload:
            inside.set()
            assert go_on.wait(20)
        return event.payload

    slow = threading.Thread(target=order.create, args=(True,))
    slow.start()
    try:
        assert inside.wait(20)
        assert order.create(False).status().output is False
    finally:
        go_on.set()
        slow.join(20)


def test_a_worker_that_stopped_before_in_this_process_stops_nothing(make_app: MakeApp) -> None:
    app = make_app()
    durable = Durable(app)

    @durable.workflow
    def order(event: WorkflowEvent[Any], step: Step) -> int:
        return step.do("one", lambda: 1)

    with worker(app):
        pass
    assert durable.internals.stop_flag.is_set()
    app.conf.task_always_eager = True
    assert order.create().status().output == 1


@pytest.mark.slow  # a pass waits for its database for 20 s
@pytest.mark.parametrize("database", [pytest.param("postgresql", marks=pytest.mark.gate), "mariadb"], indirect=True)
def test_an_outage_of_the_database_reaches_the_caller(make_app: MakeApp, store_url: str) -> None:
    url = make_url(store_url)
    proxy = FaultProxy((url.host or "127.0.0.1", url.port or 0))
    through = url.set(host="127.0.0.1", port=proxy.port).render_as_string(hide_password=False)
    app = make_app(durable_database_url=through, task_always_eager=True, task_eager_propagates=True)
    durable = Durable(app)

    @durable.workflow
    def order(event: WorkflowEvent[Any], step: Step) -> None:
        proxy.set(Mode.REFUSE)
        step.do("one", lambda: 1)

    try:
        with pytest.raises(StoreUnavailable) as raised:
            order.create()
        assert isinstance(raised.value.__cause__, OperationalError)
    finally:
        proxy.close()
