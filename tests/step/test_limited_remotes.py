"""Limits of steps that a Celery task or a child does: held from when it is sent until it answers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import sqlalchemy as sa

from celery_durable import Limit, Step, StepFailed, WorkflowEvent
from celery_durable.model import RunRef
from tests.support.answers import answer
from tests.support.databases import on_databases
from tests.support.limits import holds, serve
from tests.support.world import World

database = on_databases("sqlite", "postgresql", "mariadb")
MEDIA = Limit("media", at_once=1)


@pytest.fixture
def resizing(world: World):
    @world.workflow
    def resizing(event: WorkflowEvent, step: Step):
        try:
            return step.task("thumb", "media.resize", timeout=60, retries=event.payload or 0, limits=[MEDIA])
        except StepFailed as exc:
            return exc.error_name

    return resizing


def test_the_next_task_is_sent_when_the_first_one_has_answered(world: World, resizing) -> None:
    first, second = resizing.run(id="a"), resizing.run(id="b")
    assert len(world.sent) == 1
    assert holds(world) == [("a", "held"), ("b", "waiting")]
    assert second.status == "waiting"
    assert answer(world, world.sent[0], 300)
    world.run_until_idle()
    assert first.output == 300
    assert len(world.sent) == 2
    assert answer(world, world.sent[1], 400)
    world.run_until_idle()
    assert second.output == 400
    assert holds(world) == []


def test_a_task_that_times_out_gives_back_its_limit(world: World, resizing) -> None:
    first, second = resizing.run(id="a"), resizing.run(id="b")
    world.run_after(60)
    assert first.output == "StepTimeout"
    assert len(world.sent) == 2
    assert answer(world, world.sent[1], 400)
    world.run_until_idle()
    assert second.output == 400
    assert holds(world) == []


def test_a_task_holds_nothing_while_its_retry_waits(world: World, resizing) -> None:
    first, second = resizing.run(1, id="a"), resizing.run(id="b")
    assert answer(world, world.sent[0], error=KeyError("away"))
    world.run_until_idle()
    assert holds(world) == [("b", "held")]
    world.run_after(30)
    assert first.step("thumb").attempts == 1
    assert ("a", "waiting") in holds(world)
    assert answer(world, world.sent[1], 400)
    world.run_until_idle()
    assert second.output == 400
    assert answer(world, world.sent[2], 300)
    world.run_until_idle()
    assert first.output == 300
    assert first.step("thumb").attempts == 2
    assert holds(world) == []


def test_an_answered_task_of_a_paused_run_holds_nothing(world: World, resizing) -> None:
    first, second = resizing.run(id="a"), resizing.run(id="b")
    first.pause()
    assert answer(world, world.sent[0], 300)
    serve(world)
    world.run_until_idle()
    assert len(world.sent) == 2
    assert answer(world, world.sent[1], 400)
    world.run_until_idle()
    assert second.output == 400
    first.resume()
    world.run_until_idle()
    assert first.output == 300
    assert holds(world) == []


def test_a_terminated_run_leaves_its_task_and_its_limit(world: World, resizing) -> None:
    first, second = resizing.run(id="a"), resizing.run(id="b")
    world.operations.lifecycle.terminate(first.workflow, first.id)
    serve(world)
    world.run_until_idle()
    assert len(world.sent) == 2
    assert answer(world, world.sent[1], 400)
    world.run_until_idle()
    assert second.output == 400
    assert holds(world) == []


@pytest.mark.parametrize("kind", ["task", "map", "child"])
def test_a_run_that_ends_beside_an_open_step_gives_back_its_limit_with_its_end(world: World, kind: str) -> None:
    @world.workflow
    def kid(event: WorkflowEvent, step: Step):
        step.sleep("pause", 60)

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        if kind == "task":
            step.task("out", "media.resize", limits=[MEDIA])
        elif kind == "map":
            step.map("out", "media.resize", range(2), limits=[MEDIA])
        else:
            step.child("out", SimpleNamespace(definition=world.registry.get("kid")), None, limits=[MEDIA])

    first = order.run(id="a")
    order.run(id="b")
    assert {("a", "held"), ("b", "waiting")} <= set(holds(world))

    @world.workflow(name="order")
    def changed(event: WorkflowEvent, step: Step):
        raise ValueError("declined")

    world.operations.lifecycle.wake("order", "a")
    world.new_worker().advance(RunRef("order", "a", 1))
    assert first.status == "errored"
    assert holds(world)[0] == ("b", "granted")  # at once, without a job


@pytest.fixture
def parents(world: World):
    @world.workflow
    def kid(event: WorkflowEvent, step: Step):
        step.sleep("pause", 60)
        return event.payload

    @world.workflow
    def parent(event: WorkflowEvent, step: Step):
        return step.child("kid", kid, event.instance_id, id=f"kid-{event.instance_id}", limits=[MEDIA])

    return parent


def test_the_next_child_is_created_when_the_first_one_has_ended(world: World, parents) -> None:
    first, second = parents.run(id="a"), parents.run(id="b")
    assert holds(world) == [("a", "held"), ("b", "waiting")]
    names = [row.instance_id for row in world.rows(sa.select(world.store.tables.instance))]
    assert sorted(names) == ["a", "b", "kid-a"]
    world.run_after(60)
    assert first.output == "a"
    assert holds(world) == [("b", "held")]
    world.run_after(60)
    assert second.output == "b"
    assert holds(world) == []


def test_a_child_whose_id_is_taken_gives_back_the_limit(world: World, parents) -> None:
    kid = SimpleNamespace(definition=world.registry.get("kid"))

    @world.workflow
    def other(event: WorkflowEvent, step: Step):
        try:
            return step.child("kid", kid, None, id="kid-a", limits=[MEDIA])
        except StepFailed as exc:
            return exc.error_name

    parents.run(id="a")
    world.run_after(60)
    assert other.run(id="c").output == "InstanceAlreadyExists"
    assert holds(world) == []


# --- maps ---------------------------------------------------------------------------------------


@pytest.fixture
def mapping(world: World):
    @world.workflow
    def mapping(event: WorkflowEvent, step: Step):
        limit = Limit("items", at_once=2)
        return step.map("thumbs", "media.resize", range(event.payload), timeout=60, retries=1, limits=[limit])

    return mapping


def answer_all(world: World, count: int) -> int:
    """Answer what is out, again and again. Returns the most tasks that were out at the same time."""
    most = 0
    for done in range(count):
        most = max(most, len(world.sent) - done)
        assert answer(world, world.sent[done], done)
        world.run_until_idle()
        serve(world)
        world.run_until_idle()
    return most


def test_the_items_of_a_map_hold_a_limit_each(world: World, mapping) -> None:
    instance = mapping.run(7)
    assert len(world.sent) == 2
    assert instance.status == "waiting"
    assert answer_all(world, 7) == 2
    assert instance.output == [0, 1, 2, 3, 4, 5, 6]
    assert holds(world) == []


def test_maps_share_a_limit(world: World, mapping) -> None:
    first, second = mapping.run(3, id="a"), mapping.run(3, id="b")
    assert len(world.sent) == 2
    assert answer_all(world, 6) == 2
    assert (first.status, second.status) == ("complete", "complete")
    assert holds(world) == []


def test_an_item_that_fails_holds_nothing_while_its_retry_waits(world: World, mapping) -> None:
    instance = mapping.run(3)
    assert answer(world, world.sent[0], error=KeyError("away"))
    world.run_until_idle()
    assert len(world.sent) == 3
    assert answer(world, world.sent[1], 1)
    assert answer(world, world.sent[2], 2)
    world.run_until_idle()
    world.run_after(30)
    assert answer(world, world.sent[3], 0)
    world.run_until_idle()
    assert instance.output == [0, 1, 2]
    assert holds(world) == []


def test_an_item_that_times_out_gives_back_its_limit(world: World, mapping) -> None:
    instance = mapping.run(4)
    world.run_after(60)
    assert len(world.sent) == 4
    assert answer(world, world.sent[2], 2)
    assert answer(world, world.sent[3], 3)
    world.run_until_idle()
    world.run_after(30)
    assert len(world.sent) == 6
    for message in world.sent[4:]:
        assert answer(world, message, 1)
    world.run_until_idle()
    assert instance.output == [1, 1, 2, 3]
    assert holds(world) == []


def test_a_map_keeps_to_its_own_concurrency_too(world: World) -> None:
    @world.workflow
    def mapping(event: WorkflowEvent, step: Step):
        limit = Limit("items", at_once=5)
        return step.map("thumbs", "media.resize", range(6), max_concurrency=3, limits=[limit])

    instance = mapping.run()
    assert len(world.sent) == 3
    assert answer_all(world, 6) == 3
    assert instance.output == [0, 1, 2, 3, 4, 5]
    assert holds(world) == []


def test_an_item_that_has_its_grant_goes_before_a_retry_that_has_come_due(world: World) -> None:
    @world.workflow
    def narrow(event: WorkflowEvent, step: Step):
        limit = Limit("items", at_once=1)
        return step.map("thumbs", "media.resize", range(event.payload), retries=1, max_concurrency=1, limits=[limit])

    first, second = narrow.run(2, id="a"), narrow.run(1, id="b")
    assert answer(world, world.sent[0], error=KeyError("away"))
    world.run_until_idle()
    serve(world)
    world.run_until_idle()  # the other map has the limit, and the second item waits for it
    assert answer(world, world.sent[1], 1)
    serve(world)
    world.run_after(30)  # the pass that finds the grant also finds that the retry of the first item is due
    for number in (2, 3):
        assert answer(world, world.sent[number], number)
        world.run_until_idle()
        serve(world)
        world.run_until_idle()
    assert (first.output, second.output) == ([3, 2], [1])
    assert holds(world) == []


def test_a_long_map_queues_some_items_at_a_time(world: World) -> None:
    @world.workflow
    def mapping(event: WorkflowEvent, step: Step):
        limit = Limit("items", at_once=30)
        return step.map("thumbs", "media.resize", range(80), limits=[limit])

    instance = mapping.run()
    assert len(world.sent) == 30
    assert [state for _, state in holds(world)].count("waiting") <= 20
    assert answer_all(world, 80) == 30
    assert instance.output == list(range(80))
    assert holds(world) == []


def test_a_terminated_map_frees_the_limits_of_its_items(world: World, mapping) -> None:
    first, second = mapping.run(5, id="a"), mapping.run(2, id="b")
    world.operations.lifecycle.terminate(first.workflow, first.id)
    serve(world)
    world.run_until_idle()
    assert len(world.sent) == 4
    for message in world.sent[2:]:
        assert answer(world, message, 1)
    world.run_until_idle()
    assert second.output == [1, 1]
    assert holds(world) == []


def test_children_of_a_map_hold_a_limit_each(world: World) -> None:
    @world.workflow
    def kid(event: WorkflowEvent, step: Step):
        step.sleep("pause", 60)
        return event.payload

    @world.workflow
    def parent(event: WorkflowEvent, step: Step):
        kids = SimpleNamespace(definition=world.registry.get("kid"))
        return step.map("kids", kids, range(3), limits=[Limit("items", at_once=1)])

    instance = parent.run()
    for _ in range(3):
        assert sum(row.status == "waiting" for row in world.rows(sa.select(world.store.tables.instance))) == 2
        world.run_after(60)
        serve(world)
        world.run_until_idle()
    assert instance.output == [0, 1, 2]
    assert holds(world) == []


def test_a_map_whose_items_all_wait_for_a_limit_is_not_woken_before_one_may_start(world: World, resizing) -> None:
    passes = []

    @world.workflow
    def album(event: WorkflowEvent, step: Step):
        passes.append(event.instance_id)
        return step.map("thumbs", "media.resize", [1, 2], timeout=5, limits=[MEDIA])

    resizing.run(id="a")
    waiting = album.run(id="b")
    world.run_after(5)
    before = len(passes)
    for _ in range(10):
        world.run_after(5)
    assert len(passes) == before
    answer_all(world, 3)
    assert waiting.output == [1, 2]
