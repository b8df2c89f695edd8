"""Limits of steps that a Celery task or a child does: held from when it is sent until it answers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import sqlalchemy as sa

from celery_durable import Limit, Step, StepFailed, WorkflowEvent
from celery_durable.operations.limit_queue import LimitQueue
from tests.support.answers import answer
from tests.support.databases import on_databases
from tests.support.world import World

database = on_databases("sqlite", "postgresql", "mariadb")
MEDIA = Limit("media", at_once=1)


def holds(world: World) -> list[tuple[str, str]]:
    """What each instance has or awaits, as far as it counts."""
    h, i = world.store.tables.hold.c, world.store.tables.instance.c
    query = sa.select(i.instance_id, h.state).join(world.store.tables.instance, i.id == h.instance_pk)
    return [tuple(row) for row in world.rows(query.order_by(h.seq, h.name))]


def serve(world: World) -> None:
    LimitQueue(world.store, world.settings, world.messages.extend).run_job()


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
