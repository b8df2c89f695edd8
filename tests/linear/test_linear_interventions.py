"""Linear runs that go on from their middle: retried, restarted from a step, forked, settled by hand."""

from __future__ import annotations

from typing import Any

import pytest

from celery_durable import Completed, Dead, LinearContext, LinearStep, Retry, TaskType, Waiting
from celery_durable.errors import InstanceNotErrored, StepNotOpen, ValueRefused
from tests.support.lines import Line, done, rows, state, waits_for
from tests.support.world import World


def dies(_: LinearContext) -> Dead:
    return Dead("no")


# --- retry --------------------------------------------------------------------------------------


def test_a_run_that_died_at_its_ninth_step_of_ten_is_retried_from_there(world: World) -> None:
    names = [f"S{number}" for number in range(1, 11)]
    line = Line(world, [LinearStep(name, max_attempts=2, timeout="30 seconds") for name in names], S9=dies)
    instance = line.flow.run()
    before = world.recorded(instance, 1)
    world.prior_runs["order", "i-1", 1] = before
    kept = instance.steps()[:8]
    line.calls.clear()
    line.answer(S9=done)

    assert world.operations.rewind.retry("order", "i-1", reason="the bank is back") == 2
    assert rows(instance) == ["DONE"] * 8 + ["READY", "PENDING"]
    assert instance.steps()[:8] == kept
    assert [(step.attempts, step.max_attempts, step.error) for step in instance.steps()[8:]] == [(0, 2, None)] * 2
    world.run_until_idle()

    assert line.called == [("S9", "RUN", 1), ("S10", "RUN", 1)]
    assert line.calls[0].results == {name: f"{name} done" for name in names[:8]}
    assert (line.calls[0].run_number, line.calls[0].version) == (2, 1)
    assert (state(instance), instance.output, rows(instance, 1)[8:]) == ("COMPLETED", "S10 done", ["DEAD", "PENDING"])
    told = world.operations.history.read("order", "i-1")
    assert (told.origin.run_number, told.origin.step_key, told.reason) == (1, "8", "the bank is back")


def test_a_retried_step_is_called_with_the_event_that_it_had(world: World) -> None:
    def pay(ctx: LinearContext) -> Any:
        if ctx.task_type is TaskType.RUN:
            return Waiting("paid", "1 hour", [("PaymentRequested", None)])
        return Dead("no")

    line = Line(world, PAY=pay)
    instance = line.flow.run()
    instance.send("paid", {"by": "eve"})
    instance.send("paid", {"by": "bob"})
    world.run_until_idle()
    failed_key = line.calls[-1].tx.idempotency_key
    line.calls.clear()
    line.answer(PAY=lambda ctx: Completed(ctx.event.payload))

    world.operations.rewind.retry("order", "i-1")
    world.run_until_idle()
    assert line.called == [("PAY", "EVENT", 1), ("SHIP", "RUN", 1)]
    assert line.calls[0].tx.idempotency_key == failed_key  # who was asked before is not asked for another payment
    assert line.calls[1].results["PAY"] == {"by": "eve"}
    assert instance.events() == [("paid", {"by": "eve"}, "1"), ("paid", {"by": "bob"}, None)]


def test_a_retried_step_whose_wait_was_over_is_told_so_again(world: World) -> None:
    def pay(ctx: LinearContext) -> Any:
        return Waiting("paid", "1 hour") if ctx.task_type is TaskType.RUN else Retry(error="nobody has paid")

    line = Line(world, [LinearStep("PAY", max_attempts=1), LinearStep("SHIP")], PAY=pay)
    instance = line.flow.run()
    world.run_after(3600)
    assert (state(instance), instance.error) == ("FAILED", "Retry: nobody has paid")
    line.calls.clear()
    line.answer(PAY=done)
    world.operations.rewind.retry("order", "i-1")
    world.run_until_idle()
    assert line.called == [("PAY", "WAITING_TIMEOUT", 1), ("SHIP", "RUN", 1)]
    assert state(instance) == "COMPLETED"


def test_a_step_that_waited_when_its_workers_died_goes_on_waiting(world: World) -> None:
    line = Line(world, PAY=waits_for("paid", "1 day"))
    instance = line.flow.run()
    deadline = instance.steps()[1].wake_at
    world.operations.lifecycle.wake("order", "i-1")
    while instance.row.crash_count < 5:
        world.new_worker().runtime.crash_at = "claimed"
        world.run_after(100)
    world.new_worker()
    world.run_after(100)
    assert instance.error.startswith("WorkerCrashLoop")
    world.operations.rewind.retry("order", "i-1")
    world.run_until_idle()
    assert (rows(instance), instance.steps()[1].wake_at) == (["DONE", "WAITING", "PENDING"], deadline)
    instance.send("paid", 7)
    world.run_until_idle()
    assert (state(instance), line.calls[-1].results["PAY"]) == ("COMPLETED", 7)


def test_a_retried_run_can_be_retried_and_keeps_the_key_of_its_step(world: World) -> None:
    line = Line(world, PAY=dies)
    instance = line.flow.run()
    for _ in range(2):
        world.operations.rewind.retry("order", "i-1")
        world.run_until_idle()
    keys = [ctx.tx.idempotency_key for ctx in line.calls if ctx.step == "PAY"]
    assert (len(keys), len(set(keys)), instance.row.run_number) == (3, 1, 3)
    assert rows(instance) == ["DONE", "DEAD", "PENDING"]


def test_a_run_that_has_not_failed_is_not_retried(world: World) -> None:
    instance = Line(world, PAY=waits_for()).flow.run()
    with pytest.raises(InstanceNotErrored):
        world.operations.rewind.retry("order", "i-1")
    assert instance.row.run_number == 1


def test_a_retried_run_follows_its_rows_whatever_a_deploy_made_of_the_list(world: World) -> None:
    line = Line(world, PAY=dies)
    instance = line.flow.run()
    line.deploy([LinearStep("CHECK"), LinearStep("PAY"), LinearStep("SHIP")], version=2)
    line.calls.clear()
    world.operations.rewind.retry("order", "i-1")
    world.run_until_idle()
    assert [(ctx.step, ctx.version) for ctx in line.calls] == [("PAY", 1), ("SHIP", 1)]
    assert rows(instance) == ["DONE"] * 3


# --- restart from a step, fork ------------------------------------------------------------------


@pytest.mark.parametrize("step", ["1", "PAY"])
def test_a_restart_from_a_step_begins_it_anew_with_the_events_that_it_had_consumed(world: World, step: str) -> None:
    line = Line(world, PAY=waits_for("paid"))
    instance = line.flow.run()
    instance.send("paid", 7)
    world.run_until_idle()
    key = line.calls[1].tx.idempotency_key
    world.prior_runs["order", "i-1", 1] = world.recorded(instance, 1)
    line.calls.clear()
    assert world.operations.rewind.restart("order", "i-1", from_step=step) == 2
    assert rows(instance) == ["DONE", "READY", "PENDING"]
    assert instance.events() == [("paid", 7, None)]
    world.run_until_idle()
    assert line.called == [("PAY", "RUN", 1), ("PAY", "EVENT", 1), ("SHIP", "RUN", 1)]
    assert line.calls[0].tx.idempotency_key != key  # it is to happen again
    assert (state(instance), instance.events()) == ("COMPLETED", [("paid", 7, "1")])


def test_a_fork_goes_on_before_its_step_and_leaves_the_other_alone(world: World) -> None:
    line = Line(world, PAY=dies)
    instance = line.flow.run()
    before = world.recorded(instance, 1)
    line.answer(PAY=done)
    line.calls.clear()
    world.operations.rewind.fork("order", "i-1", "PAY", id="i-2")
    world.run_until_idle()
    assert line.called == [("PAY", "RUN", 1), ("SHIP", "RUN", 1)]
    assert (state(line.flow.of("i-2")), state(instance)) == ("COMPLETED", "FAILED")
    assert world.recorded(instance, 1) == before


@pytest.mark.parametrize(
    "begin",
    [
        lambda rewind: rewind.restart("order", "i-1", from_step="SHIP"),
        lambda rewind: rewind.fork("order", "i-1", "SHIP", id="i-2"),
    ],
    ids=["restart", "fork"],
)
def test_a_run_does_not_begin_ahead_of_where_the_other_stands(world: World, begin: Any) -> None:
    instance = Line(world, PAY=dies).flow.run()
    with pytest.raises(ValueRefused) as refused:
        begin(world.operations.rewind)
    assert str(refused.value) == (
        "Step 'SHIP' of run 1 of instance 'i-1' of workflow 'order' has not been reached: the current step is "
        "'PAY'. Choose that step or an earlier one."
    )
    assert (rows(instance), instance.row.run_number) == (["DONE", "DEAD", "PENDING"], 1)


# --- set_result, skip ---------------------------------------------------------------------------


def test_the_failed_step_is_given_a_result_in_a_new_run(world: World) -> None:
    line = Line(world, PAY=dies)
    instance = line.flow.run()
    world.prior_runs["order", "i-1", 1] = world.recorded(instance, 1)
    line.calls.clear()
    assert world.operations.interventions.set_result("order", "i-1", "PAY", {"by": "hand"}, by="eve", reason="#42") == 2
    assert rows(instance) == ["DONE", "DONE", "READY"]
    world.run_until_idle()
    assert line.called == [("SHIP", "RUN", 1)]
    assert line.calls[0].results == {"VALIDATE": "VALIDATE done", "PAY": {"by": "hand"}}
    assert (state(instance), rows(instance, 1)) == ("COMPLETED", ["DONE", "DEAD", "PENDING"])
    (audit,) = world.operations.history.read("order", "i-1").audit
    assert (audit.step_key, audit.action, audit.by, audit.reason) == ("1", "set_result", "eve", "#42")
    assert (audit.before.status, audit.before.attempts, audit.before.error.message) == ("DEAD", 1, "no")
    assert (instance.steps()[1].attempts, instance.steps()[1].error) == (1, None)


def test_a_step_that_waits_is_given_its_result_or_skipped_in_its_run(world: World) -> None:
    line = Line(world, PAY=waits_for("paid"), SHIP=waits_for("shipped"))
    instance = line.flow.run()
    assert world.operations.interventions.set_result("order", "i-1", "PAY", 7, by="eve") == 1
    world.run_until_idle()
    assert (rows(instance), line.calls[-1].results["PAY"]) == (["DONE", "DONE", "WAITING"], 7)
    assert world.operations.interventions.skip("order", "i-1", "SHIP", by="eve") == 1
    world.run_until_idle()
    assert (rows(instance), state(instance), instance.output) == (["DONE"] * 3, "COMPLETED", None)
    audits = world.operations.history.read("order", "i-1").audit
    assert [(each.step_key, each.action, each.before.status) for each in audits] == [
        ("1", "set_result", "WAITING"),
        ("2", "skip", "WAITING"),
    ]


def test_the_last_step_settled_by_hand_completes_the_instance_with_its_result(world: World) -> None:
    line = Line(world, SHIP=dies)
    instance = line.flow.run()
    world.operations.interventions.set_result("order", "i-1", "SHIP", "by courier", by="eve")
    assert (rows(instance), state(instance)) == (["DONE"] * 3, "RUNNING")
    world.run_until_idle()
    assert (state(instance), instance.output) == ("COMPLETED", "by courier")


def test_a_step_that_is_tried_again_later_is_skipped_at_once(world: World) -> None:
    line = Line(world, PAY=lambda _: Retry("1 hour", "not yet"))
    instance = line.flow.run()
    world.operations.interventions.skip("order", "i-1", "1", by="eve")
    world.run_until_idle()
    assert (state(instance), line.calls[-1].results["PAY"]) == ("COMPLETED", None)


def test_a_settled_step_keeps_the_event_that_it_had_consumed(world: World) -> None:
    def pay(ctx: LinearContext) -> Any:
        return Waiting("paid") if ctx.task_type is TaskType.RUN else Dead("no")

    instance = Line(world, PAY=pay, SHIP=waits_for("paid")).flow.run()
    instance.send("paid", 7)
    world.run_until_idle()
    world.operations.interventions.set_result("order", "i-1", "PAY", "by hand", by="eve")
    world.run_until_idle()
    assert (rows(instance), instance.events()) == (["DONE", "DONE", "WAITING"], [("paid", 7, "1")])


def test_a_handler_in_flight_changes_nothing_after_its_step_was_settled(world: World) -> None:
    calls: list[str] = []

    def pay(ctx: LinearContext) -> Completed:
        calls.append(ctx.step)
        instance.pause()  # asked for, and obeyed by what takes the claim away
        world.operations.interventions.set_result("order", "i-1", "PAY", "by hand", by="eve")
        return Completed("by the worker")

    line = Line(world, PAY=pay)
    instance = line.flow.create()
    world.run_until_idle()
    assert (instance.status, rows(instance), calls) == ("paused", ["DONE", "DONE", "READY"], ["PAY"])
    instance.resume()
    world.run_until_idle()
    assert line.calls[-1].results["PAY"] == "by hand"
    assert (state(instance), calls) == ("COMPLETED", ["PAY"])


def test_a_handler_in_flight_changes_nothing_after_its_last_step_was_settled(world: World) -> None:
    def ship(ctx: LinearContext) -> Dead:
        world.operations.interventions.set_result("order", "i-1", "SHIP", "by hand", by="eve")
        return Dead("by the worker")

    instance = Line(world, SHIP=ship).flow.run()
    assert (state(instance), instance.output, instance.row.run_number) == ("COMPLETED", "by hand", 1)


def test_a_paused_run_whose_last_step_is_settled_completes_when_it_is_resumed(world: World) -> None:
    instance = Line(world, SHIP=waits_for("shipped")).flow.run()
    instance.pause()
    world.operations.interventions.skip("order", "i-1", "SHIP", by="eve")
    world.run_until_idle()
    assert (instance.status, rows(instance)) == ("paused", ["DONE"] * 3)
    instance.resume()
    world.run_until_idle()
    assert state(instance) == "COMPLETED"


def test_a_run_of_which_all_is_done_completes_however_often_its_workers_die(world: World) -> None:
    instance = Line(world, SHIP=waits_for("shipped")).flow.run()
    world.operations.interventions.skip("order", "i-1", "SHIP", by="eve")
    while instance.row.crash_count < 6:
        world.new_worker().runtime.crash_at = "claimed"
        world.run_after(100)
    world.new_worker()
    world.run_after(100)
    assert state(instance) == "COMPLETED"


@pytest.mark.parametrize(
    ("step", "status", "remedy"),
    [
        ("VALIDATE", "DONE", "To run it again, restart the instance from this step."),
        ("2", "PENDING", "The current step is 'PAY', which comes first."),
    ],
)
@pytest.mark.parametrize("has_failed", [True, False])
def test_a_step_whose_turn_it_is_not_is_not_settled(
    world: World, step: str, status: str, remedy: str, *, has_failed: bool
) -> None:
    instance = Line(world, PAY=dies if has_failed else waits_for()).flow.run()
    before, name = instance.row, {"2": "SHIP"}.get(step, step)
    with pytest.raises(StepNotOpen) as refused:
        world.operations.interventions.skip("order", "i-1", step, by="eve")
    assert str(refused.value) == (
        f"Step {name!r} of run 1 of instance 'i-1' of workflow 'order' is {status}. Only an open step, or one that "
        f"ended an errored instance, can be completed by hand. {remedy}"
    )
    assert instance.row == before
