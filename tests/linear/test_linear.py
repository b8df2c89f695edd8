"""Linear workflows: rows are inserted when a run begins, and handlers move them along."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pytest

from celery_durable import Completed, LinearContext, LinearStep, LinearWorkflow, Retry, TaskType, Waiting, current_step
from celery_durable.definitions import define_linear
from celery_durable.errors import DefinitionInvalid, InstanceTerminal
from tests.support.lines import Line, done, rows, state, waits_for
from tests.support.world import World, insert_name, on_one_database

# --- the arrows of both machines ----------------------------------------------------------------


def test_all_steps_are_inserted_at_the_start(world: World) -> None:
    instance = Line(world).flow.create()
    assert (rows(instance), state(instance)) == (["READY", "PENDING", "PENDING"], "RUNNING")
    first = instance.steps()[0]
    assert (first.step_key, first.name, first.max_attempts, first.next_retry_at) == ("0", "VALIDATE", 3, world.now)
    assert instance.row.kind == "linear"


def test_completed_makes_the_next_step_ready_and_the_last_one_completes_the_instance(world: World) -> None:
    line = Line(world)
    instance = line.flow.create({"cents": 5})
    worker = world.new_worker()
    walked = [(rows(instance), state(instance))]
    while instance.status == "active":  # one commit after the other
        worker.runtime.at["after-commit"] = lambda: walked.append((rows(instance), state(instance)))
        world.messages.clear()
        worker.runner.advance(instance.ref, task_id="task", node="worker", max_steps=1)
    world.run_until_idle()
    assert line.called == [("VALIDATE", "RUN", 1), ("PAY", "RUN", 1), ("SHIP", "RUN", 1)]
    assert [ctx.params for ctx in line.calls] == [{"cents": 5}] * 3
    assert line.calls[2].results == {"VALIDATE": "VALIDATE done", "PAY": "PAY done"}
    assert (rows(instance), state(instance), instance.output) == (["DONE"] * 3, "COMPLETED", "SHIP done")


def test_a_claimed_step_is_running_and_one_whose_worker_died_is_ready_again(world: World) -> None:
    line = Line(world)
    instance = line.flow.create()
    world.new_worker().runtime.crash_at = "after-body"
    world.run_until_idle()
    assert (rows(instance), line.called) == (["RUNNING", "PENDING", "PENDING"], [("VALIDATE", "RUN", 1)])
    recovering = world.new_worker()

    def die_when_recovered() -> None:
        recovering.runtime.at["after-commit"] = die_when_recovered
        if rows(instance)[0] == "READY":
            recovering.die()

    die_when_recovered()
    world.run_after(31)
    step = instance.steps()[0]
    assert step.error is not None
    assert (rows(instance)[0], step.attempts, step.error.name) == ("READY", 1, "LEASE_EXPIRED")
    world.run_after(31)
    world.run_after(1)  # the second death in a row costs a second
    assert (rows(instance), line.called[1]) == (["DONE"] * 3, ("VALIDATE", "RUN", 2))


def test_waiting_ends_with_the_event(world: World) -> None:
    line = Line(world, PAY=waits_for("paid", "1 hour"))
    instance = line.flow.run()
    assert (rows(instance), state(instance), instance.status) == (["DONE", "WAITING", "PENDING"], "RUNNING", "waiting")
    step = instance.steps()[1]
    assert (step.wait_event_type, step.wake_at) == ("paid", world.now + timedelta(hours=1))
    assert step.next_retry_at is None
    assert instance.run_at == step.wake_at
    instance.send("other")
    world.run_until_idle()
    assert rows(instance)[1] == "WAITING"
    instance.send("paid", {"by": "eve"})
    world.worker.runtime.crash_at = "before-body"  # READY, then RUNNING: dead before the handler
    world.run_until_idle()
    assert rows(instance)[1] == "RUNNING"
    assert (instance.steps()[1].wait_event_type, instance.steps()[1].wake_at) == (None, None)
    world.run_after(100)  # the event is not lost with the worker
    assert line.called[1:3] == [("PAY", "RUN", 1), ("PAY", "EVENT", 2)]
    assert line.calls[2].event is not None
    assert (line.calls[2].event.type, line.calls[2].event.payload) == ("paid", {"by": "eve"})
    assert (state(instance), instance.events()) == ("COMPLETED", [("other", None, None), ("paid", {"by": "eve"}, "1")])


def test_waiting_ends_with_its_time(world: World) -> None:
    line = Line(world, PAY=waits_for("paid", "1 hour"))
    instance = line.flow.run()
    world.run_after(3599)
    assert rows(instance)[1] == "WAITING"
    world.run_after(1)
    assert line.called[1:3] == [("PAY", "RUN", 1), ("PAY", "WAITING_TIMEOUT", 1)]
    assert state(instance) == "COMPLETED"


def test_terminate_cancels_and_the_rows_stay_as_they_were(world: World) -> None:
    instance = Line(world, PAY=waits_for()).flow.run()
    instance.terminate("by mistake")
    assert (rows(instance), state(instance)) == (["DONE", "WAITING", "PENDING"], "CANCELED")
    with pytest.raises(InstanceTerminal):
        instance.send("paid")


@pytest.mark.parametrize(("stop", "status"), [("pause", "paused"), ("cancel", "terminated")])
@pytest.mark.parametrize("waits", [False, True])
def test_a_pause_or_a_cancel_ends_it_before_the_next_step(world: World, stop: str, status: str, waits: bool) -> None:
    def stop_it(ctx: LinearContext) -> Completed:
        getattr(world.operations.lifecycle, stop)("order", "i-1")
        return done(ctx)

    line = Line(world, VALIDATE=waits_for() if waits else stop_it)
    instance = line.flow.run()
    if waits:
        getattr(world.operations.lifecycle, stop)("order", "i-1")
        world.run_until_idle()
    assert (instance.status, line.called) == (status, [("VALIDATE", "RUN", 1)])
    assert rows(instance) == ["WAITING" if waits else "DONE", *(["PENDING"] * 2 if waits else ["READY", "PENDING"])]


# --- events -------------------------------------------------------------------------------------


def test_an_early_event_is_kept_and_consumed_on_entering_the_wait(world: World) -> None:
    line = Line(world, PAY=waits_for())
    instance = line.flow.create()
    instance.send("paid", "early")
    world.run_until_idle()
    assert line.called[1:3] == [("PAY", "RUN", 1), ("PAY", "EVENT", 1)]
    assert (state(instance), instance.steps()[1].result) == ("COMPLETED", "early")


def test_a_retry_of_an_event_gets_the_same_event(world: World) -> None:
    def once_more(ctx: LinearContext) -> Any:
        if ctx.task_type is TaskType.RUN:
            return Waiting("paid")
        return Retry("1 s", "again") if ctx.attempt == 1 else Completed(ctx.event.payload)  # type: ignore[union-attr]

    instance = Line(world, [LinearStep("PAY")], PAY=once_more).flow.run()
    instance.send("paid", 1)
    instance.send("paid", 2)
    world.run_until_idle()
    assert rows(instance) == ["READY"]
    world.run_after(1)
    assert instance.output == 1
    assert [consumer for _, _, consumer in instance.events()] == ["0", None]


def test_a_step_may_wait_again(world: World) -> None:
    def twice(ctx: LinearContext) -> Any:
        if ctx.event is not None and ctx.event.type == "b":
            return Completed(ctx.event.payload)
        return Waiting("a" if ctx.event is None else "b", "1 h")

    instance = Line(world, [LinearStep("PAY")], PAY=twice).flow.run()
    instance.send("b", "early")
    instance.send("a")
    world.run_until_idle()
    assert instance.output == "early"


def test_a_step_that_waits_again_in_vain_is_called_without_its_last_event(world: World) -> None:
    events: list[str | None] = []

    def twice(ctx: LinearContext) -> Any:
        events.append(None if ctx.event is None else ctx.event.type)
        return Waiting("a" if len(events) == 1 else "b", "1 h") if len(events) < 3 else Completed(None)

    instance = Line(world, [LinearStep("PAY")], PAY=twice).flow.run()
    instance.send("a")
    world.run_until_idle()
    world.run_after(3600)
    assert events == [None, "a", None]
    assert state(instance) == "COMPLETED"


# --- lifecycle ---------------------------------------------------------------------------------


def test_an_event_that_came_during_a_pause_is_found_after_it(world: World) -> None:
    instance = Line(world, PAY=waits_for()).flow.run()
    instance.pause()
    instance.send("paid", "meanwhile")
    world.run_until_idle()
    assert rows(instance)[1] == "WAITING"
    instance.resume()
    world.run_until_idle()
    assert instance.steps()[1].result == "meanwhile"


@pytest.mark.parametrize("waits", [False, True])
def test_workers_that_die_before_a_step_begins_end_the_instance_after_so_many(world: World, waits: bool) -> None:
    line = Line(world, VALIDATE=waits_for() if waits else done)
    instance = line.flow.run() if waits else line.flow.create()
    if waits:
        world.advance(timedelta(hours=1))
    while instance.row.crash_count < 4:
        world.new_worker().runtime.crash_at = "claimed"
        world.run_after(100)
    last = world.new_worker()
    last.runtime.crash_at = "before-body"
    while not last.runtime.is_dead:
        world.run_after(100)
    world.new_worker()
    for _ in range(2):
        world.run_after(100)
    assert (rows(instance)[0], state(instance), len(line.calls)) == ("DEAD", "FAILED", waits)
    assert instance.error.startswith("WorkerCrashLoop: 5 workers in a row died")


@on_one_database
def test_a_linear_step_is_listed_as_waiting_since_its_handler_was_called(world: World) -> None:
    line = Line(world, VALIDATE=lambda ctx: world.advance(60) or done(ctx), PAY=waits_for("paid", "1 hour"))
    instance = line.flow.create()
    started_at = world.now + timedelta(seconds=60)
    world.run_until_idle()
    assert (rows(instance), world.now) == (["DONE", "WAITING", "PENDING"], started_at)
    (wait,) = world.operations.stats.waits().items
    assert (wait.step_name, wait.since, wait.wake_at) == ("PAY", started_at, started_at + timedelta(hours=1))


# --- definitions --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ([], "Linear workflow 'order' has no steps: nothing would ever happen. Give it at least one."),
        (
            [LinearStep("PAY"), LinearStep("SHIP"), LinearStep("PAY")],
            "Linear workflow 'order' has step 'PAY' twice. A step's name finds its handler and its result: give the "
            "second another name; two names may have the same handler.",
        ),
    ],
    ids=["none", "twice"],
)
def test_a_list_that_cannot_be_is_refused(steps: list[LinearStep], said: str) -> None:
    with pytest.raises(DefinitionInvalid) as refused:
        define_linear("order", module=__name__, version=1, steps=steps)
    assert str(refused.value) == said


def test_a_handler_may_be_async(world: World) -> None:
    calls: list[tuple[str, Any]] = []

    async def pay(ctx: LinearContext) -> Completed | Waiting:
        await asyncio.sleep(0)
        calls.append((str(ctx.task_type), None if ctx.event is None else ctx.event.payload))
        if ctx.event is None:
            return Waiting("paid", timeout="1 hour")
        ctx.tx.mutate(insert_name("paid"))
        ctx.log.info("paid")
        return Completed(ctx.params)

    line = Line(world, [LinearStep("PAY")])
    line.flow.definition.handlers["PAY"] = pay
    instance = line.flow.run({"cents": 5})
    instance.send("paid", 7)
    world.run_until_idle()
    assert (instance.output, calls) == ({"cents": 5}, [("RUN", None), ("EVENT", 7)])
    assert (world.names(), instance.lines()) == (["paid"], ["paid"])


def test_an_async_handler_is_cancelled_at_its_timeout(world: World) -> None:
    async def pay(ctx: LinearContext) -> Completed:
        if ctx.attempt == 1:
            await asyncio.sleep(3600)
        return Completed(ctx.attempt)

    line = Line(world, [LinearStep("PAY", timeout=0.05, delay=0)])
    line.flow.definition.handlers["PAY"] = pay
    instance = line.flow.run()
    world.run_after(1)
    assert instance.output == 2


def test_an_async_generator_is_refused_where_it_is_registered() -> None:
    async def pay(ctx: LinearContext) -> AsyncIterator[Completed]:
        yield Completed()

    flow = LinearWorkflow("refuses-async", version=1, steps=[LinearStep("PAY")])
    with pytest.raises(DefinitionInvalid):
        flow.handler("PAY")(pay)  # type: ignore[type-var]
    assert flow.definition.handlers == {}


def test_a_handler_that_asks_ends_with_the_cancel_of_its_run(world: World) -> None:
    def poll(ctx: LinearContext) -> Completed:
        ctx.log.info("asked the bank")
        instance.cancel("sold twice")
        world.worker.renew_leases()
        current_step().check()
        return Completed("paid")

    line = Line(world, PAY=poll)
    instance = line.flow.create()
    world.run_until_idle()
    reason = world.operations.history.read("order", "i-1").reason
    assert (state(instance), reason) == ("CANCELED", "cancelled: sold twice")
    assert [step for step, _, _ in line.called] == ["VALIDATE", "PAY"]
    assert [each.message for each in world.operations.history.logs("order", "i-1")] == ["asked the bank"]
