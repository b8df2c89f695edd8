"""Replaying a record with every method: none may look like a difference, and what open steps wait for is compared."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from celery_durable import Step, StepConfig, WorkflowEvent, durable_workflow
from celery_durable.testing import START, DurableHarness, NotReplayed, OpenStepChanged, assert_replays
from celery_durable.testing.code import Code
from celery_durable.wire.encoding import export_run, to_json

THEN = START + timedelta(days=5)


def kid(event: WorkflowEvent[Any], step: Step) -> Any:
    step.sleep("nap", 5)
    return event.payload


def _published(step: Step) -> None:
    step.publish("before", 1)
    step.do("work", lambda: step.publish("within", 2))
    step.publish("after", 3)


def _logged(step: Step) -> None:
    step.log.info("hello")
    step.do("work", lambda: step.log.warning("within", left=3))
    step.log.error("bye")


def _branch(submit: str, *args: Any, **options: Any) -> Callable[[Step], Any]:
    return lambda step: step.gather(
        getattr(step, submit)("branch", *args, **options), step.submit("sibling", lambda: 1)
    )


def _raced(step: Step) -> Any:
    return step.first("race", step.submit_sleep("slow", 50), step.submit_sleep("fast", 5))


STEP_METHODS: dict[str, Callable[[Step], Any]] = {
    "do": lambda step: step.do("work", lambda: {"a": 1}),
    "sleep": lambda step: step.sleep("rest", 5),
    "sleep_until": lambda step: step.sleep_until("rest", THEN),
    "wait_for_event": lambda step: step.wait_for_event("wait", "paid").payload,
    "wait_for_topic": lambda step: step.wait_for_topic("wait", "price:eur").payload,
    "task": lambda step: step.task("task", "media.resize"),
    "map": lambda step: step.map("map", "media.resize", [1, 2, 3], return_exceptions=True),
    "child": lambda step: step.child("child", KID, 7),
    "submit": _branch("submit", lambda: 2),
    "submit_sleep": _branch("submit_sleep", 5),
    "submit_wait_for_event": _branch("submit_wait_for_event", "paid"),
    "submit_wait_for_topic": _branch("submit_wait_for_topic", "price:eur"),
    "submit_task": _branch("submit_task", "media.resize"),
    "submit_map": _branch("submit_map", "media.resize", [1, 2]),
    "submit_child": lambda step: step.gather(step.submit_child("child", KID, 7), step.submit("sibling", lambda: 1)),
    "gather": lambda step: step.gather(step.submit("a", lambda: 1), step.submit("b", lambda: 2)),
    "first": _raced,
    "publish": _published,
    "now": lambda step: (step.now().isoformat(), step.do("work", lambda: 1), step.now().isoformat()),
    "random": lambda step: step.do("work", lambda number: number, step.random()),
    "uuid": lambda step: step.do("work", lambda number: number, step.uuid()),
    "log": _logged,
}
KID: Any = None


@pytest.fixture(autouse=True)
def known_kid() -> Any:
    global KID
    KID = workflow(kid)
    yield
    KID = None


def workflow(code: Callable[..., Any]) -> Any:
    return durable_workflow(name="kid" if code is kid else "trip")(code)


def made_of(*methods: Callable[[Step], Any]) -> Code:
    def trip(event: WorkflowEvent[Any], step: Step) -> Any:
        step.do("first of all", lambda: None)
        return [method(step) for method in methods]

    return workflow(trip)


def records(code: Code) -> list[Any]:
    """The run's history, whenever it had come to rest."""
    found = []
    with DurableHarness([code, KID], unused_mocks=True) as harness:
        handle = harness.create(code, id="t-1")
        harness.run_until_idle()
        found.append(handle.history())
        for method in ("branch", "task", "map"):
            harness.mocks.mock_step_result(method, 1)
        harness.mocks.mock_event("paid", 5)
        harness.mocks.mock_topic("price:eur", 6)
        harness.emit("price:eur", 6)
        harness.run_until_idle()
        for _ in range(5):
            if (due_at := harness.next_due()) is None:
                break
            harness.advance_to(due_at)
            harness.run_until_idle()
            found.append(handle.history())
        assert handle.status().status == "complete", handle.status()
        return [*found, handle.history()]


def exported(told: Any) -> Any:
    return json.loads(to_json(export_run(told)))


def test_every_method_of_a_step_is_replayed_here() -> None:
    assert set(STEP_METHODS) == {name for name in dir(Step(None)) if not name.startswith("_")} - {"call"}  # type: ignore[arg-type]


@pytest.mark.parametrize("method", STEP_METHODS)
def test_a_workflow_with_each_method_follows_its_own_record(method: str) -> None:
    code = made_of(STEP_METHODS[method])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for told in records(code):
            assert_replays(code, told)
            assert_replays(code, exported(told))


# --- open steps ---------------------------------------------------------------------------------

OPEN: dict[str, tuple[Callable[[Step], Any], Callable[[Step], Any], str, str]] = {
    "event": (
        lambda step: step.wait_for_event("wait", "paid"),
        lambda step: step.wait_for_event("wait", "settled"),
        "step 'wait' (waitForEvent) was recorded with event 'paid', and the code has event 'settled'.",
        "The wait keeps its deadline. The next pass changes what it waits for.",
    ),
    "event's timeout": (
        lambda step: step.wait_for_event("wait", "paid", timeout="1 hour"),
        lambda step: step.wait_for_event("wait", "paid", timeout="2 hours"),
        "step 'wait' (waitForEvent) was recorded with timeout 1:00:00, and the code has timeout 2:00:00.",
        "The open step keeps its deadline.",
    ),
    "topic": (
        lambda step: step.wait_for_topic("wait", "price:eur"),
        lambda step: step.wait_for_topic("wait", "price:usd"),
        "step 'wait' (waitForEvent) was recorded with topic 'price:eur', and the code has topic 'price:usd'.",
        "The wait keeps its deadline. The next pass changes what it waits for.",
    ),
    "event becomes topic": (
        lambda step: step.wait_for_event("wait", "price"),
        lambda step: step.wait_for_topic("wait", "price"),
        "step 'wait' (waitForEvent) was recorded with event 'price', and the code has topic 'price'.",
        "The wait keeps its deadline. The next pass changes what it waits for.",
    ),
    "task": (
        lambda step: step.task("task", "media.resize"),
        lambda step: step.task("task", "media.crop"),
        "step 'task' (task) was recorded with task 'media.resize', and the code has task 'media.crop'.",
        "Tasks that were already sent still count. Tasks that are sent from now on are the new task.",
    ),
    "task's timeout": (
        lambda step: step.task("task", "media.resize", timeout=5),
        lambda step: step.task("task", "media.resize", timeout=6),
        "step 'task' (task) was recorded with timeout 0:00:05, and the code has timeout 0:00:06.",
        "The next attempt has the new timeout.",
    ),
    "map's task": (
        lambda step: step.map("map", "media.resize", [1]),
        lambda step: step.map("map", "media.crop", [1]),
        "step 'map' (map) was recorded with task 'media.resize', and the code has task 'media.crop'.",
        "Tasks that were already sent still count. Tasks that are sent from now on are the new task.",
    ),
    "child": (
        lambda step: step.child("child", KID, id="k-1"),
        lambda step: step.child("child", KID, id="k-2"),
        "step 'child' (child) was recorded with child kid/k-1, and the code has child kid/k-2.",
        "The step still waits for the existing child. No second child is created.",
    ),
    "sleep": (
        lambda step: step.sleep("rest", 60),
        lambda step: step.sleep("rest", 90),
        "step 'rest' (sleep) was recorded with length 0:01:00, and the code has length 0:01:30.",
        "The open step keeps its deadline.",
    ),
    "timeout of a body that is tried again": (
        lambda step: step.do("work", StepConfig(timeout=5), lambda: 1 / 0),
        lambda step: step.do("work", StepConfig(timeout=7), lambda: 1 / 0),
        "step 'work' (do) was recorded with timeout 0:00:05, and the code has timeout 0:00:07.",
        "The next attempt has the new timeout.",
    ),
    "branch": (
        lambda step: step.first("race", step.submit_wait_for_event("wait", "paid"), step.submit_sleep("rest", 50)),
        lambda step: step.first("race", step.submit_wait_for_event("wait", "settled"), step.submit_sleep("rest", 50)),
        "step 'wait' (waitForEvent) was recorded with event 'paid', and the code has event 'settled'.",
        "The wait keeps its deadline. The next pass changes what it waits for.",
    ),
}


@pytest.mark.parametrize("form", ["history", "export"])
@pytest.mark.parametrize("what", OPEN)
def test_what_has_changed_of_an_open_step_is_warned_of(what: str, form: str) -> None:
    before, today, sentence, remedy = OPEN[what]
    code = made_of(before)
    with DurableHarness([code, KID]) as harness:
        handle = harness.create(code, id="t-1")
        harness.tick()
        told: Any = handle.history()
    if form == "export":
        told = exported(told)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_replays(code, told)
    with pytest.warns(OpenStepChanged) as seen:
        assert_replays(made_of(today), told)
    assert [str(each.message) for each in seen] == [f"trip/t-1#1: Open {sentence} {remedy}"]


def test_a_value_that_cannot_be_published_is_a_difference_as_it_would_be_in_a_run() -> None:
    code = made_of(lambda step: step.do("work", lambda: 1))
    with DurableHarness([code]) as harness:
        handle = harness.create(code, id="t-1")
        harness.run_until_idle()
        told = handle.history()
    with pytest.raises(NotReplayed, match="ends errored with NotSerializable"):
        assert_replays(made_of(lambda step: step.publish("work", object())), told)
