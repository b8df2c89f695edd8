"""What limits of other engines have got wrong, by the number of the issue. More of them are in `test_limits`."""

from __future__ import annotations

import itertools
from collections import Counter

from celery_durable import Limit, Retries, Step, WorkflowEvent
from celery_durable.model import RunRef
from tests.support.databases import on_databases
from tests.support.limits import Bodies, define, holds, serve
from tests.support.world import World

database = on_databases("sqlite", "postgresql", "mariadb")


def test_a_worker_that_was_taken_for_dead_frees_nothing_when_it_ends(world: World, bodies: Bodies) -> None:
    """Its late end released the lock of its successor, and a limit of 1 ran 11 jobs (solid_queue#761)."""
    order = define(world, bodies, Limit("stripe", at_once=1))
    for each in "abc":
        order.create(id=each)

    def be_taken_for_dead() -> None:
        bodies.pass_over("b", "c")
        world.messages.clear()
        world.advance(2 * world.settings.lease)
        world.sweeper.sweep()
        serve(world)
        successor = world.new_worker()
        successor.runtime.crash_at = "before-body"  # and holds the limit until its lease ends
        successor.advance(RunRef("order", "b", 1))

    bodies.during["a"] = be_taken_for_dead
    bodies.pass_over("a")
    world.operations.limits.queue.run_job()
    assert holds(world) == [("a", "held"), ("b", "held"), ("c", "waiting")]  # a's counts no more
    world.run_after(2 * world.settings.lease)
    world.run_until_idle()
    assert sorted(bodies.ran) == ["a", "a", "b", "c"]
    assert holds(world) == []


def test_a_step_that_waits_for_its_limit_between_the_deaths_of_its_workers_is_given_up(
    world: World, bodies: Bodies
) -> None:
    """Each wait counted as progress, so a step under a full limit killed one worker after the other without a pause."""
    bank = Limit("bank", at_once=1)
    order = define(world, bodies, bank, retries=Retries(limit=None))

    @world.workflow(name="holder", limits=[bank])
    def holder(event: WorkflowEvent, step: Step) -> None:
        step.wait_for_event("go", "go")

    instance = order.create(id="a")
    for crashes in range(1, world.settings.max_crashes):
        bodies.during["a"] = lambda: world.worker.die()
        world.run_until_idle()
        world.advance(2 * world.settings.lease)
        world.sweeper.sweep()
        holding = holder.create(id=f"holder-{crashes}")
        world.worker.advance(holding.ref)
        world.run_after(60)
        assert (instance.status, instance.row.crash_count) == ("waiting", crashes)
        world.operations.lifecycle.terminate("holder", holding.id)
        serve(world)
    bodies.during["a"] = lambda: world.worker.die()
    world.run_until_idle()
    world.run_after(2 * world.settings.lease)
    world.run_after(60)
    assert instance.error.startswith("WorkerCrashLoop: 5 workers in a row ")
    assert holds(world) == []


def test_a_rate_and_a_limit_go_on_after_all_processes_have_died(world: World, bodies: Bodies) -> None:
    """The slots of the rate stayed reserved for steps that waited for the limit, for good (hatchet#4804)."""
    order = define(world, bodies, Limit("bank", at_once=2), Limit("calls", rate="2 per second"))
    for each in "abcdef":
        order.create(id=each)
    for each in "ab":
        worker = world.new_worker()
        worker.runtime.crash_at = "before-body"
        worker.advance(RunRef("order", each, 1))
    bodies.pass_over("c", "d", "e", "f")
    world.messages.clear()
    world.advance(2 * world.settings.lease)
    for _ in range(20):
        world.run_after(10)
        serve(world)
    assert [order.of(each).output for each in "abcdef"] == [*"abcdef"]
    assert holds(world) == []


def test_a_step_that_is_woken_early_keeps_its_time(world: World, bodies: Bodies) -> None:
    """Each retry of a step that waited for its rate reserved another time (galaxy#22189)."""
    order = define(world, bodies, Limit("stripe", rate="1 per minute"))
    began = []
    for each in "abc":
        order.create(id=each)
        bodies.during[each] = lambda: began.append(world.now)
    world.run_until_idle()
    for _ in range(130):
        for each in "bc":
            if order.of(each).status == "waiting":
                world.operations.lifecycle.wake("order", each)
        world.run_after(1)
        serve(world)
    assert bodies.ran == ["a", "b", "c"]
    gaps = [(later - earlier).total_seconds() for earlier, later in itertools.pairwise(began)]
    assert all(59.9 <= gap <= 62 for gap in gaps), gaps


def test_a_step_that_waits_occupies_no_worker(world: World, bodies: Bodies) -> None:
    """Tasks over their rate filled the prefetch window of the worker, and delayed all others (celery#8119)."""
    limited = define(world, bodies, Limit("stripe", at_once=1))
    plain = define(world, bodies, name="plain")
    for each in "abcde":
        limited.create(id=each)
    seen = []

    def look() -> None:
        bodies.pass_over("b", "c", "d", "e")
        world.messages.clear()
        seen.append(plain.run(id="p").output)
        seen.extend(limited.of(each).row.claim_token for each in "bcde")

    bodies.during["a"] = look
    world.new_worker().advance(RunRef("order", "a", 1))
    assert seen == ["p", None, None, None, None]
    world.run_until_idle()
    assert sorted(bodies.ran) == ["a", "b", "c", "d", "e", "p"]


def test_a_tenant_with_many_that_wait_gets_no_more_than_the_others(world: World, bodies: Bodies) -> None:
    tenants, each_waits, many = 20, 2, 30
    order = define(world, bodies, Limit("bank", at_once=3, fair=lambda event: event.payload))
    waiting = [("big", n) for n in range(many)]
    waiting += [(f"t{tenant}", n) for n in range(each_waits) for tenant in range(1, tenants)]
    for tenant, n in [("big", "first"), *waiting]:
        order.create(tenant, id=f"{tenant}-{n}")
    bodies.during["big-first"] = lambda: (
        world.operations.limits.set("bank", at_once=1, by="ann"),
        bodies.pass_over(*(f"{tenant}-{n}" for tenant, n in waiting)),
        world.operations.limits.set("bank", at_once=None, rate=None, by="ann"),
    )
    bodies.pass_over("big-first")
    world.messages.sort(key=lambda due: due.ref.instance_id)
    world.run_until_idle()
    served = Counter(each.partition("-")[0] for each in bodies.ran[1 : 1 + tenants * each_waits])
    counts = [served.get(tenant, 0) for tenant in ("big", *(f"t{n}" for n in range(1, tenants)))]
    jain = sum(counts) ** 2 / (len(counts) * sum(count**2 for count in counts))
    assert jain >= 0.95, counts
    assert len(bodies.ran) == 1 + len(waiting)
    assert holds(world) == []
