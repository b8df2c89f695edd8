"""Pauses, wakes and terminations whose commit is in doubt: the connection broke, and meanwhile others went on."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from operator import attrgetter

import pytest

from celery_durable import Step, WorkflowEvent, signals
from celery_durable.model import InstanceRow
from celery_durable.store import claims
from celery_durable.store.claims import Claim, ClaimRequest
from tests.engine.instances import Instance
from tests.engine.world import World
from tests.store.lost_connections import cut_commit

pytestmark = pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)
cuts = pytest.mark.parametrize("when", ["before", "after"])


@cuts
def test_a_termination_in_doubt_does_not_end_the_next_run(world: World, order, others, when) -> None:
    instance = order.run()
    with cut_commit(world.store, when=when, then=lambda: others.rewind.restart("order", instance.id)):
        instance.terminate()
    assert (instance.row.run_number, instance.status) == (2, "active")


@cuts
def test_the_end_of_a_child_in_doubt_wakes_its_parent(world: World, order, when) -> None:
    @world.workflow
    def parent(event: WorkflowEvent, step: Step):
        step.child("order", order, id="o-1")

    instance = parent.run()
    world.messages.clear()
    with cut_commit(world.store, when=when) as cut:
        order.of("o-1").terminate()
    assert (cut, [due.ref for due in world.messages]) == ([when], [instance.ref])


@pytest.fixture
def paused():
    """The ids of the instances whose pause was notified."""
    ids: list[str] = []

    def note(status: str, instance_id: str, **_: object) -> None:
        if status == "paused":
            ids.append(instance_id)

    signals.workflow_suspended.connect(note)
    yield ids
    signals.workflow_suspended.disconnect(note)


@cuts
def test_a_pause_in_doubt_returns_the_row_before_it_and_is_notified_once(world: World, order, paused, when) -> None:
    instance = order.run()
    with cut_commit(world.store, when=when) as cut:
        before = world.operations.lifecycle.pause("order", instance.id, if_version=[instance.tag])
    assert cut == [when]
    assert (before.status, instance.status, paused) == ("waiting", "paused", [instance.id])


@cuts
def test_a_pause_in_doubt_of_an_instance_that_another_resumed_is_done(world: World, order, others, when) -> None:
    instance = order.run()

    def pause_and_resume() -> None:
        others.lifecycle.pause("order", instance.id)
        others.lifecycle.resume("order", instance.id)

    with cut_commit(world.store, when=when, then=pause_and_resume) as cut:
        world.operations.lifecycle.pause("order", instance.id)
    assert cut == [when]
    assert instance.status == "paused"


@cuts
@pytest.mark.parametrize(("act", "status"), [("rewind.restart", "active"), ("lifecycle.terminate", "terminated")])
def test_a_pause_in_doubt_does_not_affect_what_another_did_meanwhile(
    world: World, order, others, when, act, status
) -> None:
    instance = order.run()
    with cut_commit(world.store, when=when, then=lambda: attrgetter(act)(others)("order", instance.id)) as cut:
        before = world.operations.lifecycle.pause("order", instance.id)
    assert cut == [when]
    assert (before.status, instance.status) == ("waiting", status)


@cuts
def test_a_requested_pause_in_doubt_returns_the_row_before_it(world: World, paused, when) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.do("work", work)
        step.do("rest", lambda: None)

    def work() -> None:
        instance = order.of("o-1")
        with cut_commit(world.store, when=when) as cut:
            tag = instance.tag
            requests.append(world.operations.lifecycle.pause("order", "o-1", if_version=[tag]))
        assert cut == [when]

    requests: list[InstanceRow] = []
    assert order.run(id="o-1").status == "paused"
    (before,) = requests
    assert (before.claim_token is None, before.pause_requested) == (False, False)
    assert paused == ["o-1"]


@cuts
def test_a_resume_in_doubt_returns_the_row_before_it_and_sends_its_message(world: World, order, when) -> None:
    instance = order.run()
    instance.pause()
    with cut_commit(world.store, when=when) as cut:
        before = world.operations.lifecycle.resume("order", instance.id, if_version=[instance.tag])
    assert cut == [when]
    assert (before.status, instance.status, [due.ref for due in world.messages]) == ("paused", "active", [instance.ref])


@cuts
def test_a_resume_in_doubt_of_an_instance_that_another_paused_is_done(world: World, order, others, when) -> None:
    instance = order.run()
    instance.pause()

    def resume_and_pause() -> None:
        others.lifecycle.resume("order", instance.id)
        others.lifecycle.pause("order", instance.id)

    with cut_commit(world.store, when=when, then=resume_and_pause) as cut:
        world.operations.lifecycle.resume("order", instance.id)
    assert cut == [when]
    assert instance.status == "active"


def claim(world: World, instance: Instance) -> Claim:
    request = ClaimRequest(instance.ref, token="t" * 36, task_id="t-1", node="w-9", lease=timedelta(minutes=1))
    found = world.store.transact(lambda tx: claims.claim(tx, request))
    assert found is not None
    return found


@cuts
def test_a_wake_in_doubt_is_done_and_sends_its_message(world: World, order, when) -> None:
    instance = order.run()
    with cut_commit(world.store, when=when) as cut:
        assert world.operations.lifecycle.wake("order", instance.id, if_version=[instance.tag]) is True
    assert cut == [when]
    assert (instance.status, [due.ref for due in world.messages]) == ("active", [instance.ref])


def test_a_wake_in_doubt_that_a_worker_has_followed_is_done(world: World, order) -> None:
    instance = order.run()
    with cut_commit(world.store, when="after", then=lambda: claim(world, instance)) as cut:
        assert world.operations.lifecycle.wake("order", instance.id, if_version=[instance.tag]) is True
    assert cut == ["after"]


def test_a_wake_in_doubt_of_an_instance_that_ended_meanwhile_is_done(world: World, order, others) -> None:
    instance = order.run()
    with cut_commit(world.store, when="after", then=lambda: others.lifecycle.terminate("order", instance.id)):
        assert world.operations.lifecycle.wake("order", instance.id) is True


@cuts
def test_a_second_wake_in_doubt_is_done(world: World, order, when) -> None:
    instance = order.run()
    world.operations.lifecycle.wake("order", instance.id)
    world.advance(1)
    woken_at = instance.run_at
    with cut_commit(world.store, when=when) as cut:
        assert world.operations.lifecycle.wake("order", instance.id, if_version=[instance.tag]) is True
    assert cut == [when]
    assert instance.run_at > woken_at


def test_a_wake_that_was_not_applied_is_repeated_after_an_event_that_no_wait_is_for(world, order, others) -> None:
    instance = order.run()
    send = partial(others.events.send, "order", instance.id, "other")
    with cut_commit(world.store, when="before", then=send):
        assert world.operations.lifecycle.wake("order", instance.id) is True
    assert instance.status == "active"


@cuts
def test_a_wake_in_doubt_of_a_paused_instance_changes_nothing(world: World, order, others, when) -> None:
    instance = order.run()
    instance.pause()
    tag, resume = instance.tag, partial(others.lifecycle.resume, "order", instance.id)
    with cut_commit(world.store, when=when, then=resume) as cut:
        assert world.operations.lifecycle.wake("order", instance.id, if_version=[tag]) is False
    assert cut == [when]
