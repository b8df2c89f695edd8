"""Celery tasks as steps: sent with the commit, answered once, tried again when lost; the workflow hibernates."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from celery_durable import Step, WorkflowEvent, values
from celery_durable.all_operations import Operations
from celery_durable.errors import NonRetryableError, StoreUnavailable
from celery_durable.model import AnswerResult, OutboxMessage, TaskReference
from celery_durable.operations.context import OperationContext
from celery_durable.runtime import real_monotonic
from celery_durable.store.engine import Store
from tests.smoke.fault_proxy import FaultProxy, Mode
from tests.store.world import has_lock_wait
from tests.support.answers import answer, resize
from tests.support.databases import on_databases
from tests.support.flows import flow_of
from tests.support.world import World, on_one_database

database = on_databases("sqlite", "postgresql", "mariadb")


def test_a_task_does_a_step(world: World, media) -> None:
    instance = media.run(300)
    (message,) = world.sent
    assert (message.name, message.content["args"], message.content["kwargs"]) == ("media.resize", [300], {"crop": True})
    step = instance.step("thumb")
    assert (instance.status, step.type, step.status, step.task, step.task_id, step.attempts, step.max_attempts) == (
        "waiting", "task", "waiting", "media.resize", message.id, 1, 2,
    )  # fmt: skip
    assert (step.wait_event_type, step.wake_at, step.timeout) == (
        None, world.now + timedelta(hours=1), timedelta(hours=1),
    )  # fmt: skip
    world.advance(60)
    assert answer(world, message, {"width": 300})
    world.run_until_idle()
    assert instance.output == {"width": 300}
    step = instance.step("thumb")
    assert (step.status, step.result, step.task_id) == ("completed", {"width": 300}, message.id)
    assert len(world.sent) == 1


def test_an_answer_counts_once(world: World, media) -> None:
    instance = media.run(300)
    (message,) = world.sent
    assert answer(world, message, 1)
    assert not answer(world, message, 2)
    world.run_until_idle()
    assert not answer(world, message, error=KeyError("late"))
    assert instance.output == 1


def test_what_failed_is_sent_again_under_a_new_id(world: World, media) -> None:
    instance = media.run(300)
    answer(world, world.sent[0], error=OSError("disk full"))
    world.run_until_idle()
    step = instance.step("thumb")
    assert (step.status, step.attempts, step.next_retry_at) == ("waiting", 1, world.now + timedelta(seconds=30))
    assert (step.error.name, step.error.message, step.task_id) == ("OSError", "disk full", None)
    assert len(world.sent) == 1
    world.run_after(30)
    first, second = world.sent
    assert (first.id != second.id, instance.step("thumb").task_id) == (True, second.id)
    assert not answer(world, first, "of the first attempt, which has failed")
    answer(world, second, "done")
    world.run_until_idle()
    assert (instance.output, instance.step("thumb").attempts) == ("done", 2)


def test_what_fails_for_good_is_told_by_its_own_name(world: World, media) -> None:
    instance = media.run(300)
    for nth in range(2):
        answer(world, world.sent[nth], error=OSError(f"disk {nth} full"))
        world.run_until_idle()
        world.run_after(30)
    assert instance.output == ["StepFailed", "OSError", "disk 1 full", 2]
    assert instance.step("thumb").status == "errored"


def test_what_need_not_be_tried_again_is_not(world: World, media) -> None:
    instance = media.run(300)
    answer(world, world.sent[0], error=NonRetryableError("no such picture"))
    world.run_until_idle()
    assert instance.output == ["StepFailed", "NonRetryableError", "no such picture", 1]


def test_a_task_that_got_lost_is_sent_again_when_its_time_is_over(world: World, media) -> None:
    instance = media.run(300)
    world.run_after(3600)
    assert instance.step("thumb").error.name == "StepTimeout"
    world.run_after(30)
    assert len(world.sent) == 2
    world.run_after(3600)
    assert instance.output == [
        "StepTimeout", "StepTimeout", "Celery task 'media.resize' did not answer within 1 h", 2,
    ]  # fmt: skip
    assert not answer(world, world.sent[1], "too late")


def test_tasks_side_by_side(world: World) -> None:
    @world.workflow
    def album(event: WorkflowEvent, step: Step) -> Any:
        futures = [step.submit_task(f"page {n}", resize.s(n)) for n in range(4)]
        got = step.gather(*futures, step.submit("note", lambda: "noted"), return_exceptions=True)
        return [str(each) if isinstance(each, Exception) else each for each in got]

    instance = album.run()
    assert [message.content["args"] for message in world.sent] == [[0], [1], [2], [3]]
    for nth in (2, 0):
        answer(world, world.sent[nth], nth * 10)
        world.run_until_idle()
    assert instance.statuses() == {
        "page 0": "completed", "page 1": "waiting", "page 2": "completed", "page 3": "waiting", "note": "completed",
    }  # fmt: skip
    answer(world, world.sent[1], error=KeyError("no page"))
    answer(world, world.sent[3], 30)
    world.run_until_idle()
    first, failed, *rest = instance.output
    assert (first, rest, len(world.sent)) == (0, [20, 30, "noted"], 4)
    assert "KeyError" in failed


def test_a_task_that_loses_a_race_is_not_waited_for(world: World) -> None:
    media = flow_of(
        world,
        lambda step: step.first("sooner", step.submit_task("thumb", resize.s(1)), step.submit_sleep("nap", 60)),
        name="media",
    )
    instance = media.run()
    world.run_after(60)
    assert (instance.output, instance.statuses()) == (
        None,
        {"thumb": "cancelled", "nap": "completed", "sooner": "completed"},
    )
    assert not answer(world, world.sent[0], 1)


@on_one_database
def test_a_restart_sends_it_anew_and_takes_no_answer_to_the_old(world: World, media) -> None:
    instance = media.run(300)
    world.restart(instance)
    world.run_until_idle()
    old, new = world.sent
    assert (old.id != new.id, answer(world, old, "old")) == (True, False)
    answer(world, new, "new")
    world.run_until_idle()
    assert instance.output == "new"


def test_a_rewind_keeps_what_has_answered_and_asks_anew_for_the_rest(world: World) -> None:
    media = flow_of(world, lambda step: [step.task("a", resize.s(1)), step.task("b", resize.s(2))], name="media")
    instance = media.run()
    answer(world, world.sent[0], "first")
    world.run_until_idle()
    answer(world, world.sent[1], "of the run before")  # there, but not yet taken when the run is replaced
    world.messages.clear()
    world.operations.rewind.restart(instance.workflow, instance.id, from_step="b")
    world.run_until_idle()
    assert instance.status == "waiting"
    assert [message.content["args"] for message in world.sent] == [[1], [2], [2]]
    answer(world, world.sent[2], "second")
    world.run_until_idle()
    assert instance.output == ["first", "second"]


@on_one_database
def test_people_may_settle_a_task_step(world: World, media) -> None:
    instance = media.run(300)
    world.exempt["I5h"] = "a step that was settled by hand had no answer"
    world.operations.interventions.set_result("media", instance.id, "thumb", {"width": 1}, by="ops")
    world.run_until_idle()
    assert instance.output == {"width": 1}
    assert not answer(world, world.sent[0], {"width": 300})


# --- who may answer -----------------------------------------------------------------------------


def test_a_reference_from_a_later_version_is_read(world: World, media) -> None:
    """Later versions append to the list that travels, so an older worker still finds what it knows."""
    media.run(300)
    travelled = world.sent[0].content["reference"]
    known = TaskReference.read(travelled)
    assert known is not None
    assert TaskReference.read([*travelled, "of tomorrow"]) == known
    assert TaskReference.read(travelled[:-1]) is None


def referred(message: OutboxMessage) -> TaskReference:
    reference = TaskReference.read(message.content["reference"])
    assert reference is not None
    return reference


def test_an_answer_that_does_not_name_the_token_is_refused(world: World, media) -> None:
    instance = media.run(300)
    reference = referred(world.sent[0])
    assert len(reference.token) == 32
    for token in ("", "0" * 32, reference.token[:-1], reference.token.upper() + "x", "\N{SNOWMAN}", "a" * 10_000):
        forged = dataclasses.replace(reference, token=token)
        for payload in (values.encode_answer('"forged"'), values.encode_error_answer("Forged", "no")):
            assert world.operations.answers.accept(forged, payload) is AnswerResult.FORGED
    world.run_until_idle()
    assert (instance.status, instance.step("thumb").status) == ("waiting", "waiting")
    assert answer(world, world.sent[0], "true")
    world.run_until_idle()
    assert instance.output == "true"


def test_each_attempt_has_a_token_of_its_own(world: World, media) -> None:
    media.run(300)
    answer(world, world.sent[0], error=OSError("disk full"))
    world.run_until_idle()
    world.run_after(30)
    old, new = map(referred, world.sent)
    assert old.token != new.token
    guessed = dataclasses.replace(new, token=old.token)
    assert world.operations.answers.accept(guessed, values.encode_answer("1")) is AnswerResult.FORGED


def test_a_failure_counts_from_the_newest_delivery_alone_and_a_success_from_any(world: World, media) -> None:
    instance = media.run(300)
    item, reference = world.store.tables.item, referred(world.sent[0])
    world.store.transact(lambda tx: tx.execute(sa.update(item).values(loss_count=2)))
    failed, newest = (
        values.encode_error_answer("OSError", "its place is taken"),
        dataclasses.replace(reference, delivery=2),
    )
    for delivery in (0, 1, 3):
        old = dataclasses.replace(reference, delivery=delivery)
        assert world.operations.answers.accept(old, failed) is AnswerResult.NOT_AWAITED
    assert world.operations.answers.accept(reference, values.encode_answer('"of the first"')) is AnswerResult.TAKEN
    assert world.operations.answers.accept(newest, failed) is AnswerResult.NOT_AWAITED
    world.run_until_idle()
    assert instance.output == "of the first"


def test_the_newest_delivery_may_fail(world: World, media) -> None:
    instance = media.run(300)
    item, reference = world.store.tables.item, referred(world.sent[0])
    world.store.transact(lambda tx: tx.execute(sa.update(item).values(loss_count=2)))
    newest = dataclasses.replace(reference, delivery=2)
    assert (
        world.operations.answers.accept(newest, values.encode_error_answer("OSError", "disk full"))
        is AnswerResult.TAKEN
    )
    world.run_until_idle()
    assert instance.step("thumb").error.message == "disk full"


@pytest.mark.parametrize("database", ["postgresql", pytest.param("mariadb", marks=pytest.mark.slow)], indirect=True)
def test_where_a_task_ends_nobody_waits_for_a_silent_database(world: World, media: Any) -> None:
    """For 2 s: then the answer goes as a message."""
    media.run(128)
    reference = TaskReference.read(world.sent[0].content["reference"])
    assert reference is not None
    url = sa.make_url(world.url)
    proxy = FaultProxy((url.host or "127.0.0.1", url.port or {"postgresql": 5432}.get(url.get_backend_name(), 3306)))
    store = Store(url.set(host="127.0.0.1", port=proxy.port), runtime=world.worker.runtime)
    operations = Operations(
        OperationContext(store, world.settings, world.registry, world.worker.runtime, lambda due_runs: None)
    )
    try:
        for ask in (
            operations.answers.find_database_id,
            lambda: operations.answers.accept(reference, values.encode_answer("1"), is_direct=True),
        ):
            store.read(lambda tx: tx.conn.exec_driver_sql("SELECT 1").scalar_one())
            proxy.set(Mode.MUTE)
            began = real_monotonic()
            with pytest.raises(StoreUnavailable):
                ask()
            assert real_monotonic() - began < 2 + 3  # the bound of loops is 6 s
            proxy.set(Mode.PASS)
    finally:
        proxy.close()
        store.close()


@pytest.mark.parametrize("database", ["mariadb"], indirect=True)
def test_where_a_task_ends_a_deadlock_is_repeated(world: World, media: Any) -> None:
    """As in any other transaction; the answer does not go as a message."""
    media.run(128)
    accept, reference, answer_ = world.operations.answers.accept, referred(world.sent[0]), values.encode_answer("1")
    tables = world.store.tables
    with ThreadPoolExecutor(1) as threads, world.store.engine.begin() as connection:
        for number in range(20):
            connection.execute(sa.update(tables.step).values(name=f"held {number}"))
        answering = threads.submit(accept, reference, answer_, is_direct=True)
        with world.store.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as watching:
            while not has_lock_wait(watching):
                assert not answering.done(), answering.result()
        # The answer has locked this row. InnoDB rolls it back, since it has written less.
        connection.execute(sa.update(tables.instance).values(priority=1))
    assert answering.result() is AnswerResult.TAKEN
