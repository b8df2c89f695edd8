"""Each async method does and returns what the method without the "a" does, with all of its arguments."""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from celery_durable import (
    CreateOptions,
    Durable,
    DurableError,
    NonRetryableError,
    Step,
    StepTx,
    Workflow,
    WorkflowEvent,
)
from celery_durable.handles import WorkflowInstance
from celery_durable.model import LogLevel
from celery_durable.testing import DurableHarness

CLASSES = (Durable, Workflow, WorkflowInstance)
WITHOUT_TWIN = {
    *("autodiscover", "close", "init_app", "migrate", "outbound", "register", "service", "tick", "workflow"),  # Durable
    *("on_loop_start", "on_loop_stop"),
    "sign_answer",  # called in steps
    *("s", "si"),  # Workflow: signatures of Celery
}
TESTED_WITH_TRANSACTIONS = {"session", "using"}
"""Arguments of tests/handles/test_async_sessions.py and tests/contrib/django/test_async.py."""
SETTINGS = {"durable_answer_key": "k" * 32}
RANDOM = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def charge(tx: StepTx) -> str:
    tx.set_labels({"paid": "yes"})
    return "paid"


def order(event: WorkflowEvent[Any], step: Step) -> Any:
    step.publish("stage", "charging")
    step.log.info("charging", category="shop")
    step.log.info("charging soon", category="shop")
    step.do("charge", charge)
    step.wait_for_topic("news", "news", timeout="1 hour") if event.payload == "news" else None
    return step.wait_for_event("answer", "answer", ask="Ship it?", to="sales").payload


def failing(event: WorkflowEvent[Any], step: Step) -> Any:
    def refuse() -> None:
        raise NonRetryableError("over the limit")

    return step.do("refuse", refuse)


class World:
    """Workflows in some states. Two worlds are equal until one is changed."""

    def __init__(self, harness: DurableHarness) -> None:
        self.harness, self.durable = harness, harness.durable
        self.orders = self.durable.workflows["order"]
        harness.create(order, {"item": 7}, id="waiting", labels={"tenant": "acme"})
        for number in range(3):
            harness.create(order, "news", id=f"listening-{number}")
        paused, done = harness.create(order, id="paused"), harness.create(order, id="done")
        harness.create(failing, id="failed")
        harness.run_until_idle()
        paused.pause()
        done.send_event("answer", 42)
        harness.run_until_idle()

    def show(self) -> list[str]:
        """All that is stored about the instances."""
        store, operations = self.durable.internals.store, self.durable.internals.operations
        rows = store.read(lambda tx: tx.execute(sa.select(store.tables.instance)).mappings().all())
        names = sorted((row["workflow"], row["instance_id"]) for row in rows)
        handles = [WorkflowInstance(self.durable.workflows[name], id_) for name, id_ in names]
        seen = [(operations.queries.get(each.workflow.name, each.id), each.history(), each.logs()) for each in handles]
        return [show(each) for each in (*map(dict, rows), *seen)]


def show(value: Any) -> str:
    return RANDOM.sub("<random>", repr(value))


@dataclass
class Call:
    """One call of a verb. ``on`` finds its object; ``args`` and ``named`` may be functions of the world."""

    on: Callable[[World], Any]
    args: tuple[Any, ...] = ()
    named: dict[str, Any] = field(default_factory=dict)


def first_cursor(world: World) -> str:
    cursor = world.orders.list(limit=1, status="waiting").cursor
    assert cursor is not None
    return cursor


def waiters_cursor(world: World) -> str:
    cursor = world.durable.waiters("news", limit=1).cursor
    assert cursor is not None
    return cursor


def link(world: World) -> str:
    event = WorkflowEvent({"item": 7}, world.harness.clock.now, "waiting", 1)
    return world.durable.sign_answer(world.orders, event, "answer", by="ada")


def soon(world: World) -> Any:
    return world.harness.clock.now + timedelta(hours=1)


def durable(world: World) -> Durable:
    return world.durable


def orders(world: World) -> Any:
    return world.orders


def waiting(world: World) -> Any:
    return world.orders.get("waiting")


def failed(world: World) -> Any:
    return world.durable.workflows["failing"].get("failed")


CALLS: dict[str, list[Call]] = {
    "emit": [Call(durable, ("news", 7), {"id": "n-1"})],
    "waiters": [Call(durable, ("news",), {"limit": 1, "cursor": waiters_cursor})],
    "create": [
        Call(
            orders,
            (1,),
            {"id": "o-1", "if_exists": "return", "run_at": soon, "max_run": "1 day", "labels": {"a": "b"}},
        ),
        Call(orders, (1,), {"id": "waiting", "if_exists": "return"}),
        Call(orders, (1,), {"id": "waiting"}),
        Call(orders, (1,), {"id": "o-1", "if_exists": "postpone", "run_at": "30 seconds", "at_latest": "5 min"}),
        Call(orders, (1,), {"id": "waiting", "if_running": "skip"}),
    ],
    "create_batch": [Call(orders, ([CreateOptions("o-1", 1, {"a": "b"}), CreateOptions("waiting")],))],
    "delay": [Call(orders, ({"item": 8},))],
    "restart_or_create": [
        Call(orders, (1,), {"id": "o-1", "labels": {"a": "b"}}),
        Call(orders, (1,), {"id": "waiting"}),
        Call(orders, (1,), {"id": "waiting", "if_status": ["waiting"], "reason": "wrong item"}),
        Call(orders, (1,), {"id": "waiting", "if_status": ["waiting"], "if_version": ["another"]}),
    ],
    "get": [Call(orders, ("waiting",)), Call(orders, ("nobody",))],
    "list": [
        Call(orders, (), {"limit": 1, "status": "waiting", "cursor": first_cursor}),
        Call(orders, (), {"labels": {"tenant": "acme"}}),
    ],
    "waits": [
        Call(durable, (), {"workflow": "order", "event_type": "answer", "to": "sales", "is_asking": True, "limit": 1}),
        Call(durable, (), {"cursor": "forged"}),
        Call(orders, (), {"event_type": "answer", "to": "sales", "is_asking": True, "limit": 1}),
        Call(orders, (), {"cursor": "forged"}),
    ],
    "pause": [Call(waiting)],
    "resume": [Call(lambda world: world.orders.get("paused"))],
    "cancel": [Call(waiting, ("no longer wanted",), {"by": "eve"})],
    "terminate": [Call(waiting, ("no longer wanted",), {"by": "eve", "children": False})],
    "restart": [Call(waiting, (), {"from_step": "answer", "reason": "wrong item"})],
    "retry": [Call(failed, (), {"delay": "5 minutes", "reason": "the limit is higher", "family": True}), Call(waiting)],
    "set_result": [Call(failed, ("refuse", 7), {"by": "ada", "reason": "by phone"})],
    "skip": [Call(failed, ("refuse",), {"by": "ada", "reason": "by phone"})],
    "send_event": [Call(waiting, ("answer", 7), {"id": "e-1"})],
    "answer": [Call(waiting, ("answer", 7), {"by": "ada", "run": 1}), Call(waiting, ("charge",), {"by": "ada"})],
    "open_question": [Call(durable, (), {"signed": link}), Call(durable, ("forged",))],
    "answer_signed": [Call(durable, (), {"signed": link, "payload": 7}), Call(durable, ("forged",))],
    "explain": [Call(waiting)],
    "history": [Call(waiting, (1,)), Call(waiting, (2,))],
    "logs": [
        Call(waiting, (), {"run": 1, "after_id": 0, "limit": 1, "levels": [LogLevel.INFO], "category": "shop"}),
        Call(waiting, (), {"category": "another"}),
        Call(waiting, (), {"after_id": 10_000}),
        Call(waiting, (), {"levels": [LogLevel.ERROR]}),
        Call(waiting, (), {"run": 2}),
    ],
    "published": [Call(waiting)],
    "status": [Call(waiting), Call(failed)],
    "result": [Call(lambda world: world.orders.get("done")), Call(waiting, (0.01,))],
    "fork": [Call(waiting, ("answer",), {"id": "forked"})],
}
READING = {
    "waiters",
    "waits",
    "open_question",
    "get",
    "list",
    "explain",
    "history",
    "logs",
    "published",
    "status",
    "result",
}


def perform(world: World, verb: str, call: Call, *, is_async: bool) -> str:
    """Make the call. Returns its result or error."""
    named = {name: value(world) if callable(value) else value for name, value in call.named.items()}
    method = getattr(call.on(world), f"a{verb}" if is_async else verb)
    try:
        result = asyncio.run(method(*call.args, **named)) if is_async else method(*call.args, **named)
    except DurableError as error:
        result = error
    return show(result)


@pytest.mark.parametrize("verb", sorted(CALLS.keys() - READING))
def test_an_async_verb_does_what_the_verb_does(verb: str) -> None:
    for call in CALLS[verb]:
        done = []
        for is_async in (True, False):
            with DurableHarness([order, failing], settings=SETTINGS) as harness:
                world = World(harness)
                done.append((perform(world, verb, call, is_async=is_async), world.show()))
        assert done[0] == done[1]


def test_an_async_verb_that_reads_returns_what_the_verb_returns() -> None:
    with DurableHarness([order, failing], settings=SETTINGS) as harness:
        world = World(harness)
        before = world.show()
        for verb in READING:
            for call in CALLS[verb]:
                assert perform(world, verb, call, is_async=True) == perform(world, verb, call, is_async=False), verb
        assert world.show() == before


def test_each_verb_has_an_async_twin_that_is_called_here() -> None:
    verbs = {name for each in CLASSES for name, _ in inspect.getmembers(each, inspect.isfunction) if name[0] != "_"}
    twins = {name for each in CLASSES for name, _ in inspect.getmembers(each, inspect.iscoroutinefunction)}
    assert twins - {"client"} == {f"a{verb}" for verb in CALLS}
    assert verbs - twins - WITHOUT_TWIN == set(CALLS)


def test_an_async_verb_takes_the_arguments_of_the_verb() -> None:
    """And all of them are given in a call above, in one that does something with them."""
    for verb, calls in CALLS.items():
        owners = [each for each in CLASSES if verb in dir(each) and f"a{verb}" in dir(each)]
        for owner in owners:
            named = [inspect.signature(getattr(owner, name)) for name in (verb, f"a{verb}")]
            parameters, twins = (
                [(each.name, each.kind, each.default) for each in signature.parameters.values()] for signature in named
            )
            assert twins == parameters, verb
            given: set[str] = set()
            for call in calls:
                if len(owners) == 1 or (call.on is durable) == (owner is Durable):
                    given |= set(named[0].bind(None, *call.args, **call.named).arguments)
            assert {name for name, *_ in parameters} - TESTED_WITH_TRANSACTIONS == given, verb
