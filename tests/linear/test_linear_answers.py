"""What the handlers of linear steps answer, raise and write."""

from __future__ import annotations

from typing import Any

import pytest

from celery_durable import Completed, LinearContext, LinearStep, TaskType, Waiting
from tests.support.lines import Line, rows, state, waits_for
from tests.support.world import World

everywhere = pytest.mark.parametrize("database", ["sqlite", "postgresql", "mariadb"], indirect=True)


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
            Waiting("paid", 0),
            "DurationInvalid: Duration 0 cannot be used: it is shorter than 1 s. Write a timedelta, seconds as a "
            'number, or text such as "10 seconds", "1.5 h", "3 days".',
        ),
    ],
    ids=["nothing", "no time"],
)
def test_an_answer_that_cannot_be_is_the_end(world: World, answer: Any, error: str) -> None:
    instance = Line(world, VALIDATE=lambda _: answer).flow.run()
    assert (rows(instance)[0], instance.error) == ("DEAD", error)


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
