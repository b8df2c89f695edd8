"""Each way to end a run early, at each place where it may be: it ends as documented, and leaves nothing open."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest

from celery_durable import Completed, NonRetryableError, Retries, Retry, Status, Step, StepConfig
from celery_durable.errors import InstanceTerminal
from celery_durable.model import OutboxKind
from celery_durable.store.instances.families import END_CHILDREN
from celery_durable.tasks.outbox import Handler, OutboundDeliverer
from tests.support.databases import on_databases
from tests.support.flows import flow_of
from tests.support.instances import Instance
from tests.support.invariants import open_rows
from tests.support.lines import Line, rows, waits_for
from tests.support.world import World

database = on_databases("sqlite", "postgresql", "mariadb")

HOUR = "1 hour"
Act = Callable[[], object]
Place = Callable[[World, Step, Act], object]


def fail(*_: object) -> None:
    raise NonRetryableError("no")


def give_up() -> None:
    raise ValueError("not yet")


HOWS: dict[str, Callable[[Instance], object]] = {
    "cancel": lambda instance: instance.cancel("typo"),
    "cancel twice": lambda instance: (instance.cancel("typo"), instance.cancel("at once")),
    "terminate": lambda instance: instance.terminate("typo"),
    "error": fail,
}
REASONS = {"cancel": "cancelled: typo", "cancel twice": "cancelled: at once", "terminate": "typo", "error": None}


def ask_child(world: World, step: Step) -> object:
    child = flow_of(world, lambda step: step.wait_for_event("paid", "paid", timeout=HOUR), name="bill")
    return step.child("open", child, id="b-1")


RUNNING: dict[str, Place] = {
    "in a function": lambda _, step, act: step.do("open", act),
    "between steps": lambda _, step, act: act(),
}
WAITING: dict[str, Place] = {
    "asleep": lambda _, step, __: step.sleep("open", "3 days"),
    "for an event": lambda _, step, __: step.wait_for_event("open", "approval", timeout=HOUR),
    "for a topic": lambda _, step, __: step.wait_for_topic("open", "prices", timeout=HOUR),
    "for a task": lambda _, step, __: step.task("open", "shop.pack", timeout=HOUR),
    "for a map": lambda _, step, __: step.map("open", "shop.pack", [1, 2, 3], max_concurrency=2, timeout=HOUR),
    "for a child": lambda world, step, _: ask_child(world, step),
    "for a retry": lambda _, step, __: step.do("open", StepConfig(retries=Retries(limit=1, delay=HOUR)), give_up),
    "for branches": lambda _, step, __: step.gather(
        step.submit("quick", lambda: 1),
        step.submit_sleep("open", HOUR),
        step.submit_wait_for_event("b", "approval", timeout=HOUR),
    ),
    "for a race": lambda _, step, __: step.first(
        "race", step.submit_sleep("open", "3 days"), step.submit_wait_for_event("b", "approval", timeout=HOUR)
    ),
}
NEW, PAUSED, CLEANING_UP = "new", "paused", "cleaning up"
PLACES: dict[str, Place] = {
    **RUNNING, **WAITING, NEW: fail, PAUSED: WAITING["for an event"], CLEANING_UP: fail,
}  # fmt: skip
_WITHOUT_ERROR = ("asleep", NEW, PAUSED)
CELLS = [(how, place) for place in PLACES for how in HOWS if how != "error" or place not in _WITHOUT_ERROR]


def order(world: World, place: Place, act: Act, did: list[str]) -> Any:
    """A workflow that gets to a place, and cleans up however it leaves it. The cleanup sleeps for an hour."""

    def flow(step: Step) -> None:
        step.do("charge", lambda: did.append("charge"))
        try:
            place(world, step, act)
            step.do("ship", lambda: did.append("ship"))
            step.do("bill", lambda: did.append("bill"))
        finally:
            step.do("refund", lambda: did.append("refund"))
            step.sleep("rest", HOUR)
            step.do("mail", lambda: did.append("mail"))

    return flow_of(world, flow)


@pytest.mark.parametrize(("how", "place"), CELLS)
def test_a_run_ends(world: World, how: str, place: str) -> None:
    did: list[str] = []
    act = functools.cache(lambda: HOWS[how](world.instance("order", "i-1")))  # once, if it does not raise
    flow = order(world, PLACES[place], act, did)
    instance = flow.create() if place == NEW else flow.run()
    if place == PAUSED:
        instance.pause()
    if how != "error" and place not in RUNNING:
        with suppress(InstanceTerminal):  # raised by the second cancel of a new run
            act()
    for _ in range(4):  # the first two items of the map, the third one, the cleanup
        world.run_until_idle()
        end_children(world)
        world.advance(timedelta(hours=1))
    is_first_cancel = how == "cancel" or (how == "cancel twice" and place == NEW)
    assert instance.status is (Status.ERRORED if how == "error" else Status.TERMINATED)
    assert reason_of(instance) == REASONS["cancel" if is_first_cancel else how]
    assert did == what_was_done(how, place)
    assert open_rows(world.store) == []


def what_was_done(how: str, place: str) -> list[str]:
    if place == NEW:
        return []
    cleanup = ["refund", "mail"] if how == "error" or (how == "cancel" and place != CLEANING_UP) else []
    match place:
        case "between steps" if how != "error":
            return ["charge", "ship", *cleanup]  # the worker hears of it when it commits
        case "cleaning up":
            return ["charge", *(cleanup or ["refund"])]
    return ["charge", *cleanup]


def reason_of(instance: Instance) -> str | None:
    return instance.world.operations.history.read(instance.workflow, instance.id).reason


def end_children(world: World) -> None:
    """Do what a worker does with the event of a run that was terminated."""
    handler = Handler.of(lambda event: world.operations.lifecycle.end_children(event.payload), Retries(limit=None))
    deliverer = OutboundDeliverer(
        world.store, world.settings, world.worker.runtime, {END_CHILDREN: handler}, lambda _: False
    )
    for message in [each for each in world.sent if each.kind is OutboxKind.EVENT]:
        deliverer.deliver(message.id)


# --- linear workflows, which have no cleanup ---------------------------------------------------------

LINES: dict[str, tuple[Callable[[Act], Any], list[str]]] = {
    "in a function": (lambda act: lambda _: act() and Completed(), ["DONE", "DONE", "READY"]),
    "for an event": (lambda _: waits_for(), ["DONE", "WAITING", "PENDING"]),
    "for a retry": (lambda _: lambda _: Retry("not yet", delay=HOUR), ["DONE", "READY", "PENDING"]),
    NEW: (lambda _: fail, ["READY", "PENDING", "PENDING"]),
    PAUSED: (lambda _: waits_for(), ["DONE", "WAITING", "PENDING"]),
}
"""What the second step does, and the rows that a cancel there leaves."""


@pytest.mark.parametrize(("how", "place"), [(how, place) for place in LINES for how in REASONS if how != "error"])
def test_a_linear_run_ends(world: World, how: str, place: str) -> None:
    answer, left = LINES[place]
    act = functools.cache(lambda: (HOWS[how](world.instance("order", "i-1")), True))
    flow = Line(world, PAY=answer(act)).flow
    instance = flow.create() if place == NEW else flow.run()
    if place == PAUSED:
        instance.pause()
    if place not in RUNNING:
        act()
    world.run_until_idle()
    world.run_after(timedelta(days=1))
    assert (instance.status, reason_of(instance)) == (Status.TERMINATED, REASONS[how])
    is_superseded = place in RUNNING and how != "cancel"
    assert rows(instance) == (["DONE", "RUNNING", "PENDING"] if is_superseded else left)
    assert open_rows(world.store) == []
