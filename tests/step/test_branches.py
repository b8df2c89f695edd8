"""Branches: steps side by side. Each ends in a commit of its own, and a branch that has ended never runs again."""

from __future__ import annotations

import threading

import pytest

from celery_durable import EventTimeout, Retries, Step, StepConfig, StepFailed, StepTx, WorkflowEvent
from celery_durable.errors import NonRetryableError, StepNameReused
from tests.support.flows import flow_of
from tests.support.meetings import SECONDS, Meeting, fail
from tests.support.world import World, on_one_database


@pytest.fixture(autouse=True)
def side_by_side(world: World) -> None:
    world.exempt["I4"] = "branches end in any order"


# --- gather -------------------------------------------------------------------------------------


def test_branches_run_at_the_same_time_and_results_come_in_the_order_of_the_arguments(world: World) -> None:
    meet = Meeting(3)

    instance = flow_of(world, lambda step: step.gather(*(step.submit(name, meet, name) for name in "abc"))).run()
    assert instance.output == ["a", "b", "c"]
    assert instance.statuses() == dict.fromkeys("abc", "completed")


def test_a_wide_gather_leaves_few_threads_behind(world: World) -> None:
    threads, meet = [], threading.Barrier(12)

    def work() -> None:
        threads.append(threading.current_thread())
        meet.wait(SECONDS)

    order = flow_of(world, lambda step: step.gather(*(step.submit(f"{n}", work) for n in range(12))))
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
        "Step 'c' failed after 1 attempt: EventTimeout: No event 'approval' came within 1 min",
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

    order = flow_of(world, lambda step: step.gather(*(step.submit("page", counted, lambda n=n: n) for n in range(3))))
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


def test_an_error_that_is_ours_is_caught_as_a_result_too(world: World) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        bad = step.submit("bad", StepConfig(retries=0), lambda: object())
        (failure,) = step.gather(bad, return_exceptions=True)
        assert not isinstance(failure, NonRetryableError)
        return failure.error_name

    assert order.run().output == "NotSerializable"
