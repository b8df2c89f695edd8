"""Scenarios: actions, arguments from the context, failures that say where, cleanup."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from datetime import timedelta

import pytest
import sqlalchemy as sa

from celery_durable import EventTimeout, InstanceTerminal, StepTx
from celery_durable.testing import START, HarnessMisuse, ScenarioFailed, databases
from celery_durable.testing.scenario import (
    advance_time_and_run_until_idle,
    answer,
    assert_,
    cancel,
    concurrent,
    crash_at,
    create,
    create_batch,
    define_scenario,
    event,
    event_and_run_until_idle,
    hold,
    initialize_and_run_until_idle,
    pause,
    read,
    release,
    restart,
    restart_runner,
    resume,
    run_scenario,
    run_until_idle,
    terminate,
    tick,
)

rows = sa.MetaData()
books = sa.Table("scenario_books", rows, sa.Column("instance", sa.String(50)))


def buy(event, step):
    step.do("book", book, event.instance_id)
    step.sleep("think", "1 day")
    try:
        return step.wait_for_event("approval", "approval", timeout="1 day").payload
    except EventTimeout:
        return "expired"


def book(tx: StepTx, id: str) -> None:
    tx.session.execute(sa.insert(books).values(instance=id))


def make_tables(ctx) -> None:
    ctx.harness.create_tables(rows)


def booked(ctx) -> list[str]:
    with ctx.harness.session() as session:
        return list(session.scalars(sa.select(books.c.instance).order_by(books.c.instance)))


def scenario(*steps, workflows=(buy,), setup=make_tables):
    return define_scenario("buying", workflows=workflows, steps=steps, setup=setup)


def status(ctx, id=None) -> str:
    return str(ctx.instance(id).status().status)


def test_a_scenario_tells_a_story_from_create_to_result() -> None:
    ctx = run_scenario(
        scenario(
            initialize_and_run_until_idle(buy, id="b-1"),
            read(booked, assert_=lambda found: found == ["b-1"]),
            advance_time_and_run_until_idle(by="1 day"),
            read(status, store_as="before"),
            event_and_run_until_idle("approval", lambda ctx: {"was": ctx["before"]}),
            assert_(lambda ctx: ctx.instance("b-1").result() == {"was": "waiting"}),
            read(lambda ctx: ctx.instance().result(), store_as="result"),
        )
    )
    assert ctx["result"] == {"was": "waiting"}


def test_every_verb_does_what_it_says() -> None:
    run_scenario(
        scenario(
            create("buy", id="b-1"),
            tick(),
            read(status, assert_=lambda found: found == "waiting"),
            create_batch(buy, {"b-2": None, "b-3": None}),
            run_until_idle(max_ticks=10),
            read(booked, assert_=lambda found: found == ["b-1", "b-2", "b-3"]),
            pause("b-2"),
            restart_runner(),
            event("approval", "early", id="b-1", event_id="mail-1"),
            advance_time_and_run_until_idle(to=START + timedelta(days=1)),
            assert_(lambda ctx: status(ctx, "b-1") == "complete"),
            assert_(lambda ctx: status(ctx, "b-2") == "paused"),
            resume(id="b-2"),
            run_until_idle(),
            terminate(id=lambda ctx: ctx.instances[2].id, reason="sold"),
            assert_(lambda ctx: status(ctx, "b-3") == "terminated"),
            restart("b-3", reason="bought back"),
            crash_at("after-body"),
            run_until_idle(),
            assert_(lambda ctx: ctx.harness.journal[-1].endswith("crashed")),
            advance_time_and_run_until_idle(by="3 days"),
            assert_(lambda ctx: [status(ctx, each) for each in ("b-2", "b-3")] == ["complete", "complete"]),
            restart("b-2"),
            run_until_idle(),
            cancel("b-2", reason="sold"),
            run_until_idle(),
            read(lambda ctx: ctx.instance("b-2").history().reason, assert_=lambda why: why == "cancelled: sold"),
            read(lambda ctx: ctx.instance("b-3").ref.run_number, assert_=lambda run: run == 2),
        )
    )


def test_runners_at_once_and_bodies_held_back() -> None:
    run_scenario(
        scenario(
            hold("book"),
            create(buy, id="b-1"),
            concurrent(runners=3),
            read(booked, assert_=lambda found: found == []),
            release("book"),
            run_until_idle(),
            read(booked, assert_=lambda found: found == ["b-1"]),
            assert_(lambda ctx: status(ctx) == "waiting"),
        ),
        seed=3,
    )


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (
            read(status, assert_=lambda found: found == "complete"),
            "Scenario 'buying', step 2 (read): 'waiting' was read, and does not pass",
        ),
        (
            assert_(lambda ctx: False, "it should be complete"),
            "Scenario 'buying', step 2 (assert_): it should be complete",
        ),
        (
            event("approval", id="b-2"),
            "Scenario 'buying', step 2 (event): HarnessMisuse: This scenario has created no instance 'b-2': use "
            "create() or initialize_and_run_until_idle() before.",
        ),
        (
            event("approval", lambda ctx: ctx["nothing"]),
            "Scenario 'buying', step 2 (event): HarnessMisuse: Nothing is stored as 'nothing'. Stored so far: nothing.",
        ),
        (
            release("book"),
            "Scenario 'buying', step 2 (release): HarnessMisuse: Step 'book' is not held: use hold() before.",
        ),
    ],
)
def test_a_step_that_fails_is_named_with_its_scenario(step, message, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(databases, "_MEMORY", tmp_path)
    with pytest.raises(ScenarioFailed) as caught:
        run_scenario(scenario(initialize_and_run_until_idle(buy, id="b-1"), step))
    assert str(caught.value) == message
    assert isinstance(caught.value, AssertionError)
    assert list(tmp_path.iterdir()) == []


def test_the_cause_of_a_failure_is_the_error_itself() -> None:
    with pytest.raises(ScenarioFailed) as caught:
        run_scenario(scenario(initialize_and_run_until_idle(buy), terminate(), terminate()))
    assert isinstance(caught.value.__cause__, InstanceTerminal)
    assert (caught.value.scenario, caught.value.number, caught.value.action) == ("buying", 3, "terminate")
    with pytest.raises(ScenarioFailed, match=r"^Scenario 'buying', step 0 \(setup\): ZeroDivisionError"):
        run_scenario(scenario(setup=lambda ctx: 1 / 0))


def test_none_passes_an_assertion_that_asserts_by_itself() -> None:
    def check(ctx) -> None:
        assert booked(ctx) == []

    run_scenario(scenario(assert_(check), read(booked, assert_=lambda found: None)))


def test_a_verb_that_is_given_too_much_or_too_little_is_refused_at_once() -> None:
    with pytest.raises(HarnessMisuse, match=r"^read\(\) needs exactly one of assert_= and store_as=\.$"):
        read(booked, assert_=bool, store_as="found")
    with pytest.raises(HarnessMisuse, match=r"^read\(\) needs exactly one of assert_= and store_as=\.$"):
        read(booked)
    with pytest.raises(
        HarnessMisuse, match=r"^advance_time_and_run_until_idle\(\) needs exactly one of by= and to=\.$"
    ):
        advance_time_and_run_until_idle()


def test_steps_are_data() -> None:
    step = event("approval", 1, id="b-1")
    assert step == event("approval", 1, id="b-1")
    assert step.action == "event"
    assert dict(step.given) == {"type": "approval", "payload": 1, "id": "b-1", "event_id": None}
    with pytest.raises(FrozenInstanceError):
        step.action = "other"


def approve(event, step):
    return step.wait_for_event("approve", "approval", schema=bool, ask="Approve?").by


def test_a_scenario_answers_a_question():
    run_scenario(
        scenario(
            initialize_and_run_until_idle(approve, id="a-1"),
            answer("approve", True, by="ada"),  # the payload
            run_until_idle(),
            assert_(lambda ctx: ctx.instance().result() == "ada"),
            workflows=[approve],
        )
    )
