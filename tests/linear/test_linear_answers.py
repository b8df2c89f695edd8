"""What the handlers of linear steps answer, raise and write."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from celery_durable import Completed, EventRefused, LinearContext, LinearStep, TaskType, Waiting
from celery_durable.errors import AnswerTooLate, StepNotFound, ValueRefused
from celery_durable.model import WaitFilter
from tests.support.approvals import Approval
from tests.support.lines import Line, rows, state, waits_for
from tests.support.world import World


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


def test_a_step_asks_a_person_and_its_handler_gets_the_answer(world: World) -> None:
    line = Line(world, PAY=waits_for(ask="Pay 5 cents?", to="finance", schema=Approval))
    instance = line.flow.run()
    (question,) = world.operations.stats.waits(WaitFilter(to="finance")).items
    assert (question.step_name, question.ask) == ("PAY", "Pay 5 cents?")
    assert question == world.operations.asks.read("order", instance.id, "PAY")
    assert question.schema == Approval.model_json_schema()
    answer = functools.partial(world.operations.asks.answer, "order", instance.id, by="ada")
    with pytest.raises(EventRefused):
        answer("PAY", {"approved": "perhaps"})
    with pytest.raises(EventRefused):
        instance.send("paid", {"approved": "perhaps"})
    with pytest.raises(StepNotFound, match="Did you mean 'PAY'"):
        answer("PAID", {})
    payload = {"approved": True, "by": "x"}
    assert [answer("PAY", payload), answer(question.step_key, payload)] == [True, False]
    world.run_until_idle()
    assert [(ctx.event.payload, ctx.event.by) for ctx in line.calls if ctx.event] == [(payload, "ada")]
    assert answer("PAY", payload) is False
    with pytest.raises(AnswerTooLate, match="was answered by 'ada'"):
        answer("PAY", payload, by="bob")
    assert (state(instance), world.operations.stats.waits().items) == ("COMPLETED", ())


def test_a_step_may_ask_again_until_it_is_answered(world: World) -> None:
    line = Line(world, [LinearStep("PAY", max_attempts=1)], PAY=lambda _: Waiting("paid", "1 h", ask="Pay?"))
    instance = line.flow.run()
    world.run_after(3600)
    assert line.called == [("PAY", "RUN", 1), ("PAY", "WAITING_TIMEOUT", 1)]
    world.operations.asks.answer("order", instance.id, "PAY", None, by="ada")
    world.run_until_idle()
    assert (state(instance), instance.error) == (
        "FAILED",
        "ValueRefused: Step 'PAY' was answered in this run: ask again in a step of its own.",
    )


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_a_step_that_waits_again_without_a_question_asks_nobody(world: World) -> None:
    line = Line(world, [LinearStep("PAY")], PAY=waits_for(ask="Pay?", to="finance"))
    instance = line.flow.run()
    line.answer(PAY=lambda _: Waiting("paid", "1 h"))
    world.run_after(3600)
    assert world.operations.stats.waits(WaitFilter(is_asking=True)).items == ()
    with pytest.raises(ValueRefused, match="Step 'PAY' asks nobody"):
        world.operations.asks.answer("order", instance.id, "PAY", None, by="ada")
