"""Pauses, resumes, wakes and terminations whose commit is in doubt: the connection broke, and they are repeated."""

from __future__ import annotations

import pytest

from celery_durable import Step, WorkflowEvent, signals
from tests.support.lost_connections import cut_commit, stays_in_doubt
from tests.support.world import World

pytestmark = pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)
cuts = pytest.mark.parametrize("when", ["before", "after"])
ACTS = {"pause": "paused", "resume": "active", "wake": "active"}


def prepare(order, act: str):
    """An instance whose id is the act, for which it is ready."""
    instance = order.run(id=act)
    if act == "resume":
        instance.pause()
    return instance


@cuts
def test_what_is_in_doubt_is_repeated_until_it_is_done(world: World, order, when) -> None:
    for act, status in ACTS.items():
        instance = prepare(order, act)
        with cut_commit(world.store, when=when) as cut:
            getattr(world.operations.lifecycle, act)("order", act)
        assert (cut, instance.status) == ([when], status)


@cuts
def test_a_version_that_the_repetition_finds_changed_leaves_the_change_in_doubt(world: World, order, when) -> None:
    for act, status in ACTS.items():
        instance = prepare(order, act)
        with cut_commit(world.store, when=when) as cut, stays_in_doubt(when == "after"):
            getattr(world.operations.lifecycle, act)("order", act, if_version=[instance.tag])
        assert (cut, instance.status) == ([when], status)


@cuts
def test_a_pause_in_doubt_is_not_repeated_on_an_instance_that_has_ended(world: World, order, others, when) -> None:
    instance = order.run()
    end = lambda: others.lifecycle.terminate("order", instance.id)
    with cut_commit(world.store, when=when, then=end) as cut, stays_in_doubt():
        world.operations.lifecycle.pause("order", instance.id)
    assert (cut, instance.status) == ([when], "terminated")


@cuts
@pytest.mark.parametrize("act", ["terminate", "cancel"])
def test_an_end_in_doubt_does_not_end_the_next_run(world: World, order, others, when, act) -> None:
    instance, ended = order.run(), []
    world.run_until_idle()

    def note(**about: object) -> None:
        ended.append(about)

    signals.workflow_terminated.connect(note)
    with cut_commit(world.store, when=when, then=lambda: others.rewind.restart("order", instance.id)):
        getattr(instance, act)()
    signals.workflow_terminated.disconnect(note)
    assert (instance.row.run_number, instance.status, len(ended)) == (2, "active", 0)


@cuts
def test_the_end_of_a_child_in_doubt_continues_its_parent(world: World, order, when) -> None:
    @world.workflow
    def parent(event: WorkflowEvent, step: Step):
        step.child("order", order, id="o-1")

    instance = parent.run()
    with cut_commit(world.store, when=when) as cut:
        order.of("o-1").terminate()
    assert cut == [when]
    world.run_after(60)  # a sweep finds it
    assert (instance.status, order.of("o-1").status) == ("errored", "terminated")
