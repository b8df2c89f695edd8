"""Doing again: restart from a step, retry, fork."""

from __future__ import annotations

from datetime import timedelta

import pytest

from celery_durable import NonRetryableError, Step, StepConfig, StepFailed, WorkflowEvent
from celery_durable.errors import StepNotFound, VersionMismatch
from celery_durable.model import Origin
from tests.support.flows import flow_of
from tests.support.rewinds import fork, retry, rewind, say
from tests.support.world import World

ONCE = StepConfig(retries=0)


# --- restart from a step ------------------------------------------------------------------------


def test_a_run_from_a_step_keeps_what_was_before_it(world: World, abc, ran: list[str]) -> None:
    instance = abc.run({"n": 1})
    assert rewind(instance, "b") == 2
    world.run_until_idle()
    assert instance.output == ["a1", "b2", "c2"]
    assert ran == ["a1", "b1", "c1", "b2", "c2"]
    assert instance.step("a") == instance.step("a", run=1)  # its times too
    history = world.operations.history.read("order", "i-1")
    assert (history.origin, history.params) == (Origin("i-1", 1, "b"), {"n": 1})


def test_a_run_from_its_first_step_keeps_no_step(world: World, abc, ran: list[str]) -> None:
    instance = abc.run()
    rewind(instance, "a")
    world.run_until_idle()
    assert ran == ["a1", "b1", "c1", "a2", "b2", "c2"]


def test_a_run_from_a_step_can_be_rewound_again(world: World, abc) -> None:
    instance = abc.run()
    assert [rewind(instance, "c"), rewind(instance, "b")] == [2, 3]
    world.run_until_idle()
    assert instance.output == ["a1", "b3", "c3"]
    assert instance.statuses(run=2) == {"a": "completed", "b": "completed"}


def test_a_step_that_is_not_there_is_refused_with_the_nearest(world: World, abc) -> None:
    instance = abc.run()
    before = instance.row
    with pytest.raises(StepNotFound) as caught:
        rewind(instance, "bb")
    assert str(caught.value) == "Run 1 of instance 'i-1' of workflow 'order' has no step 'bb'. Did you mean 'b'?"
    with pytest.raises(StepNotFound) as caught:
        fork(instance, "delta")
    assert str(caught.value).endswith("has no step 'delta'. Did you mean 'a' or 'b' or 'c'?")
    assert instance.row == before
    with pytest.raises(StepNotFound, match=r" It has none yet\.$"):
        rewind(abc.create(id="i-2"), "a")


def test_a_rewind_is_meant_for_a_version(world: World, abc) -> None:
    instance = abc.run()
    with pytest.raises(VersionMismatch):
        world.operations.rewind.restart("order", "i-1", from_step="b", if_version=[1])
    assert instance.row.run_number == 1


def test_a_runner_in_flight_changes_nothing_after_a_rewind(world: World, ran: list[str]) -> None:
    def b(run: int) -> str:
        if run == 1:
            rewind(instance, "a")
        return say(ran, f"b{run}")

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.do("a", say, ran, f"a{event.run_number}")
        return step.do("b", b, event.run_number)

    instance = order.create()
    assert instance.advance() == "superseded: the instance was taken over, restarted or ended meanwhile"
    assert instance.statuses(run=1) == {"a": "completed"}
    world.run_until_idle()
    assert (instance.output, ran) == ("b2", ["a1", "b1", "a2", "b2"])


def test_a_second_runner_goes_on_with_the_rewound_run_while_the_first_is_at_it(world: World, ran: list[str]) -> None:
    second = world.new_worker()

    def b(run: int) -> str:
        if run == 1:
            rewind(instance, "a")
            assert instance.advance(second) == "complete"
        return say(ran, f"b{run}")

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.do("a", say, ran, f"a{event.run_number}")
        return step.do("b", b, event.run_number)

    instance = order.create()
    first = world.new_worker()
    assert instance.advance(first).startswith("superseded")
    assert (instance.output, ran) == ("b2", ["a1", "a2", "b2", "b1"])
    assert instance.row.claim_token is None


def test_failures_that_were_caught_before_the_target_are_kept(world: World, ran: list[str]) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        try:
            step.do("card", ONCE, lambda: 1 / 0)
        except StepFailed:
            step.do("invoice", say, ran, f"invoice{event.run_number}")
        return step.do("ship", say, ran, f"ship{event.run_number}")

    instance = order.run()
    rewind(instance, "ship")
    world.run_until_idle()
    assert (instance.output, ran) == ("ship2", ["invoice1", "ship1", "ship2"])
    assert instance.statuses() == {"card": "errored", "invoice": "completed", "ship": "completed"}


def test_what_was_open_begins_anew_and_a_sleep_that_ended_is_not_slept_again(world: World) -> None:
    world.exempt["I4"] = "branches end in any order"

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.sleep("night", "8 hours")
        day = step.submit_sleep("day", "16 hours")
        return step.gather(day, step.submit("work", lambda: event.run_number))

    instance = order.run()
    world.run_after(timedelta(hours=9))
    assert instance.statuses() == {"night": "completed", "day": "waiting", "work": "completed"}
    world.run_after(timedelta(hours=1))
    rewind(instance, "work")
    world.run_until_idle()
    assert instance.statuses() == {"night": "completed", "day": "waiting", "work": "completed"}
    assert instance.run_at == world.now + timedelta(hours=16)


def test_events_of_kept_waits_stay_consumed_and_the_others_wait_in_their_order(world: World) -> None:
    order = flow_of(
        world, lambda step: [step.wait_for_event(name, "paper").payload for name in ("first", "second", "third")]
    )
    instance = order.run()
    for number in (1, 2, 3, 4):
        instance.send("paper", number, id=f"e-{number}")
    world.run_until_idle()
    assert instance.output == [1, 2, 3]
    rewind(instance, "second")
    assert instance.events() == [("paper", 1, "first"), ("paper", 2, None), ("paper", 3, None), ("paper", 4, None)]
    assert instance.send("paper", "again", id="e-4") is False  # it is here
    instance.send("paper", 5, id="e-5")
    world.run_until_idle()
    assert instance.output == [1, 2, 3]
    assert [consumer for _, _, consumer in instance.events()] == ["first", "second", "third", None, None]
    instance.restart()
    assert instance.events() == []  # a plain restart takes none along


def test_a_race_is_run_again_as_a_whole(world: World) -> None:
    world.exempt["I4"] = "branches end in any order"

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        week = step.submit_sleep("week", "7 days")
        answer = step.submit_wait_for_event("answer", "answer")
        said = step.first("what comes first", week, answer)
        return step.do("tell", lambda: "week" if said is None else said.payload)

    instance = order.run()
    instance.send("answer", "yes")
    world.run_until_idle()
    assert instance.output == "yes"
    for target in ("what comes first", "answer", "week"):
        rewind(instance, target)
        assert instance.statuses() == {}
        world.run_until_idle()
        assert instance.output == "yes"


def test_a_race_before_the_target_stays_decided(world: World) -> None:
    world.exempt["I4"] = "branches end in any order"

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        week, answer = step.submit_sleep("week", "7 days"), step.submit_wait_for_event("answer", "answer")
        said = step.first("race", week, answer)
        return step.do("tell", lambda: [event.run_number, said and said.payload])

    instance = order.run()
    instance.send("answer", "yes")
    world.run_until_idle()
    rewind(instance, "tell")
    world.run_until_idle()
    assert instance.output == [2, "yes"]
    assert instance.statuses()["week"] == "cancelled"
    assert instance.events() == [("answer", "yes", "answer")]


def test_what_terminate_cancelled_is_open_again(world: World) -> None:
    world.exempt["I4"] = "branches end in any order"

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        return step.gather(step.submit_sleep("rest", 60), step.submit("work", lambda: event.run_number))

    instance = order.run()
    instance.terminate()
    assert instance.statuses()["rest"] == "cancelled"
    rewind(instance, "work")
    world.run_until_idle()
    world.run_after(60)
    assert instance.output == [None, 2]


def test_kept_steps_count_against_the_limit(world: World) -> None:
    @world.workflow(max_steps=3)
    def order(event: WorkflowEvent, step: Step):
        return [step.do(name, str, name) for name in ("abc" if event.run_number == 1 else "abcd")]

    instance = order.run()
    rewind(instance, "c")
    world.run_until_idle()
    assert instance.error.startswith("StepLimitExceeded")


def test_each_run_has_room_for_its_own_log(make_world) -> None:
    world = make_world(max_logs=2)

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.log.info("started")
        step.do("a", lambda: None)
        step.log.info("done")
        step.do("b", lambda: None)

    instance = order.run()
    rewind(instance, "b")
    world.run_until_idle()
    assert [(line.message, line.is_replay) for line in instance.logs()] == [("started", True), ("done", False)]


# --- what the code sees -------------------------------------------------------------------------


def test_time_and_chance_are_those_that_the_kept_steps_saw(world: World) -> None:
    seen: list[dict[str, object]] = []

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        saw = {"start": step.now(), "dice": step.random()}
        step.do("a", lambda: world.advance(60))
        saw |= {"between": step.now(), "id": step.uuid()}
        step.do("b", lambda: world.advance(60))
        saw |= {"after": step.now(), "new": step.uuid()}
        seen.append(saw)
        step.do("c", lambda: None)

    instance = order.run()
    world.advance(3600)
    rewind(instance, "c")
    began = world.now
    world.run_until_idle()
    first, second = seen
    assert {key for key in first if first[key] == second[key]} == {"start", "dice", "between", "id"}
    assert second["after"] == began  # not hours ago
    world.advance(3600)
    rewind(instance, "c")
    world.run_until_idle()
    assert {key for key in first if first[key] == seen[2][key]} == {"start", "dice", "between", "id"}
    forked = fork(instance, "b")
    world.run_until_idle()
    assert {key for key in first if first[key] == seen[3][key]} == {"start", "dice"}
    assert forked.status == "complete"


def test_a_retried_step_goes_on_with_its_idempotency_key_and_other_steps_get_new_ones(world: World) -> None:
    keys: dict[str, list[str]] = {}
    broken = [True]

    def note(tx) -> None:
        keys.setdefault(tx.name, []).append(tx.idempotency_key)
        if tx.name == "charge" and broken[0]:
            raise NonRetryableError("no answer")

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        try:
            step.do("charge", note)
        finally:
            step.do("tell", note)

    instance = order.run()
    retry(instance)
    world.run_until_idle()
    broken[0] = False
    retry(instance)
    world.run_until_idle()
    assert instance.status == "complete"
    assert (len(keys["charge"]), len(set(keys["charge"]))) == (3, 1)
    assert len(set(keys["tell"])) == 3
