"""Maps beside other branches, in races, and several of them."""

from __future__ import annotations

from typing import Any

from celery_durable import Step, WorkflowEvent
from tests.support.answers import answer
from tests.support.databases import on_databases
from tests.support.flows import flow_of
from tests.support.mapping import convert
from tests.support.world import World

database = on_databases("sqlite", "postgresql", "mariadb")


def test_a_map_beside_other_branches(world: World) -> None:
    @world.workflow
    def press(event: WorkflowEvent, step: Step) -> Any:
        many = step.submit_map("convert", convert.s("png"), range(2), max_concurrency=1)
        return step.gather(many, step.submit_sleep("nap", 60), step.submit_wait_for_event("ok", "ok"))[0]

    instance = press.run()
    answer(world, world.sent[0], "a")
    world.run_after(60)
    instance.send("ok")
    world.run_until_idle()
    assert instance.statuses() == {"convert": "waiting", "nap": "completed", "ok": "completed"}
    answer(world, world.sent[1], "b")
    world.run_until_idle()
    assert instance.output == ["a", "b"]


def test_a_map_may_lose_a_race(world: World) -> None:
    @world.workflow
    def press(event: WorkflowEvent, step: Step) -> Any:
        many = step.submit_map("convert", convert.s("png"), range(2))
        return step.first("sooner", many, step.submit_sleep("nap", 60))

    instance = press.run()
    answer(world, world.sent[0], "a")
    world.run_after(60)
    assert (instance.output, instance.statuses()) == (
        None, {"convert": "cancelled", "nap": "completed", "sooner": "completed"},
    )  # fmt: skip
    assert not answer(world, world.sent[1], "b")


def test_a_map_may_win_a_race(world: World) -> None:
    @world.workflow
    def press(event: WorkflowEvent, step: Step) -> Any:
        many = step.submit_map("convert", convert.s("png"), range(2))
        return step.first("sooner", many, step.submit_sleep("nap", "1 day"))

    instance = press.run()
    for message in world.sent:
        answer(world, message, "done")
    world.run_until_idle()
    assert (instance.output, instance.statuses()["nap"]) == (["done", "done"], "cancelled")


def test_a_retry_does_again_what_failed_in_each_of_several_maps(world: World) -> None:
    press = flow_of(
        world,
        lambda step: step.gather(*(step.submit_map(name, convert.s("png"), range(2)) for name in ("text", "plates"))),
        name="press",
    )
    instance = press.run()
    for nth, message in enumerate(world.sent):
        answer(world, message, nth, error=KeyError("no page") if nth in (1, 2) else None)
    world.run_until_idle()
    assert instance.status == "errored"
    world.operations.rewind.retry("press", instance.id)
    world.run_until_idle()
    for message in world.sent[4:]:
        answer(world, message, "again")
    world.run_until_idle()
    assert (instance.output, len(world.sent)) == ([[0, "again"], ["again", 3]], 6)


def test_a_map_that_wins_a_race_with_a_failure_can_be_retried(world: World) -> None:
    @world.workflow
    def press(event: WorkflowEvent, step: Step) -> Any:
        many = step.submit_map("convert", convert.s("png"), range(1))
        return step.first("sooner", many, step.submit_sleep("nap", "1 day"))

    instance = press.run()
    answer(world, world.sent[0], error=KeyError("no page"))
    world.run_until_idle()
    assert instance.error == "KeyError: item 0: 'no page'"
    world.operations.rewind.retry("press", instance.id)
    world.run_until_idle()
    answer(world, world.sent[1], "done")
    world.run_until_idle()
    assert instance.output == ["done"]
