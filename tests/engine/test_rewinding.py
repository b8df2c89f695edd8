"""Doing again: restart from a step, retry, fork."""

from __future__ import annotations

from datetime import timedelta

import pytest

from celery_durable import EventTimeout, NonRetryableError, Retries, Step, StepConfig, StepFailed, WorkflowEvent
from celery_durable.errors import (
    InstanceAlreadyExists,
    InstanceNotErrored,
    StepNotFound,
    VersionMismatch,
)
from celery_durable.model import Origin, Status
from tests.engine.world import Instance, World, on_one_database

ONCE = StepConfig(retries=0)


@pytest.fixture
def ran() -> list[str]:
    return []


@pytest.fixture
def order(world: World, ran: list[str]):
    """a, b, c, one after the other; each says in which run it ran."""

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        return [step.do(name, _say, ran, f"{name}{event.run_number}") for name in "abc"]

    return order


def _say(ran: list[str], what: str) -> str:
    ran.append(what)
    return what


def rewind(instance: Instance, step: str) -> int:
    """Restart from a step, and remember the run that ends, which must never change again (I11)."""
    world, before = instance.world, instance.row.run_number
    number = world.operations.rewind.restart(instance.workflow, instance.id, from_step=step)
    world.prior_runs[instance.workflow, instance.id, before] = world.recorded(instance, before)
    return number


def retry(instance: Instance) -> int:
    world, before = instance.world, instance.row.run_number
    number = world.operations.rewind.retry(instance.workflow, instance.id)
    world.prior_runs[instance.workflow, instance.id, before] = world.recorded(instance, before)
    return number


def fork(instance: Instance, step: str, id: str = "f-1") -> Instance:
    return instance.world.instance(
        instance.workflow, instance.world.operations.rewind.fork(instance.workflow, instance.id, step, id=id)
    )


# --- restart from a step ------------------------------------------------------------------------


def test_a_run_from_a_step_keeps_what_was_before_it(world: World, order, ran: list[str]) -> None:
    instance = order.run({"n": 1})
    assert rewind(instance, "b") == 2
    world.run_until_idle()
    assert instance.output == ["a1", "b2", "c2"]
    assert ran == ["a1", "b1", "c1", "b2", "c2"]
    assert instance.step("a") == instance.step("a", run=1)  # its times too
    history = world.operations.history.read("order", "i-1")
    assert (history.origin, history.params) == (Origin("i-1", 1, "b"), {"n": 1})


def test_a_run_from_its_first_step_keeps_no_step(world: World, order, ran: list[str]) -> None:
    instance = order.run()
    rewind(instance, "a")
    world.run_until_idle()
    assert ran == ["a1", "b1", "c1", "a2", "b2", "c2"]


def test_a_run_from_a_step_can_be_rewound_again(world: World, order) -> None:
    instance = order.run()
    assert [rewind(instance, "c"), rewind(instance, "b")] == [2, 3]
    world.run_until_idle()
    assert instance.output == ["a1", "b3", "c3"]
    assert instance.statuses(run=2) == {"a": "completed", "b": "completed"}


def test_a_step_that_is_not_there_is_refused_with_the_nearest(world: World, order) -> None:
    instance = order.run()
    before = instance.row
    with pytest.raises(StepNotFound) as caught:
        rewind(instance, "bb")
    assert str(caught.value) == "Run 1 of instance 'i-1' of workflow 'order' has no step 'bb'. Did you mean 'b'?"
    with pytest.raises(StepNotFound) as caught:
        fork(instance, "delta")
    assert str(caught.value).endswith("has no step 'delta'. Did you mean 'a' or 'b' or 'c'?")
    assert instance.row == before
    with pytest.raises(StepNotFound, match=r" It has none yet\.$"):
        rewind(order.create(id="i-2"), "a")


def test_a_rewind_is_meant_for_a_version(world: World, order) -> None:
    instance = order.run()
    with pytest.raises(VersionMismatch):
        world.operations.rewind.restart("order", "i-1", from_step="b", if_version=[1])
    assert instance.row.run_number == 1


def test_a_runner_in_flight_changes_nothing_after_a_rewind(world: World, ran: list[str]) -> None:
    def b(run: int) -> str:
        if run == 1:
            rewind(instance, "a")
        return _say(ran, f"b{run}")

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.do("a", _say, ran, f"a{event.run_number}")
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
        return _say(ran, f"b{run}")

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.do("a", _say, ran, f"a{event.run_number}")
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
            step.do("invoice", _say, ran, f"invoice{event.run_number}")
        return step.do("ship", _say, ran, f"ship{event.run_number}")

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
    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        return [step.wait_for_event(name, "paper").payload for name in ("first", "second", "third")]

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


# --- retry --------------------------------------------------------------------------------------


def test_a_retry_gives_the_failed_step_fresh_attempts_and_keeps_the_rest(world: World, ran: list[str]) -> None:
    broken = [True]

    def b(run: int) -> str:
        _say(ran, f"b{run}")
        if broken[0]:
            raise ConnectionError("away")
        return f"b{run}"

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        a = step.do("a", _say, ran, f"a{event.run_number}")
        return [a, step.do("b", StepConfig(retries=Retries(limit=1, delay=10)), b, event.run_number)]

    instance = order.run()
    world.run_after(10)
    assert instance.error == "ConnectionError: away"
    assert retry(instance) == 2
    world.run_until_idle()
    world.run_after(10)
    broken[0] = False
    assert retry(instance) == 3
    world.run_until_idle()
    assert instance.output == ["a1", "b3"]
    assert ran == ["a1", "b1", "b1", "b2", "b2", "b3"]
    assert instance.step("b").attempts == 1
    assert world.operations.history.read("order", "i-1").origin == Origin("i-1", 2, "b")


@pytest.mark.parametrize("status", ["active", "waiting", "paused", "complete", "terminated"])
def test_only_what_has_failed_is_tried_again(world: World, status: str) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        if status != "complete":
            step.sleep("rest", 60)

    instance = order.create()
    if status != "active":
        world.run_until_idle()
    if status == "paused":
        instance.pause()
    if status == "terminated":
        instance.terminate()
    with pytest.raises(InstanceNotErrored) as caught:
        retry(instance)
    assert str(caught.value) == (
        f"Cannot retry instance 'i-1' of workflow 'order': it is {status}, not errored. "
        "Use restart() to start a new run, from the first step or from a later one."
    )


def test_a_retry_runs_all_failed_branches_again_and_no_finished_sibling(world: World, ran: list[str]) -> None:
    def work(name: str, run: int) -> str:
        _say(ran, f"{name}{run}")
        if run == 1 and name in "ac":
            raise NonRetryableError(name)
        return name

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        return step.gather(*(step.submit(name, work, name, event.run_number) for name in "abcd"))

    instance = order.run()
    retry(instance)
    world.run_until_idle()
    assert instance.output == ["a", "b", "c", "d"]
    assert sorted(ran) == ["a1", "a2", "b1", "c1", "c2", "d1"]


def test_a_retry_leaves_failures_that_were_caught(world: World, ran: list[str]) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        try:
            step.do("card", ONCE, lambda: 1 / 0)
        except StepFailed:
            pass
        return step.do("invoice", ONCE, lambda: 1 // (event.run_number - 1))

    instance = order.run()
    retry(instance)
    world.run_until_idle()
    assert instance.output == 1
    assert instance.step("card") == instance.step("card", run=1)


def test_what_answered_the_failure_is_done_again_where_it_fails_again(world: World, ran: list[str]) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.do("reserve", _say, ran, f"reserve{event.run_number}")
        try:
            step.do("charge", ONCE, lambda: 1 / 0)
        except StepFailed:
            step.do("release", _say, ran, f"release{event.run_number}")
            raise RuntimeError("no money") from None

    instance = order.run()
    assert instance.error == "RuntimeError: no money"
    retry(instance)
    world.run_until_idle()
    assert ran == ["reserve1", "release1", "release2"]
    assert instance.statuses() == {"reserve": "completed", "charge": "errored", "release": "completed"}


def test_a_race_that_failed_is_run_again(world: World) -> None:
    world.exempt["I4"] = "branches end in any order"

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        work = step.submit("work", ONCE, lambda: 1 // (event.run_number - 1))
        return step.first("race", step.submit_sleep("limit", 60), work)

    instance = order.run()
    assert instance.error.startswith("ZeroDivisionError")
    retry(instance)
    world.run_until_idle()
    assert instance.output == 1


def test_an_error_of_the_function_itself_is_tried_again_behind_all_its_steps(world: World, ran: list[str]) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.do("a", _say, ran, f"a{event.run_number}")
        if event.run_number == 1:
            raise ValueError("a bug, fixed meanwhile")
        return "done"

    instance = order.run()
    retry(instance)
    world.run_until_idle()
    assert (instance.output, ran) == ("done", ["a1"])
    assert world.operations.history.read("order", "i-1").origin == Origin("i-1", 1, None)


def test_a_wait_that_timed_out_gets_a_new_deadline_and_the_event_that_was_too_late(world: World) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        return step.wait_for_event("approval", "approval", timeout=60).payload

    instance = order.run()
    world.run_after(61)
    assert instance.error.startswith("EventTimeout")
    retry(instance)
    world.run_until_idle()
    assert instance.run_at == world.now + timedelta(seconds=60)
    instance.send("approval", "yes")
    world.run_until_idle()
    assert instance.output == "yes"


@on_one_database
def test_event_timeouts_are_not_mistaken_for_results(world: World) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        try:
            return step.wait_for_event("approval", "approval", timeout=60).payload
        except EventTimeout:
            return "late"

    instance = order.run()
    world.run_after(61)
    rewind(instance, "approval")
    instance.send("approval", "in time")
    world.run_until_idle()
    assert instance.output == "in time"


# --- fork ---------------------------------------------------------------------------------------


def test_a_fork_is_an_instance_of_its_own_that_goes_on_from_there(world: World, order, ran: list[str]) -> None:
    instance = order.run({"n": 1})
    before = instance.row
    other = fork(instance, "c")
    world.run_until_idle()
    assert other.output == ["a1", "b1", "c1"]
    assert ran == ["a1", "b1", "c1", "c1"]
    assert instance.row == before
    history = world.operations.history.read("order", "f-1")
    assert (history.run_number, history.params, history.origin) == (1, {"n": 1}, Origin("i-1", 1, "c"))


def test_a_fork_s_id_must_be_free(world: World, order) -> None:
    instance = order.run()
    fork(instance, "c")
    with pytest.raises(InstanceAlreadyExists):
        fork(instance, "b")
    assert world.instance("order", "f-1").statuses() == {"a": "completed", "b": "completed"}
    assert len({world.operations.rewind.fork("order", "i-1", "c") for _ in range(2)}) == 2


def test_events_that_a_fork_takes_along_come_before_its_own(world: World) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        return [step.wait_for_event(name, "paper").payload for name in ("first", "second", "third")]

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


def test_restart_or_create_tells_which_happened(world: World, order) -> None:
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


def test_restart_or_create_checks_what_it_would_create(world: World, order) -> None:
    with pytest.raises(ValueError, match="asleep"):
        world.operations.create.restart_or_create("order", id="i-1", if_status=["asleep"])
    assert world.operations.queries.list("order").items == ()
