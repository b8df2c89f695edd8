"""Branches: steps side by side. Each ends in a commit of its own, and a branch that has ended never runs again."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import sqlalchemy as sa

from celery_durable import EventTimeout, Retries, Step, StepConfig, StepFailed, StepTx, WorkflowEvent
from celery_durable.errors import NonRetryableError, StepCancelled, StepNameReused
from celery_durable.runner.step_execution import SessionLock
from celery_durable.step import TxBuffer
from tests.engine.world import World, on_one_database

SECONDS = 10


@pytest.fixture(autouse=True)
def side_by_side(world: World) -> None:
    world.exempt["I4"] = "branches end in any order"


class Meeting:
    """Bodies that go on only when all of them are there: they ran at the same time."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size)

    def __call__(self, value):
        self._barrier.wait(SECONDS)
        return value


def fail(error: Exception):
    raise error


# --- gather -------------------------------------------------------------------------------------


def test_branches_run_at_the_same_time_and_results_come_in_the_order_of_the_arguments(world: World) -> None:
    meet = Meeting(3)

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        return step.gather(*(step.submit(name, meet, name) for name in "abc"))

    instance = order.run()
    assert instance.output == ["a", "b", "c"]
    assert instance.statuses() == dict.fromkeys("abc", "completed")


def test_a_wide_gather_leaves_few_threads_behind(world: World) -> None:
    threads, meet = [], threading.Barrier(12)

    def work() -> None:
        threads.append(threading.current_thread())
        meet.wait(SECONDS)

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.gather(*(step.submit(f"{n}", work) for n in range(12)))

    assert order.run().status == "complete"
    assert len(threads) == 12
    while sum(thread.is_alive() for thread in threads) > 4:  # the others were told to end
        threading.Event().wait(0.01)


def test_gather_of_nothing_is_nothing(world: World) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        return step.gather()

    assert order.run().output == []


def test_a_branch_that_has_ended_never_runs_again(world: World) -> None:
    ran = []

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        return step.gather(
            step.submit("quick", lambda: ran.append("quick") or "q"),
            step.submit_sleep("rest", 60),
            step.submit_wait_for_event("approval", "approval"),
        )

    instance = order.run()
    assert instance.statuses() == {"quick": "completed", "rest": "waiting", "approval": "waiting"}
    world.run_after(60)
    assert instance.statuses() == {"quick": "completed", "rest": "completed", "approval": "waiting"}
    instance.send("approval", "yes")
    world.run_until_idle()
    results = instance.output
    assert (results[0], results[1], results[2]["payload"]) == ("q", None, "yes")
    assert ran == ["quick"]


def test_a_branch_that_hibernates_does_not_stop_its_siblings(world: World) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        sleeping = step.submit_sleep("rest", 60)
        failing = step.submit("charge", fail, ValueError("closed"))
        working = step.submit("work", lambda: "worked")
        step.gather(sleeping, failing, working)

    instance = order.run()
    assert instance.statuses() == {"rest": "waiting", "charge": "waiting", "work": "completed"}


def test_an_instance_wakes_for_the_earliest_of_its_branches_and_ends_only_what_is_due(world: World) -> None:
    attempts = []

    def flaky() -> str:
        attempts.append(world.now)
        if len(attempts) == 1:
            raise ValueError("closed")
        return "paid"

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        return step.gather(
            step.submit_wait_for_event("approval", "approval", timeout="1 day"),
            step.submit_sleep("long", 7200),
            step.submit_sleep("short", 3600),
            step.submit("charge", flaky),
            return_exceptions=True,
        )[1:]

    instance = order.run()
    start = world.now
    for seconds, ended in [(10, "charge"), (3600, "short"), (7200, "long")]:
        assert instance.run_at == start + timedelta(seconds=seconds)
        assert instance.statuses()[ended] == "waiting"
        world.run_after(instance.run_at - world.now)
        assert instance.statuses()[ended] == "completed"
    assert instance.run_at == start + timedelta(days=1)
    world.run_after(timedelta(days=1))
    assert instance.statuses() == {
        "approval": "errored",
        "long": "completed",
        "short": "completed",
        "charge": "completed",
    }
    assert instance.output == [None, None, "paid"]


def test_gather_raises_the_first_failure_in_the_order_of_the_arguments(world: World) -> None:
    once = StepConfig(retries=0)
    later = threading.Event()
    seen = []

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        first = step.submit("a", once, lambda: later.wait(SECONDS) and fail(ValueError("a failed last")))
        second = step.submit("b", once, lambda: later.set() or fail(ValueError("b failed first")))
        try:
            step.gather(step.submit("c", lambda: 1), first, second)
        except StepFailed as exc:
            seen.append((str(exc), type(exc.__cause__)))
        step.sleep("rest", 60)

    instance = order.run()
    world.run_after(60)
    assert instance.status == "complete"
    text = "Step 'a' failed after 1 attempt: ValueError: a failed last"
    assert seen == [(text, ValueError), (text, type(None))]


def test_gather_raises_only_when_no_branch_is_open_any_more(world: World) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        try:
            step.gather(step.submit("a", StepConfig(retries=0), fail, ValueError("no")), step.submit_sleep("rest", 60))
        except StepFailed:
            return step.now().isoformat()

    instance = order.run()
    assert instance.status == "waiting"
    world.run_after(60)
    assert instance.output == world.now.isoformat()


def test_gather_can_hand_out_failures_as_results(world: World) -> None:
    seen = []

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        seen.append(
            step.gather(
                step.submit("a", StepConfig(retries=0), fail, ValueError("no")),
                step.submit("b", lambda: "b"),
                step.submit_wait_for_event("c", "approval", timeout=60),
                return_exceptions=True,
            )
        )
        return [type(result).__name__ for result in seen[-1]]

    instance = order.run()
    world.run_after(60)
    assert instance.output == ["StepFailed", "str", "EventTimeout"]
    assert [str(seen[-1][0]), str(seen[-1][2])] == [
        "Step 'a' failed after 1 attempt: ValueError: no",
        "Step 'c' failed after 1 attempt: EventTimeout: No event 'approval' came within 0:01:00",
    ]
    assert isinstance(seen[-1][2], EventTimeout)


def test_a_branch_is_tried_again_while_its_siblings_rest(world: World) -> None:
    attempts, ran = [], []

    def flaky(tx: StepTx) -> str:
        attempts.append(tx.attempt)
        return fail(ValueError("closed")) if len(attempts) < 4 else "paid"

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        return step.gather(
            step.submit("charge", StepConfig(retries=Retries(limit=3, delay=1)), flaky),
            step.submit("work", lambda: ran.append("work")),
            step.submit_sleep("rest", 5),
        )

    instance = order.run()
    for seconds in (1, 2):
        world.run_after(seconds)
    assert instance.statuses() == {"charge": "waiting", "work": "completed", "rest": "waiting"}
    world.run_after(4)
    assert instance.output == ["paid", None, None]
    assert attempts == [1, 2, 3, 4]
    assert ran == ["work"]


def test_events_go_to_branches_in_the_order_of_the_arguments(world: World) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        one, two = (step.submit_wait_for_event(name, "page") for name in ("one", "two"))
        return [answer.payload for answer in step.gather(one, two)]

    instance = order.run()
    instance.send("page", "a")
    world.run_until_idle()
    assert instance.statuses() == {"one": "completed", "two": "waiting"}
    instance.send("page", "b")
    world.run_until_idle()
    assert instance.output == ["a", "b"]


def test_a_submitted_branch_can_be_asked_for_its_result_alone(world: World) -> None:
    ran = []

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        one, two = (step.submit(name, lambda name=name: ran.append(name) or name) for name in ("one", "two"))
        assert repr(one) == "<StepFuture 'one'>"
        second = two.result()
        step.sleep("rest", 60)
        return [second, one.result(), two.result(), *step.gather(one, two)]

    instance = order.run()
    assert ran == ["two"]
    world.run_after(60)
    assert instance.output == ["two", "one", "two", "one", "two"]
    assert ran == ["two", "one"]


def test_a_branch_that_nobody_gathers_is_an_error(world: World) -> None:
    ran = []

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.submit("a", lambda: ran.append("a"))
        step.submit_sleep("b", 60)
        step.submit("c", lambda: 1).result()

    instance = order.run()
    assert instance.error == (
        "BranchNeverGathered: The workflow returned, but did not gather 'a', 'b'. A submitted step runs when it is "
        "passed to step.gather() or step.first(), or when its result() is called."
    )
    assert ran == []


def test_a_branch_that_nobody_gathers_does_not_hide_the_error_that_ended_the_function(world: World) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.submit("a", lambda: 1)
        raise LookupError("no shelf")

    assert order.run().error == "LookupError: no shelf"


REUSED = (
    "Step name 'a' is used twice at the same time. Names identify steps: put the loop index or a key in the name, "
    "or pass StepConfig(repeat=True) to count the occurrences."
)


@on_one_database
@pytest.mark.parametrize(
    "reuse",
    [
        lambda step: (step.submit("a", len, ""), step.submit("a", len, "")),
        lambda step: (step.submit("a", len, ""), step.do("a", len, "")),
        lambda step: (step.submit_sleep("a", 1), step.sleep("a", 1)),
        lambda step: step.gather(*[step.submit("a", len, "")] * 2),
    ],
    ids=["submit", "do", "sleep", "same future"],
)
def test_the_same_name_at_the_same_time_is_an_error(world: World, reuse) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        with pytest.raises(StepNameReused) as caught:
            reuse(step)
        step.gather()
        raise caught.value

    assert order.run().error == f"StepNameReused: {REUSED}"


def test_repeated_branches_are_counted(world: World) -> None:
    counted = StepConfig(repeat=True)

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        return step.gather(*(step.submit("page", counted, lambda n=n: n) for n in range(3)))

    instance = order.run()
    assert instance.output == [0, 1, 2]
    assert [step.name for step in instance.steps()] == ["page"] * 3


def test_branches_write_through_their_own_sessions(world: World) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        books = [step.submit(f"book {n}", world.book, event.instance_id, event.run_number) for n in range(4)]
        step.do("book before", world.book, event.instance_id, event.run_number)
        done = step.gather(step.submit("quick", lambda: 1), *books, step.submit("late", lambda: 2))
        step.do("book after", world.book, event.instance_id, event.run_number)
        return done

    instance = order.run()
    assert instance.output == [1, *(f"booked book {n}" for n in range(4)), 2]
    assert sorted(world.booked()) == ["book 0", "book 1", "book 2", "book 3", "book after", "book before"]


def test_a_branchs_failed_session_leaves_its_siblings_alone(world: World) -> None:
    def book_and_fail(tx: StepTx, instance: str, run: int) -> None:
        world.book(tx, instance, run)
        raise ValueError("after the write")

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        who = event.instance_id, event.run_number
        return step.gather(
            step.submit("book a", world.book, *who),
            step.submit("book b", StepConfig(retries=0), book_and_fail, *who),
            step.submit("book c", world.book, *who),
            return_exceptions=True,
        )[0::2]

    assert order.run().output == ["booked book a", "booked book c"]
    assert sorted(world.booked()) == ["book a", "book c"]


# --- first --------------------------------------------------------------------------------------


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
    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        return step.first("race", step.submit("charge", fail, ValueError("no")), step.submit_sleep("nap", 5))

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


def test_gather_takes_branches_of_this_run_only(world: World) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        class Impostor:
            branch, name, key = None, "x", "x"

            def __repr__(self) -> str:
                return "<an impostor>"

        step.gather(Impostor())

    assert order.run().error == "DefinitionInvalid: <an impostor> is no branch of this workflow run."


def test_an_error_that_is_ours_is_caught_as_a_result_too(world: World) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        bad = step.submit("bad", StepConfig(retries=0), lambda: object())
        (failure,) = step.gather(bad, return_exceptions=True)
        assert not isinstance(failure, NonRetryableError)
        return failure.error_name

    assert order.run().output == "NotSerializable"
