"""Handles: what an application holds, over the same engine, with a broker that is only memory."""

from __future__ import annotations

import itertools
import math
import threading
from datetime import datetime
from zoneinfo import ZoneInfo

import pytest
from celery import Celery

from celery_durable import (
    CreateOptions,
    Durable,
    ResultTimeout,
    Step,
    WorkflowEvent,
    WorkflowFailed,
)
from celery_durable.errors import ValueRefused
from celery_durable.model import RunRef, to_us
from celery_durable.runtime import Runtime
from celery_durable.testing import START


class Waiting(Runtime):
    """Time that goes by while a caller waits, and something that happens meanwhile."""

    def __init__(self) -> None:
        self.now_us, self.meanwhile = to_us(START), None

    def clock(self) -> int:
        return self.now_us

    def monotonic(self) -> float:
        return self.now_us / 1e6

    def sleep(self, seconds: float) -> None:
        if threading.current_thread() is not threading.main_thread():  # the lease keeper's
            super().sleep(seconds)
            return
        self.now_us += round(seconds * 1e6)
        if self.meanwhile is not None:
            self.meanwhile()


@pytest.fixture
def durable(store_url: str):
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.conf.durable_database_url = store_url
    durable = Durable(app, runtime=Waiting())
    yield durable
    durable.close()


@pytest.fixture
def order(durable: Durable):
    @durable.workflow
    def order(event: WorkflowEvent, step: Step) -> dict[str, int]:
        match event.payload:
            case "fail":
                raise ValueError("no")
            case "wait":
                step.wait_for_event("approval", "approval")
        return {"total": 5}

    return order


def advance(durable: Durable, instance) -> None:
    durable.internals.runner.advance(RunRef(instance.workflow.name, instance.id, 1), task_id="test", node="test")


def test_result_waits_for_the_end_and_returns_the_output(durable: Durable, order) -> None:
    instance = order.create()
    polls = []

    def meanwhile() -> None:
        polls.append(durable.internals.runtime.now_us)
        if len(polls) == 12:
            advance(durable, instance)

    durable.internals.runtime.meanwhile = meanwhile
    assert instance.result() == {"total": 5}
    assert len(polls) == 12
    gaps = [(b - a) / 1e6 for a, b in itertools.pairwise(polls)]
    assert gaps == sorted(gaps)  # ever less often
    assert max(gaps) == 0.5


def test_result_has_all_that_the_declared_type_promises(durable: Durable) -> None:
    noon = datetime(2030, 3, 30, 12, tzinfo=ZoneInfo("Europe/Berlin"))

    @durable.workflow
    def visit(event: WorkflowEvent[datetime], step: Step) -> tuple[datetime, bytes, float]:
        return event.payload, b"\xff", math.inf

    instance = visit.create(noon)
    advance(durable, instance)
    at, picture, score = instance.result(timeout=0)
    assert (at, at.tzinfo, picture, score) == (noon, noon.tzinfo, b"\xff", math.inf)


def test_result_of_an_instance_that_has_ended_does_not_wait(durable: Durable, order) -> None:
    instance = order.create()
    advance(durable, instance)
    durable.internals.runtime.meanwhile = lambda: pytest.fail("it waited")
    assert instance.result(timeout=0) == {"total": 5}


@pytest.mark.parametrize("timeout", [3, "3 s"])
def test_result_gives_up_after_its_timeout(durable: Durable, order, timeout) -> None:
    instance = order.create("wait", id="o-1")
    advance(durable, instance)
    before = durable.internals.runtime.now_us
    with pytest.raises(ResultTimeout) as caught:
        instance.result(timeout=timeout)
    assert str(caught.value) == (
        "Instance 'o-1' of workflow 'order' is still waiting after 3 s. "
        "The instance continues by itself; ask again, or wait longer."
    )
    assert isinstance(caught.value, TimeoutError)
    assert durable.internals.runtime.now_us - before == 3_000_000


def test_result_of_what_ended_without_one_says_why(durable: Durable, order) -> None:
    failed, ended = order.create("fail", id="a"), order.create("wait", id="b")
    advance(durable, failed)
    ended.terminate("out of business")
    with pytest.raises(WorkflowFailed) as caught:
        failed.result()
    assert str(caught.value) == "Instance 'a' of workflow 'order' ended errored: ValueError: no"
    with pytest.raises(WorkflowFailed) as caught:
        ended.result()
    assert str(caught.value) == "Instance 'b' of workflow 'order' ended terminated"


def test_a_handle_reads_and_changes_its_instance(durable: Durable, order) -> None:
    instance = order.create("wait", id="o-1")
    assert repr(instance) == "<WorkflowInstance order/o-1>"
    advance(durable, instance)
    instance.pause()
    assert instance.status().status == "paused"
    instance.resume()
    assert instance.send_event("approval", 1, id="e-1") is True
    assert instance.send_event("approval", 1, id="e-1") is False
    advance(durable, instance)
    assert instance.result(timeout=0) == {"total": 5}
    assert [step.name for step in instance.history().steps] == ["approval"]
    assert instance.logs() == []
    assert instance.restart() == 2
    instance.terminate()
    assert order.get("o-1").status().status == "terminated"
    assert durable.workflows["order"].get("o-1").status().status == "terminated"


def test_a_workflow_makes_and_lists_many(durable: Durable, order) -> None:
    made = order.create_batch([CreateOptions(id="a"), CreateOptions(id="b", params="wait"), CreateOptions(id="a")])
    assert [instance.id for instance in made] == ["a", "b"]
    assert [item.id for item in order.list(limit=1).items] == ["b"]
    assert [item.id for item in order.list(status="active").items] == ["b", "a"]
    assert order.delay("wait").status().status == "active"


def test_items_of_a_batch_without_an_id_get_random_ones(durable: Durable, order) -> None:
    made = order.create_batch([CreateOptions(params="wait"), CreateOptions(params="wait"), CreateOptions(id="a")])
    assert len({instance.id for instance in made}) == 3
    assert "a" in {instance.id for instance in made}


def test_using_needs_a_project_of_django(durable: Durable, order) -> None:
    with pytest.raises(ValueRefused) as refused:
        order.create("wait", using="default")
    assert str(refused.value) == (
        "using='default': databases have aliases only in a Django project with celery_durable.contrib.django. To join "
        "a transaction of SQLAlchemy, pass session=."
    )
    assert order.list().items == ()
