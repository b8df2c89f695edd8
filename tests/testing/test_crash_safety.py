"""assert_crash_safe passes what is safe, and finds what is not, with words that help."""

from __future__ import annotations

import random
from itertools import count

import pytest
import sqlalchemy as sa

from celery_durable import Cancelled, EventTimeout, Retries, StepConfig, StepLost, StepTx
from celery_durable.testing import (
    CrashSchedule,
    DurableHarness,
    HarnessMisuse,
    NotCrashSafe,
    UncheckedTables,
    assert_crash_safe,
)

rows = sa.MetaData()
books = sa.Table(
    "books", rows, sa.Column("id", sa.Integer, primary_key=True), sa.Column("step", sa.String(50), nullable=False)
)
FIRST = "runner-1 died at checkpoint "
HINT = (
    "A workflow must make the same calls every time it is run: take time and chance from step.now(), step.random() "
    "and step.uuid(), and everything else from params and from the results of steps."
)


def book(tx: StepTx) -> str:
    tx.session.execute(sa.insert(books).values(step=tx.name))
    return tx.name


def note(tx: StepTx) -> None:
    tx.mutate(lambda session: session.execute(sa.insert(books).values(step=tx.name)))


def trip(event, step):
    hotel = step.do("hotel", book)
    step.do("note", note)
    miles = step.do("miles", int, event.payload)
    flight = step.do("flight", book)
    step.do("thanks", str, miles)
    return [hotel, miles, flight]


def test_a_workflow_of_five_steps_is_safe() -> None:
    report = assert_crash_safe(trip, 5, side_effects=rows)
    assert report.schedules > report.checkpoints > 20
    assert report.crashes > report.checkpoints
    assert report.freezes > 5


def year(event, step):
    step.do("begin", book)
    step.sleep("winter", "90 days")
    answer = step.wait_for_event("answer", "answer", timeout="2 days").payload
    try:
        step.wait_for_event("nothing", "nothing", timeout="2 days")
    except EventTimeout:
        step.do("note", note)
    flaky = StepConfig(retries=Retries(limit=9, delay="1 hour"))
    parts = step.gather(
        step.submit("one", flaky, lambda tx: 1 // (tx.attempt > 1)),
        step.submit("two", book),
        step.submit_wait_for_event("go", "go"),
    )
    first = step.first("first", step.submit_sleep("short", 60), step.submit_sleep("long", "1 day"))
    return [answer, parts[:2], first]


@pytest.mark.gate
def test_sleeps_events_retries_and_branches_take_their_course() -> None:
    report = assert_crash_safe(year, events=[("answer", 42), ("go", None)], side_effects=rows, schedules=60)
    assert report.checkpoints > 50


def test_what_it_creates_is_looked_at_too() -> None:
    def child(event, step):
        return step.do("book child", book)

    class Child:
        definition = None

    def parent(event, step):
        return step.do("create", lambda tx: tx.create(Child, id="child-1"))

    from celery_durable.definitions import define

    Child.definition = define(child)
    assert_crash_safe(parent, workflows=[Child.definition], side_effects=rows, schedules=20)


def test_a_step_with_a_random_name_is_found() -> None:
    def lottery(event, step):
        step.do("draw", int)
        step.do(f"number {random.random()}", int)
        step.do("pay", int)

    with pytest.raises(NotCrashSafe) as caught:
        assert_crash_safe(lottery)
    assert str(caught.value).startswith(
        "Workflow 'lottery' is not crash safe (nobody died):\n"
        "  lottery/crash-safe records {'draw': 'completed', 'number "
    )
    assert HINT in str(caught.value)


def test_a_decision_that_a_replay_makes_otherwise_is_found() -> None:
    passes = count()

    def undecided(event, step):
        is_first = next(passes) == 0
        step.do("begin", int)
        if is_first:
            step.do("only once", int)
        step.sleep("rest", 60)

    with pytest.raises(NotCrashSafe, match="records") as caught:
        assert_crash_safe(undecided)
    assert HINT in caught.value.problems[0]


def test_a_write_outside_the_step_is_found_and_its_schedule_can_be_run_again() -> None:
    harnesses: list[DurableHarness] = []

    def setup(harness: DurableHarness) -> None:
        harness.create_tables(rows)
        harnesses.append(harness)

    def careless(event, step):
        def work() -> None:
            with harnesses[-1].session() as session:
                session.execute(sa.insert(books).values(step="work"))
                session.commit()

        step.do("work", work)

    def booked(session):
        return session.scalar(sa.select(sa.func.count()).select_from(books))

    with pytest.raises(NotCrashSafe) as caught:
        assert_crash_safe(careless, setup=setup, side_effects=booked)
    number = int(caught.value.schedule.partition("(crashes=(")[2].partition(",")[0])
    expected = (
        f"Workflow 'careless' is not crash safe (runner-1 died at checkpoint {number} "
        "(after-body, the last body being that of step 'work')):\n"
        "  The side effects are 2, and undisturbed 1. Write through tx.session or tx.mutate, or have the receiver "
        "tell repetitions apart by tx.idempotency_key.\n"
        f"Run only this again: assert_crash_safe(..., replay=CrashSchedule(crashes=({number},), freeze=None, "
        "deliveries='once', seed=0))"
    )
    assert str(caught.value) == expected
    with pytest.raises(NotCrashSafe) as again:
        assert_crash_safe(
            careless, setup=setup, side_effects=booked, replay=CrashSchedule(crashes=(number,), freeze=None)
        )
    assert str(again.value) == expected
    ran = assert_crash_safe(careless, setup=setup, side_effects=booked, replay=CrashSchedule(crashes=(0,)))
    assert (ran.schedules, ran.crashes) == (1, 1)


def test_a_step_that_may_not_be_tried_again_is_found() -> None:
    def once(event, step):
        return step.do("pay", StepConfig(retries=0), int)

    with pytest.raises(NotCrashSafe) as caught:
        assert_crash_safe(once)
    assert caught.value.problems[0] == (
        "once/crash-safe is errored with OutcomeUnknown: the worker of attempt 1 died or lost its lease, so it is "
        "unknown whether its function did its work; it is not called again, and undisturbed complete."
    )


def test_an_output_that_tells_the_time_is_compared_by_what_must_be_the_same() -> None:
    def clocked(event, step):
        price = step.do("price", int, 7)
        return {"price": price, "at": step.now().isoformat()}

    with pytest.raises(NotCrashSafe, match="returns"):
        assert_crash_safe(clocked)
    assert_crash_safe(clocked, compare=lambda output: output["price"], schedules=9)


def test_mocks_stand_in_for_bodies() -> None:
    def charge(event, step):
        return step.do("charge", lambda: 1 / 0)

    assert_crash_safe(charge, setup=lambda harness: harness.mocks.mock_step_result("charge", "ch_1"), schedules=9)


def test_an_event_that_nobody_waits_for_is_refused() -> None:
    with pytest.raises(HarnessMisuse) as caught:
        assert_crash_safe(trip, 5, events=[("answer", 1)], side_effects=rows)
    assert str(caught.value) == "Workflow 'trip' never waited for ['answer']: leave these out of events=."


def test_of_many_schedules_the_seed_chooses_some() -> None:
    report = assert_crash_safe(trip, 1, side_effects=rows, schedules=9)
    assert report.schedules == 9


@pytest.mark.gate
def test_the_same_seed_does_the_same() -> None:
    assert assert_crash_safe(trip, 1, side_effects=rows, seed=5) == assert_crash_safe(
        trip, 1, side_effects=rows, seed=5
    )


films_too = sa.MetaData()
films = sa.Table("films", films_too, sa.Column("id", sa.Integer, primary_key=True), sa.Column("title", sa.String(50)))


def read_and_watch(event, step):
    step.do("book", book)
    step.do("film", lambda tx: tx.session.execute(sa.insert(films).values(title="M")) and None)


def test_tables_that_are_written_and_not_compared_are_named() -> None:
    with pytest.warns(UncheckedTables) as seen:
        assert_crash_safe(
            read_and_watch, side_effects=rows, setup=lambda harness: harness.create_tables(films_too), schedules=2
        )
    assert [str(each.message) for each in seen] == [
        "Workflow 'read_and_watch' also writes to films, which side_effects= does not name. A doubled row there is not "
        'found. Name these tables too, or pass side_effects="all".'
    ]


def test_all_tables_are_compared_without_their_names() -> None:
    harnesses: list[DurableHarness] = []

    def setup(harness: DurableHarness) -> None:
        harness.create_tables(rows)
        harness.create_tables(films_too)
        harnesses.append(harness)

    def careless(event, step):
        def work() -> None:
            with harnesses[-1].session() as session:
                session.execute(sa.insert(films).values(title="M"))
                session.commit()

        step.do("work", work)

    assert_crash_safe(read_and_watch, side_effects="all", setup=setup, schedules=5)
    with pytest.raises(NotCrashSafe, match=r"The side effects are {.books.: \[\], .films.: \[\(.M.,\), \(.M.,\)\]}"):
        assert_crash_safe(careless, side_effects="all", setup=setup)


# --- cancelled runs ---------------------------------------------------------------------------------


def stay(event, step):
    try:
        step.do("hotel", book)
        step.wait_for_event("arrive", "arrived", timeout="3 days")
    except Cancelled:
        step.do("give back", book)
        raise
    return "stayed"


def test_a_cleanup_is_safe() -> None:
    cancelled = assert_crash_safe(stay, side_effects=rows, cancel_at="arrive", schedules=60)
    stayed = assert_crash_safe(stay, events=[("arrived", 1)], side_effects=rows, schedules=1)
    assert cancelled.checkpoints > stayed.checkpoints


def test_a_cleanup_that_is_repeated_is_found() -> None:
    refunds = count()

    def forgetful(event, step):
        try:
            step.sleep("rest", "3 days")
        except Cancelled:
            step.do(f"give back {next(refunds)}", str)
            raise

    with pytest.raises(NotCrashSafe) as caught:
        assert_crash_safe(forgetful, cancel_at="rest")
    assert "give back" in str(caught.value)


def test_a_cancelled_run_that_fails_is_expected() -> None:
    def returns(event, step):
        try:
            step.sleep("rest", "3 days")
        except Cancelled:
            return "as if nothing had happened"

    assert_crash_safe(returns, cancel_at="rest", expect_error="CancellationSwallowed", schedules=9)
    with pytest.raises(HarnessMisuse) as caught:
        assert_crash_safe(returns, cancel_at="rest")
    assert "ends errored with CancellationSwallowed" in str(caught.value)
    assert "and not terminated" in str(caught.value)


@pytest.mark.parametrize("options", [{"events": [("answer", 1)]}, {"cancel_at": "rest"}])
def test_a_run_that_fails_before_its_wait_is_refused_with_its_error(options) -> None:
    def fails(event, step):
        step.do("divide", StepConfig(retries=0), lambda: 1 // 0)
        step.wait_for_event("rest", "answer")

    with pytest.raises(HarnessMisuse) as caught:
        assert_crash_safe(fails, **options)
    assert "ZeroDivisionError" in str(caught.value)


def test_a_step_that_may_be_lost_may_end_a_run_in_another_way() -> None:
    def careful(event, step):
        try:
            return step.do("pay", StepConfig(on_lost="fail", retries=0), lambda: "paid")
        except StepLost:
            return step.do("ask", book)

    with pytest.raises(NotCrashSafe, match=r"may_lose=\['pay'\]"):
        assert_crash_safe(careful, side_effects=rows)
    assert_crash_safe(careful, side_effects=rows, may_lose=["pay"])


def test_a_step_at_which_the_run_never_waits_is_refused() -> None:
    with pytest.raises(HarnessMisuse) as caught:
        assert_crash_safe(trip, 3, side_effects=rows, cancel_at="hotel")
    assert str(caught.value) == (
        "Workflow 'trip' never waited at step 'hotel', so it was not cancelled. Name a step that sleeps, or that waits "
        "for an event, a task or a child, in cancel_at=."
    )
