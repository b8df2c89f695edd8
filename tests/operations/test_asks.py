"""Answers of people: checked before they are stored, and the first one counts."""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

import pydantic
import pytest

from celery_durable import EventRefused, NonRetryableError, Step, notify
from celery_durable.errors import (
    AnswerTooLate,
    AnswerUnchecked,
    InstanceNotFound,
    NameInvalid,
    StepNotFound,
    ValueRefused,
)
from celery_durable.model import Scope, WaitFilter
from celery_durable.store.engine import Store
from celery_durable.store.events import run_events
from tests.support.approvals import Approval
from tests.support.databases import on_databases
from tests.support.flows import flow_of
from tests.support.instances import FlowControl, Instance
from tests.support.world import World

database = on_databases("sqlite", "postgresql", "mariadb")
YES, NO = {"approved": True, "by": "x"}, {"approved": False, "by": "x"}


def wait(step: Step, name: str = "approve", **options: Any) -> Any:
    options = {"schema": Approval, "ask": "Refund?", "to": "finance"} | options
    return step.wait_for_event(name, "approval", **options)


def ask(world: World, **options: Any) -> Instance:
    def body(step: Step) -> list[Any]:
        event = wait(step, **options)
        return [event.payload.approved, event.by]

    return flow_of(world, body).run()


def answer(instance: Instance, payload: Any, step: str = "approve", by: str = "ada", **options: Any) -> bool:
    accepted: bool = instance.world.operations.asks.answer(
        instance.workflow, instance.id, step, payload, by=by, **options
    )
    return accepted


def history(instance: Instance, run: int | None = None) -> Any:
    return instance.world.operations.history.read(instance.workflow, instance.id, run=run)


def test_the_person_who_answers_is_in_the_event_the_audit_and_the_workflow(world: World) -> None:
    instance = ask(world)
    assert answer(instance, YES) is True
    world.run_until_idle()
    assert instance.output == [True, "ada"]
    (event,) = history(instance).events
    assert (event.event_id, event.type, event.by, event.payload) == ("answer:approve", "approval", "ada", YES)
    assert event.consumed_by_step_key == "approve"
    assert [(each.step_key, each.action, each.by) for each in history(instance).audit] == [("approve", "answer", "ada")]


def test_the_second_answer_is_told_who_answered_and_when(world: World) -> None:
    instance = ask(world)
    at = world.now
    shown = f"{at:%Y-%m-%d %H:%M:%S} UTC"
    answer(instance, YES)
    for _ in range(2):  # before and after the workflow has taken it
        world.advance(1)
        with pytest.raises(AnswerTooLate) as late:
            answer(instance, NO, by="bob")
        world.run_until_idle()
    assert str(late.value) == (
        f"Step 'approve' of run 1 of instance 'i-1' of workflow 'order' was answered by 'ada' at {shown}. "
        "This answer was not stored."
    )
    assert (late.value.by, late.value.at - at < at.resolution * 10**6) == ("ada", True)
    assert (instance.output, len(history(instance).events)) == ([True, "ada"], 1)


def test_a_person_may_repeat_the_answer_that_counts(world: World) -> None:
    instance = ask(world)
    assert [answer(instance, YES), answer(instance, YES)] == [True, False]
    with pytest.raises(AnswerTooLate):
        answer(instance, NO)
    assert len(history(instance).events) == 1


@pytest.mark.parametrize("is_known", [True, False])
def test_an_answer_that_does_not_fit_is_refused_before_it_is_stored(
    world: World, monkeypatch: pytest.MonkeyPatch, is_known: bool
) -> None:
    instance = ask(world)
    if not is_known:
        monkeypatch.delitem(sys.modules, Approval.__module__)
    with pytest.raises(EventRefused) as refused:
        answer(instance, {"approved": "perhaps"})
    assert sorted(where for where, _ in refused.value.problems) in (["$.approved", "$.by"], ["$", "$.approved"])
    assert "perhaps" not in str(refused.value)
    assert (history(instance).events, instance.status) == ((), "waiting")
    assert answer(instance, YES) is True


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_an_answer_that_this_process_cannot_check_is_refused(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    instance = ask(world)
    monkeypatch.delitem(sys.modules, Approval.__module__)
    monkeypatch.setitem(sys.modules, "jsonschema_rs", None)
    with pytest.raises(AnswerUnchecked) as refused:
        answer(instance, YES)
    assert str(refused.value) == (
        "This process cannot check an answer to step 'approve', so it was not stored: it has not imported "
        "tests.support.approvals:Approval, and jsonschema-rs is not installed. Import the workflow here, or "
        "pip install 'celery-durable[schema]'."
    )
    assert history(instance).events == ()


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_a_schema_of_the_author_fetches_nothing(world: World) -> None:
    class Odd(pydantic.BaseModel):
        model_config = pydantic.ConfigDict(json_schema_extra={"properties": {"a": {"$ref": "http://127.0.0.1:9/a"}}})

    instance = flow_of(world, lambda step: wait(step, schema=Odd).payload).run()
    with pytest.raises(AnswerUnchecked, match=r"its JSON schema cannot be used: .*127\.0\.0\.1:9/a"):
        answer(instance, {"a": 1})


def test_each_of_two_waits_for_the_same_event_gets_its_own_answer(world: World) -> None:
    def body(step: Step) -> list[str | None]:
        futures = [
            step.submit_wait_for_event(name, "approval", ask=f"{name}?", to=name) for name in ("finance", "legal")
        ]
        return [each.by for each in step.gather(*futures)]

    instance = flow_of(world, body).run()
    answer(instance, None, "legal", by="lea")
    world.run_until_idle()
    assert {step.step_key: str(step.status) for step in history(instance).steps} == {
        "finance": "waiting",
        "legal": "completed",
    }
    answer(instance, None, "finance", by="finn")
    world.run_until_idle()
    assert instance.output == ["finn", "lea"]


def test_a_plain_event_ends_the_wait_and_comes_before_an_answer(world: World) -> None:
    instance = ask(world)
    instance.send("approval", YES)
    with pytest.raises(AnswerTooLate, match="has an event 'approval', which came first"):
        answer(instance, NO)
    world.run_until_idle()
    with pytest.raises(AnswerTooLate, match="is completed"):
        answer(instance, NO)
    assert instance.output == [True, None]


def test_a_wait_that_is_late_ended_or_cancelled_takes_no_answer(world: World) -> None:
    late, terminated, cancelled = (
        flow_of(world, lambda step, timeout=timeout: wait(step, timeout=timeout).payload, name=name).run(id=name)
        for name, timeout in (("late", 60), ("terminated", 600), ("cancelled", 600))
    )
    terminated.world.operations.lifecycle.terminate("terminated", "terminated")
    cancelled.world.operations.lifecycle.cancel("cancelled", "cancelled")
    world.advance(61)
    for instance, reason in ((late, "waited until"), (terminated, "is cancelled"), (cancelled, "is being cancelled")):
        with pytest.raises(AnswerTooLate, match=reason):
            answer(instance, YES)
    world.run_until_idle()
    for instance, reason in ((late, "is errored"), (cancelled, "is cancelled")):
        with pytest.raises(AnswerTooLate, match=reason):
            answer(instance, YES)
        assert history(instance).events == ()


def test_a_cleanup_may_ask(world: World) -> None:
    def body(step: Step) -> None:
        try:
            step.wait_for_event("first", "go")
        finally:
            wait(step, "sure")

    instance = flow_of(world, body).run()
    world.operations.lifecycle.cancel("order", instance.id)
    world.run_until_idle()
    answer(instance, YES, "sure")
    world.run_until_idle()
    assert instance.status == "terminated"


def test_a_paused_instance_can_be_answered(world: World) -> None:
    instance = ask(world)
    instance.pause()
    answer(instance, YES)
    world.run_until_idle()
    assert instance.status == "paused"
    instance.resume()
    world.run_until_idle()
    assert instance.output == [True, "ada"]


def test_an_answer_counts_only_for_the_run_that_has_asked(world: World) -> None:
    instance = ask(world)
    answer(instance, YES, run=1)
    world.run_until_idle()
    world.operations.rewind.restart("order", instance.id, from_step="approve")
    world.run_until_idle()
    assert (instance.status, history(instance).events) == ("waiting", ())  # it asks again
    with pytest.raises(AnswerTooLate) as late:
        answer(instance, NO, run=1)
    assert str(late.value) == (
        "Step 'approve' of run 1 of instance 'i-1' of workflow 'order' is of an earlier run: the current one is 2. "
        "This answer was not stored."
    )
    answer(instance, NO, run=2)
    world.run_until_idle()
    assert instance.output == [False, "ada"]


def test_a_retry_keeps_the_answer_of_a_finished_wait(world: World) -> None:
    is_broken = [True]

    def charge() -> str:
        if is_broken:
            raise NonRetryableError("the bank is away")
        return "charged"

    def body(step: Step) -> list[Any]:
        by = wait(step).by
        return [by, step.do("charge", charge)]

    instance = flow_of(world, body).run()
    answer(instance, YES)
    world.run_until_idle()
    is_broken.clear()
    world.operations.rewind.retry("order", instance.id)
    world.run_until_idle()
    assert instance.output == ["ada", "charged"]
    assert [event.by for event in history(instance, run=2).events] == ["ada"]
    with pytest.raises(AnswerTooLate, match="was answered by 'ada'"):
        answer(instance, NO, by="bob")


def test_a_deploy_between_the_check_and_the_lock_has_the_answer_checked_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Strict(Approval):
        limit: int

    instance, transact = ask(world), Store.transact

    def deploy_before(store: Store, work: Any, **options: Any) -> Any:
        monkeypatch.undo()
        flow_of(world, lambda step: wait(step, schema=Strict).payload.limit)
        world.operations.lifecycle.wake("order", instance.id)
        world.run_until_idle()
        return transact(store, work, **options)

    monkeypatch.setattr(Store, "transact", deploy_before)
    with pytest.raises(EventRefused) as refused:
        answer(instance, YES)
    assert refused.value.problems[0][1] == '"limit" is a required property'
    assert history(instance).events == ()


def test_an_answer_that_comes_while_another_one_is_checked_is_named(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance, find = ask(world), run_events.find_oldest_event

    def find_after_bob(*given: Any, **more: Any) -> Any:
        monkeypatch.undo()
        answer(instance, YES, by="bob")
        return find(*given, **more)

    monkeypatch.setattr(run_events, "find_oldest_event", find_after_bob)
    with pytest.raises(AnswerTooLate, match="was answered by 'bob'"):
        answer(instance, NO)


def race(instance: Instance) -> tuple[str, str | None]:
    """Have two people answer at once. Returns the one whose answer was stored, and whose the other was told."""
    start, results = threading.Barrier(2), dict[str, Any]()

    def run(person: str) -> None:
        start.wait()
        try:
            results[person] = answer(instance, YES, by=person)
        except AnswerTooLate as late:
            results[person] = late.by

    threads = [threading.Thread(target=run, args=(person,)) for person in ("ada", "bob")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (winner,) = [person for person, result in results.items() if result is True]
    (loser,) = results.keys() - {winner}
    return winner, results[loser]


MANY = int(os.environ.get("DURABLE_ANSWER_RACES", "1000"))


@pytest.mark.parametrize("races", [10, pytest.param(MANY, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
def test_of_two_answers_at_once_one_counts_and_the_other_is_told_whose(world: World, races: int) -> None:
    question = ask(world).workflow
    for n in range(races):
        instance = FlowControl(world, world.registry.get(question)).create(id=f"race-{n}")
        world.run_until_idle()
        winner, told = race(instance)
        assert told == winner
        world.run_until_idle()
        assert instance.output == [True, winner]
        assert [each.by for each in history(instance).events] == [winner]


@pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)
@pytest.mark.parametrize("is_applied", [True, False])
def test_an_answer_is_stored_whole_or_not_at_all(
    world: World, monkeypatch: pytest.MonkeyPatch, is_applied: bool
) -> None:
    """Its process dies in the transaction, or after the commit and before it wakes the workers."""
    instance, died = ask(world), RuntimeError("killed")

    def die(*_: Any, **__: Any) -> None:
        raise died

    where = (notify, "send_event_received") if is_applied else (run_events, "is_awaited")
    monkeypatch.setattr(*where, die)
    with pytest.raises(RuntimeError, match="killed"):
        answer(instance, YES)
    monkeypatch.undo()
    found = history(instance)
    stored = ["ada"] if is_applied else []
    assert [each.by for each in found.events] == [each.by for each in found.audit] == stored
    assert answer(instance, YES) is not is_applied
    for _ in range(3):  # the message that was not sent is missed
        world.run_after(6)
    assert instance.output == [True, "ada"]


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_an_answer_that_names_nothing_to_answer_is_refused(world: World) -> None:
    def body(step: Step) -> Any:
        step.do("charge", lambda: "charged")
        return wait(step).payload

    instance = flow_of(world, body).run()
    with pytest.raises(StepNotFound, match="Did you mean 'approve'"):
        answer(instance, YES, "approved")
    with pytest.raises(ValueRefused, match="Step 'charge' asks nobody: it is no wait with ask="):
        answer(instance, YES, "charge")
    with pytest.raises(NameInvalid, match="The person who does it '' is not allowed"):
        answer(instance, YES, by="")
    with pytest.raises(NameInvalid, match="'answer:' begins the ids of answers"):
        instance.send("approval", YES, id="answer:approve")
    restricted = world.operations.restrict_to(Scope(id_prefix="other-"))
    with pytest.raises(InstanceNotFound):
        restricted.asks.answer("order", instance.id, "approve", YES, by="ada")
    with pytest.raises(InstanceNotFound):
        restricted.asks.read("order", instance.id, "approve")


def test_an_open_question_is_read_alone(world: World) -> None:
    instance = ask(world)
    found = world.operations.asks.read("order", instance.id, "approve")
    assert (found,) == world.operations.stats.waits(WaitFilter(to="finance")).items
    answer(instance, YES)
    with pytest.raises(AnswerTooLate, match="was answered by 'ada'"):
        world.operations.asks.read("order", instance.id, "approve")


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_a_key_that_is_too_long_for_an_id_can_be_answered(world: World) -> None:
    name = "approve " + "x" * 248
    order = flow_of(world, lambda step: wait(step, name).by)
    instance = order.run()
    answer(instance, YES, name)
    world.run_until_idle()
    assert instance.output == "ada"
