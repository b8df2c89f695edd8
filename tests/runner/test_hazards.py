"""The hazards of docs/design.md, each under its name there."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from celery_durable import EventTimeout, Step, StepConfig, StepFailed, WorkflowEvent
from celery_durable.errors import SchemaOutdated
from celery_durable.store.engine import Tx
from celery_durable.store.runs import sweeps
from celery_durable.testing import START, Crash
from tests.support.flows import flow_of
from tests.support.world import World

# --- reason trusted -------------------------------------------------------------------------------


def test_what_came_due_while_paused_ends_on_resume_whatever_the_wake_up_was_for(world: World) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.sleep("rest", 3600)
        return "rested"

    instance = order.run()
    instance.pause()
    world.advance(3600)
    assert instance.advance() == "noop: not due, or claimed by another worker"  # the wake-up, consumed without effect
    instance.resume()
    world.run_until_idle()
    assert instance.output == "rested"


def test_a_wake_up_for_any_reason_does_what_is_due_and_no_more(world: World) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.do("charge", lambda tx: 1 / (tx.attempt - 1))  # a retry in 10 s
        step.sleep("rest", 60)

    instance = order.run()
    for seconds, reason in ((5, "wake"), (5, "retry"), (30, "event"), (30, "start")):
        world.advance(seconds)
        i = world.store.tables.instance
        with world.store.engine.begin() as connection:
            connection.execute(sa.update(i).values(wake_reason=reason, run_at=world.now_us, next_check_at=world.now_us))
        world.run_until_idle()
    assert instance.statuses() == {"charge": "completed", "rest": "completed"}
    charge, rest = instance.steps()
    assert (charge.finished_at, rest.finished_at) == (START + timedelta(seconds=10), START + timedelta(seconds=70))


# --- first instead of earliest --------------------------------------------------------------------


def test_several_suspended_branches_wake_the_instance_for_the_earliest(world: World) -> None:
    world.exempt["I4"] = "branches end in any order"

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.gather(
            step.submit_wait_for_event("approval", "approval", timeout="24 h"), step.submit_sleep("rest", "1 h")
        )

    instance = order.run()
    assert instance.run_at == START + timedelta(hours=1)
    world.run_after(3600)
    assert instance.statuses() == {"approval": "waiting", "rest": "completed"}
    assert instance.run_at == START + timedelta(hours=24)


# --- woken all ------------------------------------------------------------------------------------


def test_one_wake_up_ends_only_those_branches_whose_time_has_come(world: World) -> None:
    world.exempt["I4"] = "branches end in any order"

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.gather(
            step.submit_sleep("two hours", "2 h"),
            step.submit_wait_for_event("a day", "approval", timeout="24 h"),
            step.submit_sleep("one hour", "1 h"),
        )

    instance = order.run()
    seen = []
    for hours in (1, 1, 22):
        world.run_after(timedelta(hours=hours))
        seen.append([key for key, status in instance.statuses().items() if status != "waiting"])
    assert seen == [["one hour"], ["two hours", "one hour"], ["two hours", "a day", "one hour"]]
    assert instance.error == "EventTimeout: No event 'approval' came within 1 d"


# --- nothing returned -----------------------------------------------------------------------------


def test_a_step_that_returned_nothing_does_not_run_again(world: World) -> None:
    ran = []

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.do("tell", lambda: ran.append(1))
        step.sleep("rest", 60)

    order.run()
    world.run_after(60)
    assert ran == [1]


# --- past instant ---------------------------------------------------------------------------------


def test_a_sleep_until_is_found_by_its_name_when_its_time_has_passed(world: World) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.sleep_until("morning", START + timedelta(hours=8))
        step.sleep("more", 60)
        return "awake"

    instance = order.run()
    assert instance.step("morning").wake_at == START + timedelta(hours=8)
    world.run_after(timedelta(hours=20))
    world.run_after(60)
    assert instance.output == "awake"
    assert list(instance.statuses()) == ["morning", "more"]


# --- dead sweeper ---------------------------------------------------------------------------------


@pytest.mark.parametrize("checkpoint", ["before-commit", "after-commit"])
def test_a_sweep_that_dies_around_its_commit_loses_no_wake_up(world: World, checkpoint: str) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.sleep("rest", 60)
        return "rested"

    instance = order.run()
    world.advance(60)
    beat = world.new_beat()
    beat.runtime.crash_at = checkpoint
    with pytest.raises(Crash):
        beat.sweeper.sweep()
    beat.bury()
    assert world.messages == []
    world.run_after(15)
    assert instance.output == "rested"


def test_an_event_whose_sender_dies_after_the_commit_is_found(world: World) -> None:
    instance = flow_of(world, lambda step: step.wait_for_event("approval", "approval").payload).run()
    instance.send("approval", "yes")
    world.messages.clear()
    world.run_after(5)
    assert instance.output == "yes"


# --- two sweepers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("search", ["sweep", "take_lost_runs"])
@pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)
def test_two_sweeps_at_once_publish_each_instance_once_and_no_step_is_overwritten(
    world: World, monkeypatch: pytest.MonkeyPatch, search: str
) -> None:
    """Of timers that have run out, and of hints that were lost."""

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        if search == "sweep":
            step.sleep("rest", 5)
        return step.do("work", lambda: event.instance_id)

    for n in range(6):
        order.create(id=f"o-{n}")
    if search == "sweep":
        world.run_until_idle()
    else:
        world.messages.clear()
        world.advance(5)
        assert world.sweeper.sweep() == 6  # from here on no row is due before its hint is old
    world.messages.clear()
    one, two = world.new_beat(), world.new_beat()
    world.advance(2)
    assert (one.sweeper.sweep(), two.sweeper.sweep()) == (0, 0)  # both have seen that the queue is empty
    world.advance(3)
    swept_by_two: list[int] = []
    find = getattr(sweeps, search)

    def find_and_hold(tx: Tx, **how: Any) -> Any:
        found = find(tx, **how)
        is_first = any(found) and not swept_by_two
        if is_first:  # the second skips the rows that the first still holds, and does not wait
            swept_by_two.append(two.sweeper.sweep())
        return found

    monkeypatch.setattr(sweeps, search, find_and_hold)
    assert (one.sweeper.sweep(), swept_by_two) == (6, [0])
    found = [due.ref.instance_id for due in world.messages]
    assert sorted(found) == [f"o-{n}" for n in range(6)]
    world.run_until_idle()
    assert order.of("o-5").output == "o-5"


# --- same moment ----------------------------------------------------------------------------------


def test_events_of_the_same_moment_keep_the_order_of_their_arrival(world: World) -> None:
    instance = flow_of(world, lambda step: [step.wait_for_event(f"{n}", "page").payload for n in range(20)]).create()
    for n in range(20):
        instance.send("page", n, id=f"{(n * 7) % 20:02}")  # neither the clock nor the ids tell the order
    world.run_until_idle()
    assert instance.output == list(range(20))


# --- outage blamed on the author ------------------------------------------------------------------


def test_a_database_that_fails_in_the_middle_of_a_pass_ends_no_instance(world: World) -> None:
    broken = []

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.do("a", lambda: 1)
        if not broken:
            broken.append(1)
            with world.store.engine.begin() as connection:
                connection.exec_driver_sql("ALTER TABLE workflow_event RENAME TO hidden")
        try:
            return step.wait_for_event("approval", "approval").payload
        except Exception as exc:
            return f"blamed on the author: {exc}"

    instance = order.create()
    with pytest.raises(SchemaOutdated):
        world.run_until_idle()
    with world.store.engine.begin() as connection:
        connection.exec_driver_sql("ALTER TABLE hidden RENAME TO workflow_event")
    assert (instance.status, instance.statuses()) == ("active", {"a": "completed"})
    world.run_after(31)
    instance.send("approval", "yes")
    world.run_until_idle()
    assert instance.output == "yes"


# --- suspension swallowed -------------------------------------------------------------------------


def test_a_suspension_passes_every_except_exception(world: World) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        for n, method in enumerate(
            (
                lambda: step.sleep("a", 10),
                lambda: step.wait_for_event("b", "go", timeout=10),
                lambda: step.do("c", lambda tx: 1 / (tx.attempt - 1)),
                lambda: step.gather(step.submit_sleep("d", 10)),
                lambda: step.first("e", step.submit_sleep("f", 10)),
                lambda: step.submit_sleep("g", 10).result(),
            )
        ):
            try:
                method()
            except EventTimeout:
                pass
            except Exception as exc:
                return f"swallowed at {n}: {exc}"
        return "done"

    instance = order.run()
    for _ in range(6):
        assert instance.status == "waiting"
        world.run_after(10)
    assert instance.output == "done"


# --- stolen event ---------------------------------------------------------------------------------


def test_a_wait_that_timed_out_takes_no_event_from_the_next(world: World) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        try:
            step.wait_for_event("first", "page", timeout=10)
        except EventTimeout:
            return step.wait_for_event("second", "page", timeout=60).payload

    instance = order.run()
    world.advance(10.000001)
    instance.send("page", "late for the first")
    instance.send("page", "later still")
    world.run_until_idle()
    assert instance.output == "late for the first"
    assert [consumer for _, _, consumer in instance.events()] == ["second", None]


# --- falsy value ----------------------------------------------------------------------------------


@pytest.mark.parametrize("falsy", [None, 0, False, "", [], {}])
def test_falsy_values_are_values_wherever_they_travel(world: World, falsy: object) -> None:
    ran = []

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        def give(where: str) -> object:
            ran.append(where)
            return falsy

        body = step.do("body", give, "body")
        answer = step.wait_for_event("event", "go").payload
        branch, _ = step.gather(step.submit("branch", give, "branch"), step.submit_sleep("rest", 5))
        raced = step.first("race", step.submit("racer", give, "racer"))
        step.sleep("more", 5)
        try:
            step.do("fail", StepConfig(retries=0), lambda: 1 / 0)
        except StepFailed:
            return [event.payload, body, answer, branch, raced]

    instance = order.create(falsy)
    instance.send("go", falsy)
    for _ in range(3):
        world.run_after(5)
    assert instance.output == [falsy] * 5
    assert [type(value) for value in instance.output] == [type(falsy)] * 5
    assert sorted(ran) == ["body", "branch", "racer"]
