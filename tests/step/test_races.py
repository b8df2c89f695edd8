"""`step.first`: the first branch to end wins, and the others are cancelled."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import sqlalchemy as sa

from celery_durable import Step, StepConfig, StepFailed, StepTx, WorkflowEvent
from celery_durable.errors import StepCancelled
from celery_durable.runner.session_lock import SessionLock
from celery_durable.step import TxBuffer
from tests.support.flows import flow_of
from tests.support.meetings import SECONDS, fail
from tests.support.world import World


@pytest.fixture(autouse=True)
def side_by_side(world: World) -> None:
    world.exempt["I4"] = "branches end in any order"


def test_the_first_to_end_wins_and_its_name_is_replayed(world: World) -> None:
    ran, seen = [], []
    never = threading.Event()

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        slow = step.submit("slow", lambda: ran.append("slow") or never.wait(SECONDS))
        fast = step.submit("fast", lambda: ran.append("fast") or "f")
        seen.append(step.first("race", slow, fast))
        step.sleep("rest", 60)
        return seen[-1]

    instance = order.run()
    assert instance.statuses() == {"slow": "cancelled", "fast": "completed", "race": "completed", "rest": "waiting"}
    never.set()
    world.run_after(60)
    assert instance.output == "f"
    assert seen == ["f", "f"]
    assert sorted(ran) == ["fast", "slow"]


def test_winner_and_losers_are_one_commit(world: World) -> None:
    never = threading.Event()

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        return step.first(
            "race",
            step.submit("slow", lambda: never.wait(SECONDS)),
            step.submit_sleep("nap", 60),
            step.submit("fast", lambda: "f"),
            step.submit_wait_for_event("approval", "approval"),
        )

    instance = order.create()
    seen = []
    world.worker.runtime.at["after-body"] = lambda: seen.append(instance.statuses())
    world.run_until_idle()
    never.set()
    assert instance.output == "f"
    # The branches that hibernate are recorded before the bodies begin; the end of all of them is one step.
    assert seen == [{"slow": "pending", "nap": "waiting", "fast": "pending", "approval": "waiting"}]
    ends = {step.finished_at for step in instance.steps()}
    assert len(ends) == 1


def test_an_event_wins_against_a_sleep_and_a_sleep_against_an_event(world: World) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        answer = step.first(
            "race",
            step.submit_wait_for_event("approval", "approval"),
            step.submit_sleep("patience", 60),
        )
        return None if answer is None else answer.payload

    one, two = order.run(id="a"), order.run(id="b")
    assert one.run_at == world.now + timedelta(seconds=60)
    one.send("approval", "yes")
    world.run_until_idle()
    world.run_after(60)
    assert (one.output, two.output) == ("yes", None)
    assert one.statuses() == {"approval": "completed", "patience": "cancelled", "race": "completed"}
    assert two.statuses() == {"approval": "cancelled", "patience": "completed", "race": "completed"}


def test_a_loser_never_consumes_an_event(world: World) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        winner = step.first("race", step.submit_sleep("nap", 0), step.submit_wait_for_event("loser", "page"))
        return [winner, step.wait_for_event("later", "page").payload]

    instance = order.create()
    instance.send("page", "a")
    world.run_until_idle()
    assert instance.output == [None, "a"]
    assert instance.events() == [("page", "a", "later")]
    assert instance.statuses()["loser"] == "cancelled"


def test_of_two_waits_only_one_takes_an_event(world: World) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        one, two = (step.submit_wait_for_event(name, name) for name in ("yes", "no"))
        return [step.first("race", one, two).type, step.wait_for_event("after", "no").payload]

    instance = order.create()
    instance.send("no", 1)
    instance.send("yes", 2)
    world.run_until_idle()
    assert instance.output == ["yes", 1]
    assert instance.events() == [("no", 1, "after"), ("yes", 2, "yes")]


def test_the_result_of_a_loser_is_refused_on_every_pass(world: World) -> None:
    seen = []

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        nap, other = step.submit_sleep("nap", 0), step.submit_sleep("other", 600)
        step.first("race", nap, other)
        try:
            other.result()
        except StepCancelled as exc:
            seen.append(str(exc))
        step.sleep("rest", 60)
        return step.gather(nap, other, return_exceptions=True)[0]

    instance = order.run()
    world.run_after(60)
    assert instance.output is None
    assert seen == ["Step 'other' was cancelled: another branch of first() ended before it. Use first()'s result."] * 2


def test_a_loser_that_has_not_started_never_starts(world: World) -> None:
    ran = []

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.first("race", step.submit_sleep("nap", 0), step.submit("work", lambda: ran.append("work")))
        step.sleep("rest", 60)

    instance = order.run()
    world.run_after(60)
    assert instance.status == "complete"
    assert ran == []


def test_a_loser_does_not_count_against_the_step_limit(make_world) -> None:
    world = make_world(max_steps=3)
    world.exempt["I4"] = "branches end in any order"

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.first("race", step.submit_sleep("nap", 0), *(step.submit(f"lost {n}", len, "") for n in range(2)))
        step.do("a", lambda: 1)
        step.sleep("rest", 60)
        step.do("b", lambda: 1)
        step.do("one too many", lambda: 1)

    instance = order.run()
    world.run_after(60)
    assert instance.error.startswith("StepLimitExceeded: ")
    assert instance.statuses()["b"] == "completed"


def test_a_branch_that_fails_first_wins_too(world: World) -> None:
    seen = []

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        try:
            step.first(
                "race",
                step.submit_sleep("nap", 600),
                step.submit("charge", StepConfig(retries=0), fail, ValueError("no")),
            )
        except StepFailed as exc:
            seen.append(str(exc))
        step.sleep("rest", 60)

    instance = order.run()
    world.run_after(60)
    assert instance.status == "complete"
    assert seen == ["Step 'charge' failed after 1 attempt: ValueError: no"] * 2
    assert instance.statuses() == {"nap": "cancelled", "charge": "errored", "race": "completed", "rest": "completed"}


def test_a_branch_that_is_to_be_tried_again_has_not_ended(world: World) -> None:
    order = flow_of(
        world,
        lambda step: step.first("race", step.submit("charge", fail, ValueError("no")), step.submit_sleep("nap", 5)),
    )
    instance = order.run()
    assert instance.statuses() == {"charge": "waiting", "nap": "waiting"}
    world.run_after(5)
    assert instance.output is None
    assert instance.statuses() == {"charge": "cancelled", "nap": "completed", "race": "completed"}


def test_a_branch_that_had_ended_before_the_race_wins_it(world: World) -> None:
    ran = []

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        done = step.submit("done", lambda: "d")
        done.result()
        return step.first("race", step.submit("new", lambda: ran.append("new")), done)

    instance = order.run()
    assert instance.output == "d"
    assert ran == []


def test_a_branch_that_lost_one_race_cannot_win_another(world: World) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        lost, slow = step.submit_sleep("lost", 600), step.submit("slow", lambda: "s")
        step.first("race 1", lost, step.submit_sleep("nap", 0))
        return step.first("race 2", lost, slow)

    assert order.run().output == "s"


def test_a_race_of_losers_only_says_so(world: World) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        lost = step.submit_sleep("lost", 600)
        step.first("race 1", lost, step.submit_sleep("nap", 0))
        step.first("race 2", lost)

    assert order.run().error == (
        "StepCancelled: Step 'lost' was cancelled: another branch of first() ended before it. Use first()'s result."
    )


def test_a_race_whose_winner_a_deploy_has_removed_says_so(world: World) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.first("race", step.submit_sleep("nap", 0), step.submit_sleep("rest", 600))
        step.sleep("pause", 60)

    instance = order.run()

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.first("race", step.submit_sleep("renamed", 0), step.submit_sleep("rest", 600))

    world.run_after(60)
    assert instance.error == (
        "DefinitionInvalid: step.first('race') was won by branch 'nap', which the code does not pass to it any more. "
        "Pass it again, or give the new race another name."
    )


def test_a_race_between_sessions_has_one_writer_in_the_end(world: World) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        who = event.instance_id, event.run_number
        step.first("race", *(step.submit(f"book {n}", world.book, *who) for n in range(3)))
        step.do("book after", world.book, *who)
        return "done"

    world.exempt["I9"] = "losers ran, and were rolled back"
    instance = order.run()
    assert instance.output == "done"
    assert len(world.booked()) == 2
    assert sorted(instance.statuses().values()) == ["cancelled", "cancelled", "completed", "completed", "completed"]


def test_a_loser_that_waited_for_its_record_is_not_recorded_with_a_later_branch(world: World) -> None:
    holds, has_ended = threading.Event(), threading.Event()

    def hold(tx: StepTx) -> str:
        tx.session.execute(sa.select(1))
        holds.set()
        has_ended.wait(SECONDS)
        threading.Event().wait(0.05)  # the other's end has reached the pass
        return "held"

    def end() -> str:
        holds.wait(SECONDS)
        has_ended.set()
        return "ended"

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.first("race", step.submit("hold", hold), step.submit("end", end))
        return step.gather(step.submit("one", lambda: 1), step.submit("two", lambda: 2))

    instance = order.run()
    assert instance.output == [1, 2]
    assert sorted(instance.statuses()[name] for name in ("hold", "end")) == ["cancelled", "completed"]


def test_what_a_body_that_was_given_up_kept_from_being_recorded_is_recorded_in_the_end() -> None:
    gate, given_up, recorded = SessionLock(), TxBuffer(), []
    late = threading.Thread(target=gate.acquire, args=(given_up,))
    late.start()
    late.join(SECONDS)
    gate.run_or_defer(TxBuffer(), lambda: recorded.append(1))
    assert recorded == []
    gate.release(given_up)
    gate.run_deferred()
    assert recorded == [1]


def test_what_a_cancelled_body_still_does_goes_nowhere(world: World) -> None:
    go_on, has_ended = threading.Event(), threading.Event()

    def book_late(tx: StepTx, instance: str, run: int) -> str:
        go_on.wait(SECONDS)
        try:
            return world.book(tx, instance, run)
        finally:
            has_ended.set()

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.first(
            "race",
            step.submit("book late", book_late, event.instance_id, event.run_number),
            step.submit("fast", lambda: 1),
        )
        return "done"

    instance = order.run()
    go_on.set()
    assert has_ended.wait(SECONDS)
    assert instance.output == "done"
    assert instance.statuses() == {"book late": "cancelled", "fast": "completed", "race": "completed"}
    assert world.booked() == []
