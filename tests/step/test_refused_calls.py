"""Calls of steps that cannot be: each is refused with a sentence that names the value and the remedy."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from celery import chain

from celery_durable import Step, WorkflowEvent
from tests.support.answers import resize
from tests.support.mapping import convert
from tests.support.world import World, on_one_database

Call = Callable[[Step], Any]
NAME = "use text of 1 to 256 characters without control characters."
SPAN = 'Write a timedelta, seconds as a number, or text such as "10 seconds", "1.5 h", "3 days".'
INSTANT = "write a datetime of the years 1 to 9999 with a time zone, such as datetime(2030, 1, 31, 8, 0, tzinfo=UTC)."
ITEMS = "pass a list or another iterable that is no text."
BRANCHES = (
    "is no branch of this workflow run: pass what step.submit() returned, and a list of branches with a star: "
    "step.gather(*branches)."
)


def charge(cents: int) -> int:
    return cents


class Impostor:
    branch, name, key = None, "x", "x"

    def __repr__(self) -> str:
        return "<an impostor>"


REFUSED: list[tuple[Call, str]] = [
    # Functions and names.
    (
        lambda step: step.do(lambda: 1),
        "DefinitionInvalid: A lambda has no name of its own: step.do('name', lambda: ...).",
    ),
    (
        lambda step: step.do("charge", 5),
        "DefinitionInvalid: step.do() needs a function: step.do('name', fn, *args) or "
        "step.do('name', StepConfig(...), fn, *args); it got ('charge', 5).",
    ),
    (
        lambda step: step.do("charge", charge, 5, retries=0),
        "DefinitionInvalid: step.do() passes retries= to charge, which has no such parameter. To configure the step: "
        "step.do('name', StepConfig(retries=0), fn, *args).",
    ),
    (lambda step: step.do("", len, ""), f"NameInvalid: Step name '' is not allowed: {NAME}"),
    (lambda step: step.do("a\nb", len, ""), f"NameInvalid: Step name 'a\\nb' is not allowed: {NAME}"),
    (lambda step: step.do("x" * 257, len, ""), f"NameInvalid: Step name '{'x' * 116}... is not allowed: {NAME}"),
    (
        lambda step: step.do(5, len, ""),
        "NameInvalid: Step name 5 is not allowed: it is of type int; pass text (str).",
    ),
    (
        lambda step: step.sleep(None, 60),
        "NameInvalid: Step name None is not allowed: it is of type NoneType; pass text (str).",
    ),
    # Times.
    (
        lambda step: step.sleep("rest", -1),
        f"DurationInvalid: Duration -1 cannot be used: it is shorter than 0 s. {SPAN}",
    ),
    (
        lambda step: step.sleep("rest", "366 days"),
        "DurationInvalid: Duration '366 days' cannot be used: it is longer than 365 d (durable_max_sleep_seconds). "
        f"{SPAN}",
    ),
    (
        lambda step: step.sleep_until("rest", datetime(2035, 1, 1, tzinfo=UTC)),
        "SleepTooFar: sleep_until=2035-01-01 00:00:00+00:00 is too far ahead: a sleep can last up to 365 d "
        "(durable_max_sleep_seconds). Sleep several times, or raise the setting.",
    ),
    (
        lambda step: step.sleep_until("rest", datetime(2030, 1, 2)),
        f"InstantInvalid: sleep_until=datetime.datetime(2030, 1, 2, 0, 0) cannot be used: {INSTANT}",
    ),
    (
        lambda step: step.sleep_until("rest", None),
        f"InstantInvalid: sleep_until=None cannot be used: {INSTANT}",
    ),
    # Events.
    (
        lambda step: step.wait_for_event("wait", "no spaces"),
        "InvalidEventType: Event type 'no spaces' is not allowed: use 1 to 100 of the characters a-z A-Z 0-9 _ - and "
        "do not begin with '-'.",
    ),
    (
        lambda step: step.wait_for_event("wait", "paid", timeout=0.999),
        f"DurationInvalid: Duration 0.999 cannot be used: it is shorter than 1 s. {SPAN}",
    ),
    (
        lambda step: step.wait_for_event("wait", "paid", timeout="366 days"),
        "DurationInvalid: Duration '366 days' cannot be used: it is longer than 365 d (durable_max_sleep_seconds). "
        f"{SPAN}",
    ),
    # Branches.
    (lambda step: step.first("race"), "DefinitionInvalid: step.first('race') needs at least one branch."),
    (lambda step: step.gather([]), f"DefinitionInvalid: [] {BRANCHES}"),
    (lambda step: step.gather(Impostor()), f"DefinitionInvalid: <an impostor> {BRANCHES}"),
    (lambda step: step.first("race", len), f"DefinitionInvalid: <built-in function len> {BRANCHES}"),
    (lambda step: step.first("race", None), f"DefinitionInvalid: None {BRANCHES}"),
    # Tasks, maps and children.
    (
        lambda step: step.task("thumb", resize.s(1).set(countdown=60)),
        "TaskRefused: Task 'media.resize' cannot be sent with a step: countdown would have the broker hold it, which "
        "loses it with the broker; step.sleep() before the step.",
    ),
    (
        lambda step: step.task("thumb", chain(resize.s(1), resize.s(2))),
        "TaskRefused: Task 'celery.chain' cannot be sent with a step: a canvas is many messages; send a task that "
        "starts it.",
    ),
    (
        lambda step: step.task("thumb", 7),
        "TaskRefused: Task 7 cannot be sent with a step: pass a signature, a task, or a task's name.",
    ),
    (
        lambda step: step.map("squares", "square", "abc"),
        f"ValueRefused: step.map('squares') got 'abc' as its items: {ITEMS}",
    ),
    (lambda step: step.map("squares", "square", 7), f"ValueRefused: step.map('squares') got 7 as its items: {ITEMS}"),
    (
        lambda step: step.map("pages", convert.s("png"), range(10_001)),
        "ValueRefused: step.map('pages') got 10001 items, and 10000 is the most: map chunks of them, or have child "
        "workflows map a part each.",
    ),
    (
        lambda step: step.map("pages", convert.s("png"), [1], max_concurrency=0),
        "ValueRefused: max_concurrency=0 of step 'pages' must be at least 1, or None for all at once.",
    ),
    (
        lambda step: step.map("pages", convert.s("png").set(countdown=5), [1]),
        "TaskRefused: Task 'press.convert' cannot be sent with a step: countdown would have the broker hold it, which "
        "loses it with the broker; step.sleep() before the step.",
    ),
    (
        lambda step: step.map("pages", convert.s("png"), [1, object()]),
        "NotSerializable: Task 'press.convert' cannot be stored as JSON: $.args[0] is a object, which has no JSON "
        "form. Use plain data (or pydantic models, dataclasses, datetimes, Decimals, UUIDs, enums); keep other things "
        "elsewhere and store a reference.",
    ),
    (
        lambda step: step.child("bill", len),
        "DefinitionInvalid: step.child('bill') needs a workflow, and got <built-in function len>: pass what "
        "@durable_workflow made.",
    ),
]


@on_one_database
@pytest.mark.parametrize(("call", "error"), REFUSED)
def test_a_call_that_cannot_be_is_refused_and_leaves_nothing(world: World, call: Call, error: str) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step) -> None:
        call(step)

    instance = order.run()
    assert (instance.error, instance.statuses(), world.sent) == (error, {}, [])


@on_one_database
@pytest.mark.parametrize("schema", [{"a": 1}, "NUL \0", "list[", "str.missing"])
def test_the_schema_of_an_event_is_a_type(world: World, schema: Any) -> None:
    @world.workflow
    def order(event: WorkflowEvent[Any], step: Step) -> None:
        step.wait_for_event("wait", "paid", schema=schema)

    start = f"DefinitionInvalid: The schema of wait 'wait' is declared as {schema}, which cannot be read: "
    assert order.run().error.startswith(start.replace("\0", ""))  # stored text has no NUL
