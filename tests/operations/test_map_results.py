"""Results of map items are recorded without the instance's lock: the last one wakes it, and none comes too late."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from celery_durable import Retries, Step, WorkflowEvent
from celery_durable.model import OutboxMessage, TaskReference
from celery_durable.store.engine import Tx
from celery_durable.store.events import answers
from celery_durable.store.instances import instances
from celery_durable.tasks.publishing import PublishReport
from celery_durable.testing.cooperative import CooperativeThread
from celery_durable.testing.runtime import Crash
from celery_durable.values import encode_answer
from tests.store.world import has_lock_wait
from tests.support.answers import answer
from tests.support.mapping import convert, mapping, pages
from tests.support.world import World

everywhere = pytest.mark.parametrize("database", ["sqlite", "postgresql", "mariadb"], indirect=True)
on_servers = pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)


def item_statuses(world: World, run: int = 1) -> list[str]:
    item = world.store.tables.item.c
    query = sa.select(item.status).where(item.run_number == run).order_by(item.step_key, item.position)
    return [row.status for row in world.rows(query)]


def accept_under_the_lock(tx: Tx, message: OutboxMessage) -> answers.AnswerOutcome:
    """Answer as if an item was ready to be sent: under the lock of the instance."""
    reference = TaskReference.read(message.content["reference"])
    assert reference is not None
    row = instances.lock(tx, reference.ref.workflow, reference.ref.instance_id)
    options: Any = {"event_id": "e", "grace": timedelta(seconds=2)}
    return answers.accept_answer(tx, row, reference, payload=encode_answer('"b"'), **options)


def answer_and_die(world: World, message: OutboxMessage, output: str) -> None:
    """Answer in a process that dies when it has recorded the result, before it wakes the instance."""
    process = world.new_producer()
    process.runtime.crash_at = "after-commit"
    with pytest.raises(Crash):
        answer(process, message, output)  # type: ignore[arg-type]


def reopen(world: World) -> None:
    """Take the instance and its items back to where all items are out."""
    t = world.store.tables
    with world.store.engine.begin() as connection:
        at = world.now_us + 3_600_000_000
        connection.execute(sa.update(t.item).values(status="sent", answer=None, due_at=at))
        connection.execute(sa.update(t.instance).values(status="waiting", run_at=at, next_check_at=at, sent_at=None))


@everywhere
@pytest.mark.parametrize("rounds", [50, pytest.param(1000, marks=pytest.mark.slow)])
def test_the_two_last_answers_at_once_wake_the_instance(world: World, rounds: int) -> None:
    instance = mapping(world, 2).run()
    start = threading.Barrier(2)

    def answer_at_once(message: OutboxMessage) -> bool:
        start.wait()
        return answer(world, message)

    with ThreadPoolExecutor(2) as threads:
        for _ in range(rounds):
            reopen(world)
            world.messages.clear()
            assert list(threads.map(answer_at_once, world.sent[:2])) == [True, True]
            assert (instance.row.status, len(world.messages)) == ("active", 1)
    world.run_until_idle()
    assert instance.status == "complete"


@on_servers
def test_a_result_beside_an_answer_that_is_not_committed_wakes_the_instance(world: World) -> None:
    """The answer came when another item was ready to be sent, so it decides under the lock. It sees no result."""
    instance = mapping(world, 2).run()
    with ThreadPoolExecutor(1) as threads, world.store.engine.begin() as connection:
        outcome = accept_under_the_lock(Tx(connection, world.store), world.sent[1])
        assert (outcome.result.is_taken, outcome.due_runs) == (True, ())
        result = threads.submit(answer, world, world.sent[0])
        with world.store.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as watching:
            while not has_lock_wait(watching):
                assert not result.done(), "it does not wait for the answer"
    world.run_until_idle()
    assert instance.status == "complete"


@on_servers
def test_a_result_does_not_wait_for_the_lock_of_the_instance(world: World) -> None:
    instance = mapping(world, 3).run()
    with world.store.engine.begin() as connection, ThreadPoolExecutor(1) as threads:
        instances.lock(Tx(connection, world.store), instance.workflow, instance.id)
        assert threads.submit(answer, world, world.sent[1], "b").result(10)
    assert item_statuses(world) == ["sent", "done", "sent"]


@everywhere
def test_a_process_that_dies_after_it_recorded_the_last_result_delays_the_instance_by_a_minute(world: World) -> None:
    instance = mapping(world, 2).run()
    answer(world, world.sent[0], "a")
    answer_and_die(world, world.sent[1], "b")
    assert (item_statuses(world), instance.status, world.messages) == (["done", "done"], "waiting", [])
    world.run_after(59)
    assert instance.status == "waiting"
    world.run_after(1)
    assert instance.output == ["a", "b"]


@everywhere
def test_a_copy_of_the_last_answer_wakes_the_instance_for_a_process_that_died(world: World) -> None:
    instance = mapping(world, 1).run()
    answer_and_die(world, world.sent[0], "a")
    assert not answer(world, world.sent[0], "again")
    world.run_until_idle()
    assert instance.output == ["a"]


@everywhere
def test_a_map_is_checked_less_and_less_often(world: World) -> None:
    instance = mapping(world, 2, timeout="2 days").run()
    checks = []
    while world.now_us < instance.row.created_at + 86_400_000_000:
        checks.append((instance.row.run_at - world.now_us) // 60_000_000)
        world.run_after(timedelta(minutes=checks[-1]))
    assert checks == [1, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]
    for message in world.sent:
        answer(world, message, "late")
    world.run_until_idle()
    assert instance.output == ["late", "late"]


@everywhere
def test_an_item_that_may_be_sent_again_leaves_with_the_next_result(world: World) -> None:
    instance = mapping(world, 3, retries=Retries(limit=1, delay=30)).run()
    answer(world, world.sent[0], error=OSError("disk full"))
    world.run_until_idle()
    world.advance(30)  # no pass has looked at it yet
    answer(world, world.sent[1], "b")
    assert item_statuses(world) == ["sent", "done", "sent"]
    world.run_after(3)
    assert pages(world.sent) == [0, 1, 2, 0]
    for message in world.sent[2:]:
        answer(world, message, pages([message])[0])
    world.run_until_idle()
    assert instance.output == [0, "b", 2]


@everywhere
def test_a_restart_cancels_the_items_of_the_prior_run(world: World) -> None:
    instance = mapping(world, 3).run()
    answer(world, world.sent[0], "a")
    world.restart(instance)
    assert item_statuses(world) == ["done", "cancelled", "cancelled"]
    assert not answer(world, world.sent[1], "of run 1")
    world.run_until_idle()
    for message in world.sent[3:]:
        answer(world, message, "of run 2")
    world.run_until_idle()
    assert (instance.output, item_statuses(world)) == (["of run 2"] * 3, ["done", "cancelled", "cancelled"])


@everywhere
@pytest.mark.parametrize("ending", ["lost race", "new code", "terminate", "set_result"])
def test_the_end_of_a_step_or_a_run_cancels_the_open_items(world: World, ending: str) -> None:
    @world.workflow
    def race(event: WorkflowEvent, step: Step) -> Any:
        step.first("sooner", step.submit_map("convert", convert.s("png"), range(2)), step.submit_sleep("nap", 60))
        step.sleep("long", "1 day")

    instance = (race if ending == "lost race" else mapping(world, 2)).run()
    match ending:
        case "new code":
            world.workflow(name="press")(lambda event, step: "done")
        case "terminate":
            instance.terminate()
        case "set_result":
            world.operations.interventions.set_result("press", instance.id, "convert", ["x", "y"], by="ops")
    world.run_after(60)
    item = world.store.tables.item.c
    assert [tuple(row) for row in world.rows(sa.select(item.status, item.due_at))] == [("cancelled", None)] * 2
    before = instance.row
    assert not answer(world, world.sent[0], "too late")
    assert (instance.row, world.messages) == (before, [])


@on_servers
def test_an_end_waits_for_a_result_that_is_being_recorded_and_keeps_it(world: World) -> None:
    instance = mapping(world, 2).run()
    item = world.store.tables.item
    done = {"status": "done", "answer": encode_answer("1"), "due_at": None}
    with ThreadPoolExecutor(1) as threads, world.store.engine.begin() as connection:
        connection.execute(sa.update(item).where(item.c.position == 0).values(done))
        ending = threads.submit(instance.terminate)
        with world.store.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as watching:
            while not has_lock_wait(watching):
                assert not ending.done()
    assert (instance.status, item_statuses(world)) == ("terminated", ["done", "cancelled"])


@everywhere
def test_the_start_of_a_map_takes_few_statements_however_many_items_it_has(world: World) -> None:
    statements: list[str] = []
    sa.event.listen(world.worker.store.engine, "before_cursor_execute", lambda *args: statements.append(args[2]))
    instance = mapping(world, 2500, max_concurrency=2000).create()
    world.worker.advance(instance.ref)
    inserts = [text.split()[2].rpartition(".")[2] for text in statements if text.startswith("INSERT INTO")]
    assert (inserts.count("workflow_item"), inserts.count("workflow_outbox")) == (3, 2)
    assert item_statuses(world) == ["sent"] * 2000 + ["pending"] * 500
    assert len({message.id for message in world.sent}) == len(world.sent) == 2000
    assert pages(world.sent) == list(range(2000))


@everywhere
def test_what_a_sender_that_died_has_not_sent_leaves_within_five_seconds(world: World) -> None:
    instance = mapping(world, 10_000).create()
    world.is_broker_away = True
    world.worker.advance(instance.ref)
    world.is_broker_away = False
    world.advance(5)
    world.sweeper.sweep()
    assert sorted(pages(world.sent)) == list(range(10_000))


@everywhere
def test_a_sender_that_is_late_leaves_the_rest_to_the_sweep(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    instance = mapping(world, 2000).create()
    beat, take = world.new_beat(), world.take

    def take_slowly(messages: Sequence[OutboxMessage]) -> PublishReport:
        world.clock.advance(timedelta(seconds=1))
        beat.sweeper.sweep()
        return take(messages)

    monkeypatch.setattr(world, "take", take_slowly)  # what workers send from now on
    world.worker.advance(instance.ref)
    assert sorted(pages(world.sent)) == list(range(2000))


def test_a_sender_that_is_late_sends_nothing_that_a_sweep_is_about_to_send(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance = mapping(world, 2000).create()
    beat, take = world.new_beat(), world.take
    sweep = CooperativeThread(lambda: str(beat.sweeper.sweep()), name="beat", takes_turns=True)
    outbox = world.store.tables.outbox
    taken = sa.select(sa.func.count()).select_from(outbox).where(outbox.c.attempts > 0)

    def take_slowly(messages: Sequence[OutboxMessage]) -> PublishReport:
        world.clock.advance(timedelta(seconds=1))
        while is_late() and not (world.rows(taken)[0][0] or sweep.is_over):
            sweep.go()
        return take(messages)

    def is_late() -> bool:
        return len(world.sent) >= 400

    monkeypatch.setattr(world, "take", take_slowly)
    world.worker.advance(instance.ref)
    assert world.rows(taken)[0][0] > 0  # by the sweep, which has not sent them yet
    while not sweep.is_over:
        sweep.go()
    beat.sweeper.sweep()
    assert sorted(pages(world.sent)) == list(range(2000))


@everywhere
def test_the_results_of_a_map_are_bounded_in_all(make_world: Callable[..., World]) -> None:
    world = make_world(max_map_result_bytes=60)
    instance = mapping(world, 3).run()
    for message in world.sent:
        answer(world, message, "ä" * 6)  # 25 bytes each, with the envelope
    world.run_until_idle()
    assert instance.output == [
        "StepFailed",
        "PayloadTooLarge",
        "The list of results of map 'convert' has 75 bytes as JSON; at most 60 are allowed. Keep large data elsewhere "
        "and store a reference, or raise durable_max_map_result_bytes.",
        1,
    ]
