"""Limits while many workers take, give back and wake at the same time."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor, as_completed

import sqlalchemy as sa

from celery_durable import Limit
from celery_durable.model import RunRef
from tests.support.databases import on_databases
from tests.support.limits import Bodies, define, holds, serve
from tests.support.world import Worker, World

database = on_databases("postgresql", "mariadb")
_WORKERS, _AT_ONCE, _SECONDS = 8, 3, 30


def test_workers_at_many_keys_run_each_step_once_and_no_more_at_once_than_allowed(world: World, bodies: Bodies) -> None:
    """MariaDB may end one of two transactions as a deadlock: it is repeated, and no step runs again."""
    stripe = Limit("stripe", at_once=_AT_ONCE, fair=lambda event: event.payload % 5)
    order = define(world, bodies, stripe, Limit("tenant", at_once=1, by=lambda event: event.payload % 20))
    ids, may_end = [f"o-{number}" for number in range(40)], threading.Event()
    for number, each in enumerate(ids):
        order.create(number, id=each)
        bodies.during[each] = lambda: may_end.wait(_SECONDS)
    workers = [world.new_worker() for _ in range(_WORKERS)]
    with ThreadPoolExecutor(_WORKERS) as pool:
        draining = [pool.submit(_drain, world, worker) for worker in workers]
        try:  # those that are in no body find that nobody else may run, and end
            list(itertools.islice(as_completed(draining, _SECONDS), _WORKERS - _AT_ONCE))
        finally:
            running = len(bodies.running)
            may_end.set()
        for each in draining:
            each.result()
        while world.tick() or world.messages:
            list(pool.map(lambda worker: _drain(world, worker), workers))
    assert (running, bodies.most) == (_AT_ONCE, _AT_ONCE)
    assert sorted(bodies.ran) == sorted(ids)
    assert {order.of(each).output for each in ids} == set(ids)
    assert holds(world) == []


def _drain(world: World, worker: Worker) -> None:
    while True:
        try:
            due = world.messages.pop(0)
        except IndexError:
            return
        worker.advance(due.ref)


def test_a_row_that_somebody_has_locked_holds_up_no_other_instance(world: World, bodies: Bodies) -> None:
    order = define(world, bodies, Limit("stripe", at_once=2))
    for each in "abcd":
        order.create(id=each)
    first, second = world.new_worker(), world.new_worker()

    def die_after_its_commit(worker: Worker) -> None:
        worker.runtime.crash_at = "after-commit"

    bodies.during["a"] = lambda: (second.advance(RunRef("order", "b", 1)), die_after_its_commit(first))
    bodies.during["b"] = lambda: (bodies.pass_over("c", "d"), die_after_its_commit(second))
    first.advance(RunRef("order", "a", 1))
    assert holds(world) == [("c", "waiting"), ("d", "waiting")]
    world.messages.clear()
    i, pk = world.store.tables.instance.c, order.of("c").row.id
    with world.store.engine.begin() as other:
        other.execute(sa.select(i.id).where(i.id == pk).with_for_update())
        serve(world)
        assert [due.ref.instance_id for due in world.messages] == ["d"]
    world.advance(1)
    serve(world)
    assert [due.ref.instance_id for due in world.messages] == ["d", "c"]
    world.run_until_idle()
