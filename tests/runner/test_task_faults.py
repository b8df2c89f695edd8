"""Task steps whose runner dies, whose commit is in doubt, or whose message is late."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from celery_durable import Step, WorkflowEvent
from tests.support.answers import answer, resize
from tests.support.databases import on_databases
from tests.support.flows import flow_of
from tests.support.lost_connections import cut_commit
from tests.support.world import World, on_one_database

database = on_databases("sqlite", "postgresql", "mariadb")


@pytest.mark.parametrize("place", ["before-commit", "after-commit"])
def test_a_runner_that_dies_at_the_commit_sends_it_once(world: World, media, place: str) -> None:
    instance = media.create(300)
    world.worker.runtime.crash_at = place if place == "before-commit" else 3
    world.tick()
    world.run_after(60)
    assert len({message.id for message in world.sent}) == 1
    answer(world, world.sent[0], "done")
    world.run_until_idle()
    assert instance.output == "done"


@pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)
@pytest.mark.parametrize("when", ["before", "after"])
def test_an_answer_whose_commit_is_in_doubt_is_taken_once(world: World, media, when: str) -> None:
    instance = media.run(300)
    with cut_commit(world.store, when=when) as cut:
        answer(world, world.sent[0], "done")
    assert cut == [when]
    world.run_after(60)
    assert (instance.output, len(instance.events())) == ("done", 1)


@pytest.mark.parametrize("database", ["postgresql", pytest.param("mariadb", marks=pytest.mark.slow)], indirect=True)
@pytest.mark.parametrize("kind", ["task", "event", "map", "child"])
def test_a_race_whose_commit_was_in_doubt_is_decided(world: World, kind: str) -> None:
    """The winner's row was found, and its verdict with it: the race must not wait for the loser."""
    kid = flow_of(world, lambda step: step.wait_for_event("go", "go").payload, name="kid")

    @world.workflow
    def media(event: WorkflowEvent, step: Step) -> Any:
        racer: Any = {
            "task": lambda: step.submit_task("racer", resize.s(1)),
            "event": lambda: step.submit_wait_for_event("racer", "go"),
            "map": lambda: step.submit_map("racer", resize, [1]),
            "child": lambda: step.submit_child("racer", kid, id="kid-1"),
        }[kind]()
        step.first("sooner", step.submit_sleep("nap", "30 days"), racer)
        return "decided"

    instance = media.run()
    for message in world.sent:
        answer(world, message, 1)
    if kind == "child":
        world.instance("kid", "kid-1").send("go", 1)
        world.messages[:] = [due for due in world.messages if due.ref.workflow == "kid"]
        world.worker.advance(world.messages.pop(0).ref)
    if kind == "event":
        instance.send("go", 1)
    world.messages.clear()
    ways = []
    for nth in (1, 2, 3):
        with cut_commit(world.worker.store, when="after", nth=nth) as cut:
            instance.advance()
        ways += cut
        world.messages.clear()
    assert ways
    world.run_after(60)
    assert instance.output == "decided"


def test_what_is_answered_to_an_instance_that_was_deleted_is_for_nobody(world: World, media) -> None:
    instance = media.run(300)
    instance.terminate()
    world.advance(60)
    world.operations.retention.prune(older_than=timedelta(0), workflow="media")
    again = media.run(7, id=instance.id)
    assert not answer(world, world.sent[0], "of the one before")
    answer(world, world.sent[1], "its own")
    world.run_until_idle()
    assert again.output == "its own"
    world.accepted.pop(0)


@on_one_database
def test_a_message_that_was_overtaken_by_its_time_does_not_leave(world: World, media) -> None:
    world.is_broker_away = True
    media.run(300)
    world.run_after(3600)
    world.run_after(30)
    world.is_broker_away = False
    world.run_after(3600)
    assert len(world.sent) == 1
