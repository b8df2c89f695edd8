"""Maps: many Celery tasks do one step, one for each item; the workflow hibernates until all have answered."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from celery_durable import NonRetryableError, Retries, Step, StepTimeout, WorkflowEvent
from celery_durable.errors import ValueRefused
from celery_durable.model import AnswerResult
from tests.support.answers import answer, answered
from tests.support.databases import on_databases
from tests.support.flows import flow_of
from tests.support.lost_connections import cut_commit
from tests.support.mapping import convert, mapping, pages
from tests.support.world import World, on_one_database

database = on_databases("sqlite", "postgresql", "mariadb")


def test_each_item_is_done_by_a_task_of_its_own(world: World) -> None:
    instance = mapping(world).run()
    assert [(message.name, message.content["args"]) for message in world.sent] == [
        ("press.convert", [page, "png"]) for page in range(4)
    ]
    assert len({message.id for message in world.sent}) == 4
    for message in (world.sent[2], world.sent[0], world.sent[3]):
        assert answer(world, message, f"page {message.content['args'][0]}")
        assert (world.messages, instance.status) == ([], "waiting")  # it sleeps until all have answered
    step = instance.step("convert")
    assert (step.type, step.status, step.task, step.task_id, step.items.total, step.items.done) == (
        "map", "waiting", "press.convert", None, 4, 3,
    )  # fmt: skip
    answer(world, world.sent[1], "page 1")
    world.run_until_idle()
    assert instance.output == ["page 0", "page 1", "page 2", "page 3"]
    assert instance.step("convert").result == [{"output": f"page {page}"} for page in range(4)]
    assert (len(world.sent), instance.events()) == (4, [])


def test_so_many_are_out_at_a_time(world: World) -> None:
    instance = mapping(world, 5, max_concurrency=2).run()
    assert pages(world.sent) == [0, 1]
    version = instance.row.version
    answer(world, world.sent[1], "b")
    world.sweeper.sweep()
    assert pages(world.sent) == [0, 1]  # it has left the transaction, and leaves the outbox when its grace is over
    world.advance(3)
    world.sweeper.sweep()
    assert pages(world.sent) == [0, 1, 2]
    assert instance.row.version == version  # nobody woke the workflow for it
    for nth, message in enumerate(world.sent):  # more come meanwhile
        if nth != 1:
            answer(world, message, pages([message])[0])
        world.advance(3)
        world.run_until_idle()
    assert instance.output == [0, "b", 2, 3, 4]


def test_an_item_is_answered_once(world: World) -> None:
    instance = mapping(world, 2).run()
    assert answer(world, world.sent[0], "first")
    assert not answer(world, world.sent[0], "again")
    assert not answer(world, world.sent[0], error=KeyError("late"))
    answer(world, world.sent[1], "second")
    world.run_until_idle()
    assert not answer(world, world.sent[1], "after all")
    assert instance.output == ["first", "second"]


def test_an_item_that_failed_is_tried_again_later_under_a_new_id(world: World) -> None:
    instance = mapping(world, 3, retries=Retries(limit=1, delay=30)).run()
    answer(world, world.sent[1], error=OSError("disk full"))
    world.run_until_idle()
    assert (len(world.sent), instance.row.run_at) == (3, world.now_us + 30_000_000)
    answer(world, world.sent[0], "a")
    answer(world, world.sent[2], "c")
    world.run_until_idle()
    assert instance.status == "waiting"
    world.run_after(30)
    assert (pages(world.sent), world.sent[3].id != world.sent[1].id) == ([0, 1, 2, 1], True)
    assert not answer(world, world.sent[1], "of the first attempt")
    answer(world, world.sent[3], "b")
    world.run_until_idle()
    assert instance.output == ["a", "b", "c"]


def test_the_first_failure_is_raised_when_all_have_ended(world: World) -> None:
    instance = mapping(world, 3, retries=1).run()
    answer(world, world.sent[0], "a")
    answer(world, world.sent[2], error=NonRetryableError("no such page"))
    answer(world, world.sent[1], error=OSError("disk full"))
    world.run_until_idle()
    world.run_after(10)
    assert instance.status == "waiting"
    answer(world, world.sent[3], error=OSError("disk still full"))
    world.run_until_idle()
    assert instance.output == ["StepFailed", "OSError", "item 1: disk still full", 2]
    assert instance.step("convert").items.failed == 2


def test_failures_may_be_wanted(world: World) -> None:
    instance = mapping(world, 2, return_exceptions=True).run()
    answer(world, world.sent[0], None)
    answer(world, world.sent[1], error=KeyError("no page"))
    world.run_until_idle()
    assert instance.output == [None, "Step 'convert[1]' failed after 1 attempt: KeyError: 'no page'"]


def test_an_item_that_fails_while_another_is_decided_on_is_decided_on_by_the_next_pass(world: World) -> None:
    def delay(_: int, error: BaseException) -> int:
        if last:
            answer(world, last.pop(), error=OSError("disk full"))
        raise ValueError(error)

    instance = mapping(world, 2, retries=Retries(limit=1, delay=delay)).run()
    last = [world.sent[1]]
    answer(world, world.sent[0], error=OSError("disk full"))
    world.run_until_idle()
    assert (last, instance.output[:2]) == ([], ["StepFailed", "RetryDelayInvalid"])


def test_what_gets_lost_is_sent_again_when_its_time_is_over(world: World) -> None:
    instance = mapping(world, 2, timeout="1 hour", retries=Retries(limit=1, delay=0)).run()
    world.advance(600)
    answer(world, world.sent[0], "a")
    world.run_after(3000)
    world.run_until_idle()
    assert pages(world.sent) == [0, 1, 1]
    world.run_after(3600)
    assert instance.output == [StepTimeout.__name__, "StepTimeout", "item 1: no answer within 1 h", 2]


def test_nothing_to_do_is_done_at_once(world: World) -> None:
    assert mapping(world, 0).run().output == []


def test_a_retry_does_again_only_what_failed(world: World) -> None:
    instance = flow_of(world, lambda step: step.map("convert", convert.s("png"), range(3)), name="press").run()
    answer(world, world.sent[0], "a")
    answer(world, world.sent[1], error=KeyError("no page"))
    answer(world, world.sent[2], "c")
    world.run_until_idle()
    assert instance.error == "KeyError: item 1: 'no page'"
    world.operations.rewind.retry("press", instance.id)
    world.run_until_idle()
    assert pages(world.sent) == [0, 1, 2, 1]
    assert instance.step("convert").items.done == 2
    answer(world, world.sent[3], "b")
    world.run_until_idle()
    assert instance.output == ["a", "b", "c"]


@on_one_database
def test_a_retry_with_code_that_leaves_out_what_failed_has_nothing_left_to_do(world: World) -> None:
    def press(count: int) -> Any:
        @world.workflow(name="press")
        def press(event: WorkflowEvent, step: Step) -> Any:
            return step.map("convert", convert.s("png"), range(count))

        return press

    instance = press(3).run()
    for nth, message in enumerate(world.sent):
        answer(world, message, nth, error=KeyError("no page") if nth == 2 else None)
    world.run_until_idle()
    press(2)
    world.operations.rewind.retry("press", instance.id)
    world.run_until_idle()
    assert (instance.output, len(world.sent)) == ([0, 1], 3)


def test_a_rewind_beyond_a_map_keeps_its_results(world: World) -> None:
    @world.workflow
    def press(event: WorkflowEvent, step: Step) -> Any:
        got = step.map("convert", convert.s("png"), range(2))
        return [*got, step.wait_for_event("ok", "ok").payload]

    instance = press.run()
    for message in world.sent:
        answer(world, message, f"page {pages([message])[0]}")
    world.run_until_idle()
    fork = world.operations.rewind.fork("press", instance.id, "ok", id="i-2")
    world.operations.rewind.restart("press", instance.id, from_step="ok")
    world.run_until_idle()
    for id_ in (instance.id, fork):
        other = world.instance("press", id_)
        other.send("ok", id_)
        world.run_until_idle()
        assert other.output == ["page 0", "page 1", id_]
    assert len(world.sent) == 2


@on_one_database
def test_people_may_settle_a_map(world: World) -> None:
    instance = mapping(world, 2).run()
    with pytest.raises(ValueRefused, match="its result must be a list"):
        world.operations.interventions.set_result("press", instance.id, "convert", "all", by="ops")
    world.operations.interventions.set_result("press", instance.id, "convert", ["x", "y"], by="ops")
    world.run_until_idle()
    assert instance.output == ["x", "y"]


@pytest.mark.parametrize("when", range(7))
def test_every_item_is_done_once_wherever_a_runner_dies(world: World, when: int) -> None:
    instance = mapping(world, 3, max_concurrency=2).create()
    world.worker.runtime.crash_at = when
    world.tick()
    world.run_after(60)
    while unanswered := [message for message in world.sent if answer(world, message, pages([message])[0])]:
        del unanswered
        world.messages.clear()
        world.worker.runtime.crash_at = when
        world.run_after(60)
    world.run_after(120)
    assert instance.output == [0, 1, 2]
    assert len({message.id for message in world.sent}) == 3


@on_one_database
def test_people_may_settle_a_map_that_has_failed(world: World) -> None:
    instance = flow_of(world, lambda step: step.map("convert", convert.s("png"), range(2)), name="press").run()
    answer(world, world.sent[0], "a")
    answer(world, world.sent[1], error=KeyError("no page"))
    world.run_until_idle()
    world.operations.interventions.set_result("press", instance.id, "convert", ["a", "by hand"], by="ops")
    world.run_until_idle()
    assert instance.output == ["a", "by hand"]


def test_what_is_answered_to_a_map_that_was_deleted_is_for_nobody(world: World) -> None:
    press = mapping(world, 1)
    instance = press.run()
    instance.terminate()
    world.advance(60)
    world.operations.retention.prune(older_than=timedelta(0), workflow="press")
    world.accepted.pop(0)
    again = press.run(id=instance.id)
    # Not forged either, of which operators are warned.
    assert answered(world, world.sent[0], "of the one before") is AnswerResult.NOT_AWAITED
    answer(world, world.sent[1], "its own")
    world.run_until_idle()
    assert again.output == ["its own"]


def test_a_pause_sends_no_more_items(world: World) -> None:
    instance = mapping(world, 3, max_concurrency=1).run()
    instance.pause()
    answer(world, world.sent[0], 0)
    world.run_after(60)
    assert pages(world.sent) == [0]
    instance.resume()
    world.run_until_idle()
    assert pages(world.sent) == [0, 1]
    for nth in (1, 2):
        answer(world, world.sent[nth], nth)
        world.run_after(60)
    assert instance.output == [0, 1, 2]


def test_a_map_that_has_all_answers_does_not_overstay(world: World) -> None:
    press = flow_of(
        world, lambda step: step.map("convert", convert.s("png"), range(1)), name="press", max_suspend_duration="1 hour"
    )
    instance = press.run()
    world.advance(3599)
    answer(world, world.sent[0], "done")
    world.run_after(10)
    assert instance.output == ["done"]


@pytest.mark.parametrize("database", ["postgresql", pytest.param("mariadb", marks=pytest.mark.slow)], indirect=True)
@pytest.mark.parametrize("when", ["before", "after"])
def test_an_answer_whose_commit_is_in_doubt_counts_once(world: World, when: str) -> None:
    instance = mapping(world, 3, max_concurrency=1).run()
    for nth in range(3):
        with cut_commit(world.store, when=when) as cut:
            answer(world, world.sent[nth], nth)
        assert cut == [when]
        world.run_after(60)
    assert instance.output == [0, 1, 2]
    assert pages(world.sent) == [0, 1, 2]


def test_a_pause_that_is_requested_of_a_running_instance_sends_no_more_items(world: World) -> None:
    @world.workflow
    def press(event: WorkflowEvent, step: Step) -> Any:
        def read() -> None:  # while it runs, the pause is asked for and an answer comes
            world.operations.lifecycle.pause("press", "i-1")
            assert answer(world, world.sent[0], 0)

        many = step.submit_map("convert", convert.s("png"), range(3), max_concurrency=1)
        return step.gather(many, step.submit("read", read))[0]

    instance = press.run()
    world.run_after(60)
    assert (instance.status, pages(world.sent)) == ("paused", [0])
    instance.resume()
    for nth in (1, 2):
        world.run_until_idle()
        answer(world, world.sent[nth], nth)
        world.run_after(60)
    assert instance.output == [0, 1, 2]
