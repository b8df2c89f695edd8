"""Forks, and instances that are restarted or created."""

from __future__ import annotations

import pytest

from celery_durable.errors import InstanceAlreadyExists, ValueRefused, VersionMismatch
from celery_durable.model import Origin, Status
from tests.support.flows import flow_of
from tests.support.rewinds import fork
from tests.support.world import World

# --- fork ---------------------------------------------------------------------------------------


def test_a_fork_is_an_instance_of_its_own_that_goes_on_from_there(world: World, abc, ran: list[str]) -> None:
    instance = abc.run({"n": 1})
    before = instance.row
    other = fork(instance, "c")
    world.run_until_idle()
    assert other.output == ["a1", "b1", "c1"]
    assert ran == ["a1", "b1", "c1", "c1"]
    assert instance.row == before
    history = world.operations.history.read("order", "f-1")
    assert (history.run_number, history.params, history.origin) == (1, {"n": 1}, Origin("i-1", 1, "c"))


def test_a_fork_s_id_must_be_free(world: World, abc) -> None:
    instance = abc.run()
    fork(instance, "c")
    with pytest.raises(InstanceAlreadyExists):
        fork(instance, "b")
    assert world.instance("order", "f-1").statuses() == {"a": "completed", "b": "completed"}
    assert len({world.operations.rewind.fork("order", "i-1", "c") for _ in range(2)}) == 2


def test_events_that_a_fork_takes_along_come_before_its_own(world: World) -> None:
    order = flow_of(
        world, lambda step: [step.wait_for_event(name, "paper").payload for name in ("first", "second", "third")]
    )
    instance = order.run()
    instance.send("paper", 1)
    world.run_until_idle()
    instance.pause()
    instance.send("paper", 2)
    other = fork(instance, "second")
    other.send("paper", 3)
    world.run_until_idle()
    assert other.output == [1, 2, 3]
    assert instance.status == "paused"


# --- restart or create --------------------------------------------------------------------------


def test_restart_or_create_tells_which_happened(world: World, abc) -> None:
    def call(**options):
        done = world.operations.create.restart_or_create("order", {"n": 1}, id="i-1", **options)
        return done.outcome, done.run_number, str(done.status)

    assert call() == ("created", 1, "active")
    assert call() == ("unchanged", 1, "active")
    world.run_until_idle()
    assert call(if_status=["errored"]) == ("unchanged", 1, "complete")
    assert call() == ("restarted", 2, "active")
    assert call(if_status=[Status.ACTIVE]) == ("restarted", 3, "active")
    with pytest.raises(VersionMismatch):
        call(if_version=[1])
    assert world.instance("order", "i-1").row.run_number == 3
    world.run_until_idle()
    assert world.operations.history.read("order", "i-1").params == {"n": 1}


def test_restart_or_create_checks_what_it_would_create(world: World, abc) -> None:
    with pytest.raises(ValueRefused, match="asleep"):
        world.operations.create.restart_or_create("order", id="i-1", if_status=["asleep"])
    assert world.operations.queries.list("order").items == ()
