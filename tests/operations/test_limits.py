"""Operators see limits and set their numbers."""

from __future__ import annotations

from datetime import timedelta

import pytest

from celery_durable import Limit
from celery_durable.errors import LimitNotFound
from tests.support.databases import on_databases
from tests.support.limits import Bodies, define, holds, serve
from tests.support.world import World

database = on_databases("sqlite", "postgresql", "mariadb")


def test_a_higher_number_is_granted_at_once_and_counts_until_it_is_reset(world: World, bodies: Bodies) -> None:
    order = define(world, bodies, Limit("stripe", at_once=1))
    for each in "abcd":
        order.create(id=each)
    seen = []

    def raise_it() -> None:
        bodies.pass_over("b", "c", "d")
        world.operations.limits.set("stripe", at_once=2, by="ann")
        seen.append(holds(world))
        world.operations.limits.set("stripe", at_once=None, rate=None, by="ann")
        (limit,) = world.operations.limits.list().items
        seen.append((limit.at_once, limit.set_by, limit.held, limit.waiting.count, limit.name, limit.key))

    bodies.during["a"] = raise_it
    bodies.pass_over("a")
    assert seen == [
        [("a", "held"), ("b", "granted"), ("c", "waiting"), ("d", "waiting")],
        (1, None, 2, 2, "stripe", ""),
    ]
    world.run_until_idle()
    assert bodies.ran == ["a", "b", "c", "d"]


def test_a_lower_number_stops_nobody(world: World, bodies: Bodies) -> None:
    order = define(world, bodies, Limit("stripe", at_once=2))
    for each in "abc":
        order.create(id=each)

    def lower_it() -> None:
        world.operations.limits.set("stripe", at_once=1, by="ann")
        bodies.pass_over("c")

    bodies.during["b"] = lower_it
    bodies.during["a"] = lambda: bodies.pass_over("b")
    bodies.pass_over("a")
    world.run_until_idle()
    assert bodies.ran == ["a", "b", "c"]
    assert [order.of(each).output for each in "abc"] == ["a", "b", "c"]
    assert world.operations.limits.get("stripe").limit.set_by == "ann"


@pytest.mark.parametrize("by", ["the code", "ann"])
def test_a_higher_rate_counts_at_once(world: World, bodies: Bodies, by: str) -> None:
    order = define(world, bodies, Limit("stripe", rate="1 per hour"))
    for each in "abc":
        order.create(id=each)
    world.run_until_idle()
    assert bodies.ran == ["a"]
    if by == "the code":
        order = define(world, bodies, Limit("stripe", rate="10 per second"))
    else:
        world.operations.limits.set("stripe", rate="10 per second", by=by)
    order.create(id="d")
    for _ in range(5):
        world.run_after(1)
        serve(world)
    assert sorted(bodies.ran) == ["a", "b", "c", "d"]
    assert holds(world) == []


def test_a_limit_shows_who_holds_it_and_who_waits(world: World, bodies: Bodies) -> None:
    order = define(world, bodies, Limit("tenant", at_once=1, by=lambda event: event.payload))
    for each in "abc":
        order.create("acme", id=each)
    seen = []

    def look() -> None:
        bodies.pass_over("b", "c")
        world.advance(5)
        seen.append(world.operations.limits.get("tenant", key="acme"))

    bodies.during["a"] = look
    bodies.pass_over("a")
    (details,) = seen
    assert [(hold.instance_id, hold.step_key, hold.state) for hold in details.holders] == [("a", "call", "held")]
    assert [(hold.instance_id, hold.state) for hold in details.waiting] == [("b", "waiting"), ("c", "waiting")]
    assert (details.limit.held, details.limit.waiting.count) == (1, 2)
    assert details.limit.longest_wait.total_seconds() == 5
    world.run_until_idle()


def test_what_is_set_for_all_keys_counts_for_later_ones(world: World, bodies: Bodies) -> None:
    order = define(world, bodies, Limit("tenant", at_once=1, by=lambda event: event.payload))
    order.run("acme", id="a")
    world.operations.limits.set("tenant", at_once=2, by="ann")
    order.run("bolt", id="b")
    world.operations.limits.set("tenant", key="acme", at_once=3, by="bob")
    shown = {limit.key: (limit.at_once, limit.set_by) for limit in world.operations.limits.list(name="tenant").items}
    assert shown == {"": (2, "ann"), "acme": (3, "bob"), "bolt": (2, "ann")}


def test_limits_that_nothing_has_asked_for_in_a_week_are_deleted(world: World, bodies: Bodies) -> None:
    order = define(world, bodies, Limit("tenant", at_once=1, by=lambda event: event.payload), Limit("used", at_once=1))
    for each in ("acme", "bolt", "core"):
        order.run(each, id=each)
    world.operations.limits.set("tenant", key="bolt", at_once=2, by="ann")
    seen = []

    def delete_unused() -> None:
        for _ in range(5):
            world.operations.retention.run_job()
        seen.append([(limit.name, limit.key) for limit in world.operations.limits.list().items])

    delete_unused()
    order.create("acme", id="holds")
    bodies.during["holds"] = lambda: (world.advance(timedelta(days=8)), delete_unused())
    bodies.pass_over("holds")
    assert seen[0] == [("tenant", "acme"), ("tenant", "bolt"), ("tenant", "core"), ("used", "")]
    assert seen[1] == [("tenant", "acme"), ("tenant", "bolt"), ("used", "")]
    assert order.run("core", id="again").output == "again"
    world.run_after(2 * world.settings.lease)


def test_a_limit_that_nothing_has_asked_for_is_not_found(world: World) -> None:
    with pytest.raises(LimitNotFound) as refused:
        world.operations.limits.set("strpe", at_once=2, by="ann")
    assert str(refused.value) == (
        "No step has asked for limit 'strpe' yet. Check the name: `durable limits` lists those that have been used."
    )
