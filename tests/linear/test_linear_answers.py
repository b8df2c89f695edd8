"""What the handlers of linear steps answer, raise and write."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa

from celery_durable import Completed, Dead, LinearContext, LinearStep, NonRetryableError, Retry, TaskType, Waiting
from tests.support.authors import ledger, names
from tests.support.lines import Line, rows, state, waits_for
from tests.support.world import World

everywhere = pytest.mark.parametrize("database", ["sqlite", "postgresql", "mariadb"], indirect=True)


def test_an_exception_is_a_retry_by_the_steps_policy(world: World) -> None:
    def fail(ctx: LinearContext) -> Any:
        if ctx.attempt < 3:
            raise ValueError("not yet")
        return Completed()

    line = Line(world, VALIDATE=fail)
    instance = line.flow.run()
    world.run_after(9)
    assert len(line.calls) == 1
    world.run_after(1)
    world.run_after(10)
    assert (rows(instance), instance.steps()[0].attempts) == (["DONE"] * 3, 2)
    assert instance.steps()[0].error is None


def test_an_exception_that_no_retry_helps_is_the_end(world: World) -> None:
    def refuse(_: LinearContext) -> Any:
        raise NonRetryableError("forbidden", name="Forbidden")

    instance = Line(world, VALIDATE=refuse).flow.run()
    assert (rows(instance)[0], instance.error) == ("DEAD", "Forbidden: forbidden")


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (
            None,
            "HandlerAnswerInvalid: The handler of step 'VALIDATE' returned a NoneType: return Completed(result), "
            "Waiting(event_type, timeout), Retry(backoff, error) or Dead(error).",
        ),
        (
            Completed({1, object()}),
            "NotSerializable: Result of step 'VALIDATE' cannot be stored as JSON: $ is a set, which has no JSON form. "
            "Use plain data (or pydantic models, dataclasses, datetimes, Decimals, UUIDs, enums); keep other things "
            "elsewhere and store a reference.",
        ),
        (
            Waiting("not a type"),
            "InvalidEventType: Event type 'not a type' is not allowed: use 1 to 100 of the characters a-z A-Z 0-9 _ - "
            "and do not begin with '-'.",
        ),
        (
            Waiting("paid", 0),
            "DurationInvalid: Duration 0 cannot be used: it is shorter than 1 s. Write a timedelta, seconds as a "
            'number, or text such as "10 seconds", "1.5 h", "3 days".',
        ),
    ],
    ids=["nothing", "no JSON", "no event type", "no time"],
)
def test_an_answer_that_cannot_be_is_the_end(world: World, answer: Any, error: str) -> None:
    instance = Line(world, VALIDATE=lambda _: answer).flow.run()
    assert (rows(instance)[0], instance.error) == ("DEAD", error)


def test_a_handler_that_takes_too_long_is_tried_again(world: World) -> None:
    def slow(ctx: LinearContext) -> Any:
        while ctx.attempt == 1:
            pass
        return Completed()

    line = Line(world, [LinearStep("VALIDATE", timeout=0.05, delay="10s")], VALIDATE=slow)
    instance = line.flow.run()
    error = instance.steps()[0].error
    assert error is not None
    assert error.name == "StepTimeout"
    world.run_after(10)
    assert state(instance) == "COMPLETED"


@everywhere
def test_what_a_handler_writes_is_committed_with_its_answer_and_dropped_with_a_retry(world: World) -> None:
    def book(ctx: LinearContext) -> Any:
        row = {"instance": ctx.instance_id, "run": ctx.run_number, "step": ctx.step, "attempt": ctx.attempt}
        ctx.tx.session.execute(sa.insert(ledger).values(row))
        ctx.tx.mutate(lambda session: session.execute(sa.insert(names).values(name=f"{ctx.step} {ctx.attempt}")))
        ctx.tx.send_task("mail", ctx.attempt)
        return Retry("1 s") if ctx.attempt == 1 else Completed()

    Line(world, [LinearStep("BOOK")], BOOK=book).flow.run()
    assert (world.booked(), world.names(), world.sent) == ([], [], [])
    world.run_after(1)
    assert (world.booked(), world.names()) == (["BOOK"], ["BOOK 2"])
    assert [message.content["args"] for message in world.sent] == [[2]]


def test_writes_for_a_terminal_error_are_committed_with_it(world: World) -> None:
    def die(ctx: LinearContext) -> Any:
        ctx.tx.on_terminal_error(lambda session: session.execute(sa.insert(names).values(name="undone")))
        return Dead("no")

    Line(world, VALIDATE=die).flow.run()
    assert world.names() == ["undone"]


@everywhere
def test_outbound_events_are_sent_with_the_commit_that_waits(world: World) -> None:
    line = Line(world, PAY=waits_for(outbound_events=[("PaymentRequested", {"order": 7}), ("Audited", None)]))
    line.flow.run()
    assert [(message.kind, message.name, message.content) for message in world.sent] == [
        ("event", "PaymentRequested", {"order": 7}),
        ("event", "Audited", None),
    ]


def test_what_one_step_sends_at_each_turn_has_ids_of_its_own(world: World) -> None:
    def thrice(ctx: LinearContext) -> Any:
        ctx.tx.send_task("mail")
        return Waiting("paid", "1 h") if ctx.task_type is not TaskType.WAITING_TIMEOUT else Completed()

    instance = Line(world, [LinearStep("PAY")], PAY=thrice).flow.run()
    instance.send("paid")
    world.run_until_idle()
    world.run_after(3600)
    assert state(instance) == "COMPLETED"
    assert len({message.id for message in world.sent}) == 3


def test_a_handlers_log_is_kept(world: World) -> None:
    def talk(ctx: LinearContext) -> Any:
        ctx.log.info("checked", cents=5)
        return Completed()

    instance = Line(world, VALIDATE=talk).flow.run()
    (line,) = instance.logs()
    assert (line.message, line.data, line.step_key, line.attempt) == ("checked", {"cents": 5}, "0", 1)
