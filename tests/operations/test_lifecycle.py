"""Pause, resume, terminate and restart, from every state and against a worker that is at it."""

from __future__ import annotations

from datetime import timedelta

import pytest

from celery_durable import Retries, Step, StepConfig, WorkflowEvent
from celery_durable.errors import InstanceTerminal, NameInvalid
from celery_durable.testing import START
from tests.support.flows import flow_of
from tests.support.instances import Instance
from tests.support.world import World

DO = {"sleeping": "sleep", "waiting": "wait", "retrying": "fail", "paused": "sleep", "complete": "nothing",
      "errored": "raise", "terminated": "sleep", "new": "nothing"}  # fmt: skip
"""The states of instances, and what `everything` does to come into them. A new one is made last, so none runs it."""
ENDED = ["complete", "errored", "terminated"]
LIVE = [state for state in DO if state not in ENDED]


def make(world: World, flow, states) -> dict[str, Instance]:
    """An instance in each state, whose id is the state."""
    made = {}
    for state in states:
        made[state] = (flow.create if state == "new" else flow.run)({"do": DO[state]}, id=state)
        if state == "paused":
            made[state].pause()
        if state == "terminated":
            made[state].terminate("enough")
    return made


@pytest.fixture
def everything(world: World):
    @world.workflow
    def everything(event: WorkflowEvent, step: Step):
        match (event.payload or {}).get("do"):
            case "sleep":
                step.sleep("rest", 600)
            case "wait":
                step.wait_for_event("approval", "approval")
            case "fail":
                step.do("charge", StepConfig(retries=Retries(delay=600)), lambda: 1 / 0)
            case "raise":
                raise ValueError("no")
        return event.run_number

    return everything


# --- pause and resume ---------------------------------------------------------------------------


def test_pause_stops_an_instance_that_nobody_works_on_at_once(world: World, everything) -> None:
    instances = make(world, everything, LIVE)
    for instance in instances.values():
        instance.pause()
        before = instance.row
        instance.pause()  # changes nothing more
        assert (instance.status, instance.row) == ("paused", before)
    world.run_after(timedelta(days=30))
    assert {instance.status for instance in instances.values()} == {"paused"}
    assert {instance.row.next_check_at for instance in instances.values()} == {None}  # they cost nothing


@pytest.mark.parametrize("method", ["pause", "terminate"])
def test_pause_and_terminate_are_refused_when_it_has_ended(world: World, everything, method: str) -> None:
    for state, instance in make(world, everything, ENDED).items():
        before = instance.row
        with pytest.raises(InstanceTerminal) as caught:
            getattr(instance, method)()
        assert str(caught.value) == (
            f"Cannot {method} instance '{state}' of workflow 'everything': it is {state}. To start a new run, restart "
            "it."
        )
        assert instance.row == before


def test_resume_of_what_is_not_paused_does_nothing(world: World, everything) -> None:
    instances = make(world, everything, [state for state in DO if state != "paused"]).values()
    world.messages.clear()
    for instance in instances:
        before = instance.row
        instance.resume()
        assert instance.row == before
    assert world.messages == []


def test_timers_go_on_while_paused_and_resume_waits_for_the_rest(world: World, everything) -> None:
    instance = everything.run({"do": "sleep"})
    world.advance(100)
    instance.pause()
    world.advance(100)
    instance.resume()
    world.run_until_idle()
    assert (instance.status, instance.run_at) == ("waiting", START + timedelta(seconds=600))
    world.run_after(400)
    assert instance.output == 1


@pytest.mark.parametrize("state", ["sleeping", "retrying"])
def test_a_timer_that_passed_while_paused_ends_its_step_on_resume(world: World, everything, state: str) -> None:
    instance = make(world, everything, [state])[state]
    instance.pause()
    world.run_after(3600)
    assert instance.status == "paused"
    instance.resume()
    world.run_until_idle()
    assert instance.steps()[0].attempts == {"sleeping": 0, "retrying": 2}[state]
    assert instance.status == {"sleeping": "complete", "retrying": "waiting"}[state]


def test_a_deadline_that_passed_while_paused_times_out_on_resume(world: World, everything) -> None:
    instance = everything.run({"do": "wait"})
    instance.pause()
    world.run_after(timedelta(days=2))
    instance.resume()
    world.run_until_idle()
    assert instance.error == "EventTimeout: No event 'approval' came within 1 d"


def test_a_body_that_runs_is_not_interrupted_by_a_pause_which_takes_effect_at_its_boundary(world: World) -> None:
    ran = []

    def work() -> None:
        ran.append("a begins")
        instance.pause()
        ran.append("a ends")

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.do("a", work)
        step.do("b", lambda: ran.append("b"))

    instance = order.create()
    world.run_until_idle()
    assert ran == ["a begins", "a ends"]
    assert (instance.status, instance.statuses()) == ("paused", {"a": "completed"})
    assert instance.row.claim_token is None
    instance.resume()
    world.run_until_idle()
    assert instance.status == "complete"
    assert ran == ["a begins", "a ends", "b"]


@pytest.mark.parametrize(
    "wait",
    [
        lambda step: step.sleep("x", 60),
        lambda step: step.wait_for_event("x", "go", timeout=60),
        lambda step: step.gather(step.submit_sleep("x", 60), step.submit("y", lambda: 1)),
    ],
    ids=["sleep", "wait", "gather"],
)
def test_a_pause_before_a_wait_leaves_it_paused(world: World, wait) -> None:
    world.exempt["I4"] = "branches end in any order"

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        instance.pause()
        try:
            wait(step)
        except TimeoutError:
            pass

    instance = order.create()
    world.run_until_idle()
    assert instance.status == "paused"
    instance.resume()

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        try:
            wait(step)
        except TimeoutError:
            pass

    world.run_until_idle()
    assert instance.status == "waiting"
    world.run_after(60)
    assert instance.status == "complete"


def test_resume_before_a_pause_took_effect_takes_it_back(world: World) -> None:
    def pause_and_resume() -> None:
        instance.pause()
        instance.resume()

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.do("a", pause_and_resume)
        return step.do("b", lambda: "b")

    instance = order.create()
    world.run_until_idle()
    assert instance.output == "b"


def test_a_pause_during_the_last_step_finds_the_function_returning(world: World) -> None:
    order = flow_of(world, lambda step: step.do("a", lambda: instance.pause()))
    instance = order.create()
    world.run_until_idle()
    assert instance.status == "complete"
    assert not instance.row.pause_requested


def test_a_pause_that_a_dead_worker_should_have_obeyed_is_obeyed_by_the_sweep(world: World) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.do("a", lambda: instance.pause())
        return step.do("b", lambda: "b")

    instance = order.create()
    world.worker.runtime.crash_at = "after-body"
    world.run_until_idle()
    assert instance.status == "active"
    world.run_after(31)
    assert instance.status == "paused"
    instance.resume()

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.do("a", lambda: None)
        return step.do("b", lambda: "b")

    world.run_until_idle()
    assert instance.output == "b"


def test_a_delayed_start_that_is_paused_and_resumed_keeps_its_delay(world: World, everything) -> None:
    instance = everything.create(run_at=START + timedelta(hours=1))
    instance.pause()
    instance.resume()
    world.run_until_idle()
    assert instance.status == "waiting"
    world.run_after(3600)
    assert instance.output == 1


# --- terminate ----------------------------------------------------------------------------------


def test_terminate_ends_an_instance_for_good(world: World, everything) -> None:
    instances = make(world, everything, LIVE)
    for state, instance in instances.items():
        instance.terminate("out of business")
        assert instance.status == "terminated"
        assert world.operations.history.read("everything", state).reason == "out of business"
        assert set(instance.statuses().values()) <= {"cancelled"}
    world.run_after(timedelta(days=2))
    assert {instance.status for instance in instances.values()} == {"terminated"}


def test_who_cancelled_or_terminated_is_in_the_audit(world: World, everything) -> None:
    made, lifecycle = (
        make(world, everything, ["sleeping", "waiting", "retrying", "complete", "new"]),
        world.operations.lifecycle,
    )
    lifecycle.cancel("everything", "sleeping", reason="sold twice", by="eve")
    lifecycle.cancel("everything", "sleeping", by="ada")
    lifecycle.terminate("everything", "waiting", reason="stuck", by="eve")
    lifecycle.cancel("everything", "new", by="eve")
    lifecycle.cancel("everything", "retrying", reason="nobody says so")
    with pytest.raises(InstanceTerminal):
        lifecycle.cancel("everything", "complete", by="eve")
    with pytest.raises(NameInvalid):
        lifecycle.terminate("everything", "retrying", by="")
    audits = {key: world.operations.history.read("everything", key).audit for key in made}
    assert {key: [(each.action, each.by, each.reason) for each in audit] for key, audit in audits.items()} == {
        "sleeping": [("cancel", "eve", "sold twice"), ("cancel", "ada", None)],
        "waiting": [("terminate", "eve", "stuck")],
        "retrying": [],
        "complete": [],
        "new": [("cancel", "eve", None)],
    }
    (first, _) = audits["sleeping"]
    assert (first.run_number, first.step_key, first.before, first.created_at) == (1, None, None, world.now)


def test_a_reason_that_no_database_accepts_is_sanitized(world: World, everything) -> None:
    instance = everything.create()
    instance.terminate("NUL \x00 " + "x" * 3000)
    reason = world.operations.history.read("everything", "i-1").reason
    assert reason == "NUL  " + "x" * (2048 - 5 - 3) + "..."


def test_a_reason_that_is_no_text_is_refused(world: World, everything) -> None:
    instance = everything.create()
    with pytest.raises(NameInvalid) as refused:
        instance.terminate(ValueError("no"))
    assert str(refused.value) == "Reason ValueError('no') is not allowed: it is of type ValueError; pass text (str)."
    assert instance.status == "active"


# --- restart ------------------------------------------------------------------------------------


def test_restart_begins_a_new_run_from_any_state_and_keeps_the_old_one(world: World, everything) -> None:
    read, instances = world.operations.history.read, make(world, everything, DO)
    before = {state: read("everything", state) for state in instances}
    assert {instance.restart() for instance in instances.values()} == {2}
    world.run_until_idle()
    world.run_after(6000)
    for state, instance in instances.items():
        first, after = before[state], read("everything", state, run=1)
        assert (after.steps, after.events, after.params) == (first.steps, first.events, first.params)
        assert after.status.status == (state if state in ENDED else "terminated")
        assert after.reason == ("enough" if state == "terminated" else None if state in ENDED else "restarted")
        assert read("everything", state).run_number == instance.row.run_number == 2
        if state not in ("waiting", "retrying", "errored"):
            assert instance.output == 2


def test_a_new_run_has_no_steps_and_no_events_of_the_old_one(world: World) -> None:
    ran = []

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.do("a", lambda: ran.append(event.run_number))
        return step.wait_for_event("approval", "approval", timeout=60).payload

    instance = order.run({"n": 1})
    instance.send("approval", "for run 1")
    instance.restart()
    world.run_until_idle()
    assert ran == [1, 2]
    assert instance.events(run=1) == [("approval", "for run 1", None)]
    assert instance.events() == []
    instance.send("approval", "for run 2")
    world.run_until_idle()
    assert instance.output == "for run 2"
    assert instance.statuses(run=1) == {"a": "completed", "approval": "waiting"}


def test_two_restarts_are_two_runs(world: World, everything) -> None:
    instance = everything.run({"do": "nothing"})
    assert [instance.restart(), instance.restart()] == [2, 3]
    world.run_until_idle()
    assert instance.output == 3
    assert instance.steps(run=2) == ()


def test_a_restart_forgets_a_pause_that_was_asked_for(world: World) -> None:
    def pause_and_restart() -> None:
        instance.pause()
        instance.restart()

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        if event.run_number == 1:
            step.do("a", pause_and_restart)
        return step.do("b", lambda: event.run_number)

    instance = order.create()
    world.run_until_idle()
    assert instance.output == 2
