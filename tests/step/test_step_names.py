"""The name of a step is its identity: within a pass, over passes, over a deploy."""

from __future__ import annotations

import enum
import functools
from datetime import timedelta
from typing import Any

import pytest

from celery_durable import Step, StepConfig, WorkflowEvent, durable_step
from celery_durable.errors import StepLimitExceeded, StepNameReused, StepTypeMismatch
from tests.support.flows import flow_of
from tests.support.results import make_amount, make_id
from tests.support.world import World, on_one_database


def test_the_same_name_again_returns_the_recorded_result_and_warns(world: World) -> None:
    ran = []

    def charge() -> str:
        ran.append(1)
        return "ch_1"

    instance = flow_of(world, lambda step: [step.do("charge", charge), step.do("charge", charge)]).run()
    assert instance.output == ["ch_1", "ch_1"]
    assert ran == [1]
    assert [(line.level, line.category, line.message) for line in instance.logs()] == [
        ("warn", "system", "Step name 'charge' is used again in one pass: the recorded result is returned.")
    ]


def test_the_same_name_for_other_arguments_is_an_error(world: World) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.do("charge", lambda amount: amount, 1)
        step.do("charge", lambda amount: amount, 2)

    assert order.run().error == (
        "StepNameReused: Step name 'charge' is used again for a different function or other arguments. Names identify "
        "steps: put the loop index or a key in the name, or pass StepConfig(repeat=True) to count the occurrences."
    )


class Shop:
    def __init__(self, name: str) -> None:
        self.name = name

    def sell(self) -> str:
        return self.name


class Series:
    """Compares each of its numbers, as arrays do, so that a comparison has no truth value."""

    def __init__(self, *numbers: int) -> None:
        self.numbers = numbers

    def __eq__(self, other: object) -> Any:
        return Series(*(a == b for a, b in zip(self.numbers, other.numbers, strict=True)))  # type: ignore[attr-defined]

    def __bool__(self) -> bool:
        raise ValueError("the truth value of a series is ambiguous")

    __hash__ = None  # type: ignore[assignment]


def add_up(series: Series) -> int:
    return sum(series.numbers)


@on_one_database
def test_the_same_array_again_is_the_same_argument(world: World) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        series = Series(1, 2)
        return [step.do("x", add_up, series), step.do("x", add_up, series)]

    assert order.run().output == [3, 3]


@on_one_database
@pytest.mark.parametrize(
    "use_again",
    [
        lambda step: [step.do("x", add_up, series) for series in (Series(1, 2), Series(3, 4))],
        lambda step: [step.do("x", lambda: n) for n in (1, 2)],
        lambda step: [step.do("x", lambda n=n: n) for n in (1, 2)],
        lambda step: [step.do("x", shop.sell) for shop in (Shop("a"), Shop("b"))],
        lambda step: [step.do("x", functools.partial(int, n)) for n in ("1", "2")],
        lambda step: [step.do("x", fn) for fn in (make_id, make_amount)],
        lambda step: [step.do("x", pow, 2, n) for n in (1, 2)],
    ],
    ids=["array", "closure", "default", "method", "partial", "function", "argument"],
)
def test_the_same_name_for_different_work_is_an_error_however_the_work_is_written(world: World, use_again) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        with pytest.raises(StepNameReused):
            use_again(step)
        return "refused"

    assert order.run().output == "refused"


def test_repeat_makes_each_occurrence_a_step(world: World) -> None:
    ran = []
    counted = StepConfig(repeat=True)

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        found = [step.do("charge", counted, lambda n=n: ran.append(n) or n * 10) for n in range(3)]
        step.sleep("rest", 60)
        return found

    instance = order.run()
    world.run_after(60)
    assert instance.output == [0, 10, 20]
    assert ran == [0, 1, 2]
    assert [step.name for step in instance.steps()] == ["charge", "charge", "charge", "rest"]


class Name(str, enum.Enum):  # noqa: UP042  # its members have a text of their own, unlike those of StrEnum
    SAY = "say"


@on_one_database
def test_a_name_may_be_the_member_of_an_enum(world: World) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        for _ in range(2):
            step.do(event.payload or Name.SAY, StepConfig(repeat=True), lambda: None)

    by_member, by_text = order.run(id="i-1"), order.run("say", id="i-2")
    assert list(by_member.statuses()) == list(by_text.statuses())


def test_a_decorated_function_can_say_repeat_for_itself(world: World) -> None:
    @durable_step(repeat=True)
    def roll(n: int) -> int:
        return n

    order = flow_of(world, lambda step: [step.do(roll, n) for n in (4, 5)])
    assert order.run().output == [4, 5]


def test_a_name_keeps_its_type_within_a_pass(world: World) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.do("x", lambda: 1)
        step.sleep("x", 5)

    assert order.run().error == (
        "StepTypeMismatch: Step 'x' is recorded as 'do', but the code now calls it as 'sleep'. "
        "Give the new step another name; a recorded name keeps its kind."
    )


def test_a_name_keeps_its_type_over_a_deploy(world: World) -> None:
    instance = flow_of(world, lambda step: step.sleep("x", 60)).run()

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        with pytest.raises(StepTypeMismatch):
            step.wait_for_event("x", "go")
        return "refused"

    world.run_after(60)
    assert instance.output == "refused"


def test_renamed_removed_and_new_steps_never_block(world: World) -> None:
    world.exempt["I4"] = "the step that was removed stays as it was"
    ran = []

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.do("a", lambda: ran.append("a"))
        step.do("removed", lambda: ran.append("removed"))
        step.wait_for_event("renamed", "go", timeout=60)

    instance = order.run()

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.do("new", lambda: ran.append("new"))
        step.do("a", lambda: ran.append("a"))
        step.sleep("waits instead", 30)
        return "done"

    world.run_after(60)
    assert instance.status == "waiting"
    assert instance.run_at == world.now + timedelta(seconds=30)
    world.run_until_idle()  # no hot loop over the wait that nobody asks for any more
    world.run_after(30)
    assert instance.output == "done"
    assert ran == ["a", "removed", "new"]
    assert list(instance.statuses()) == ["a", "removed", "renamed", "new", "waits instead"]


def test_a_run_has_at_most_so_many_steps_and_sleeps_are_free(make_world) -> None:
    world = make_world(max_steps=3)

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.do("1", lambda: 1)
        for n in range(5):
            step.sleep(f"sleep {n}", 0)
        step.wait_for_event("2", "go")
        step.do("3", lambda: 1)
        step.do("3", lambda: 1) if event.payload else None
        step.do("4", lambda: 1)

    instance = order.run()
    instance.send("go")
    world.run_until_idle()
    assert instance.error == (
        "StepLimitExceeded: A run of workflow 'order' may have 3 steps (sleeps are free). Put several units of work "
        "in one step, start child instances, or raise max_steps on the workflow."
    )
    assert "4" not in instance.statuses()


def test_a_workflow_can_have_its_own_step_limit(world: World) -> None:
    @world.workflow(max_steps=2)
    def order(event: WorkflowEvent, step: Step):
        for n in range(2):
            step.do(f"{n}", lambda: 1)
        with pytest.raises(StepLimitExceeded):
            step.do("2", lambda: 1)
        return "refused"

    assert order.run().output == "refused"
