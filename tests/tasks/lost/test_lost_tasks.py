"""Tasks that are lost: sent again under the same id, fenced by their delivery, given up after the last loss."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from celery_durable import Retries, Step, StepFailed, WorkflowEvent, signals, values
from celery_durable.errors import ConfigInvalid, ValueRefused
from celery_durable.model import OutboxMessage
from celery_durable.store import lost_tasks
from celery_durable.store.instances import instances
from tests.signals.conftest import hearing
from tests.support.answers import answer
from tests.support.flows import flow_of
from tests.support.meetings import SECONDS
from tests.support.world import Producer, World
from tests.tasks.lost.peers import grind, out, reference

everywhere = pytest.mark.parametrize("database", ["sqlite", "postgresql", "mariadb"], indirect=True)
KINDS = pytest.mark.parametrize("kind", ["task", "map"])


def flow(world: World, kind: str, id: str = "i-1", **options: Any) -> Any:
    """A workflow with a task step, or with a map of one item."""

    @world.workflow(name=kind)
    def mill(event: WorkflowEvent, step: Step) -> Any:
        try:
            if kind == "task":
                return step.task("grind", grind.s(0), timeout="1 hour", **options)
            return step.map("grind", grind.s(), range(1), timeout="1 hour", **options)
        except StepFailed as exc:
            return [exc.error_name, exc.error_message, exc.attempts]

    return mill.run(id=id)


def lose(world: World, message: OutboxMessage, sent_by: datetime | None = None) -> int:
    """Report this delivery as lost; what is sent again leaves."""
    found = world.operations.answers.report_lost([(reference(message), sent_by)], why="its worker died")
    world.run_after(3)
    return found


def report(process: Producer, message: OutboxMessage) -> int:
    """Report a task as lost, from a process with connections of its own."""
    return process.operations.answers.report_lost([(reference(message), None)], why="its worker died")


def accept(process: Producer, message: OutboxMessage) -> str:
    """Take the task's answer, in a process with connections of its own."""
    return process.operations.answers.accept(reference(message), values.encode_answer('"ground"')).value


def expected(kind: str) -> Any:
    return "ground" if kind == "task" else ["ground"]


def text(kind: str, message: str) -> str:
    return message if kind == "task" else f"item 0: {message}"


def output(instance: Any, kind: str) -> Any:
    return [instance.output] if kind == "task" else instance.output


# --- sent again ---------------------------------------------------------------------------------


@everywhere
@KINDS
def test_a_lost_task_is_sent_again_under_its_id(world: World, kind: str) -> None:
    instance = flow(world, kind)
    (first,) = world.sent
    with hearing(signals.task_lost) as lost:
        assert lose(world, first) == 1
    assert lost == [{"workflow": kind, "instance_id": "i-1", "run_number": 1, "outcome": "resent"}]
    again = world.sent[-1]
    assert (len(world.sent), again.id, again.name, again.content["args"]) == (2, first.id, first.name, [0])
    assert (reference(first).delivery, reference(again).delivery) == (0, 1)
    assert reference(again).token == reference(first).token
    assert answer(world, again, "ground")
    assert not answer(world, first, "ground twice")
    world.run_until_idle()
    assert output(instance, kind) == ["ground"]
    assert instance.step("grind").attempts == 1


@everywhere
@KINDS
def test_a_success_counts_from_any_delivery(world: World, kind: str) -> None:
    """A slow worker that seemed dead has done it after all."""
    instance = flow(world, kind)
    (first,) = world.sent
    lose(world, first)
    assert answer(world, first, "slow")
    assert not answer(world, world.sent[-1], "too late")
    world.run_until_idle()
    assert output(instance, kind) == ["slow"]


@everywhere
@KINDS
def test_a_failure_counts_from_the_newest_delivery_alone(world: World, kind: str) -> None:
    """A copy may fail because another one does the work."""
    instance = flow(world, kind)
    (first,) = world.sent
    lose(world, first)
    assert not answer(world, first, error=OSError("it is being ground"))
    assert instance.status == "waiting"
    assert answer(world, world.sent[-1], error=OSError("no grain"))
    world.run_until_idle()
    assert instance.output[:2] == ["OSError", text(kind, "no grain")]


@everywhere
@KINDS
def test_a_loss_is_carried_out_once_however_many_report_it(world: World, kind: str) -> None:
    flow(world, kind)
    (first,) = world.sent
    assert [lose(world, first) for _ in range(3)] == [1, 0, 0]
    assert len(world.sent) == 2
    assert lose(world, world.sent[-1]) == 1
    assert [reference(message).delivery for message in world.sent] == [0, 1, 2]


@KINDS
def test_what_was_answered_is_not_lost(world: World, kind: str) -> None:
    flow(world, kind)
    (first,) = world.sent
    answer(world, first, "ground")
    assert lose(world, first) == 0
    assert len(world.sent) == 1


@KINDS
@pytest.mark.parametrize("end", ["terminate", "restart"])
def test_what_is_lost_of_a_run_that_is_over_is_not_sent_again(world: World, kind: str, end: str) -> None:
    instance = flow(world, kind)
    (first,) = world.sent
    if end == "terminate":
        instance.terminate()
    else:
        world.restart(instance)
    assert lose(world, first) == 0
    assert [task for task in out(world) if task.id == first.id] == []


@KINDS
def test_a_loss_or_a_retry_cannot_be_made_up(world: World, kind: str) -> None:
    flow(world, kind)
    forged = replace(reference(world.sent[0]), token="0" * 32)
    assert world.operations.answers.report_lost([(forged, None)], why="I say so") == 0
    world.operations.answers.record_sent_again(forged, None)
    assert len(out(world)) == 1


@everywhere
@KINDS
def test_a_retry_of_the_task_by_itself_is_no_loss(world: World, kind: str) -> None:
    """It has sent a new message, which a search that began before knows nothing of."""
    flow(world, kind)
    (first,) = world.sent
    (seen,) = out(world)
    world.advance(5)
    world.store.transact(lambda tx: lost_tasks.record_sent_again(tx, reference(first), timedelta(seconds=20)))
    assert lose(world, first, sent_by=seen.sent_at) == 0
    assert out(world) == []  # nobody need hold it before its countdown is over
    world.advance(20)
    (now,) = out(world)
    assert lose(world, first, sent_by=now.sent_at) == 1


@everywhere
@KINDS
def test_what_was_replaced_is_not_searched_for(world: World, kind: str) -> None:
    """Its successors' messages need not name the step."""
    instance = flow(world, kind)
    (first,) = world.sent
    world.store.transact(lambda tx: lost_tasks.record_sent_again(tx, reference(first), None))
    assert out(world) == []
    assert answer(world, first, "by others")
    world.run_until_idle()
    assert output(instance, kind) == ["by others"]


@everywhere
@KINDS
def test_a_task_that_is_sent_again_has_its_time_anew(world: World, kind: str) -> None:
    instance = flow(world, kind)
    (first,) = world.sent
    version = world.store.read(lambda tx: instances.read(tx, kind, "i-1")).version
    world.run_after(3590)
    assert lose(world, first) == 1
    assert kind == "map" or world.store.read(lambda tx: instances.read(tx, kind, "i-1")).version > version
    world.run_after(3590)
    assert instance.status == "waiting"
    world.run_after(20)
    assert instance.output[0] == "StepTimeout"


# --- given up -----------------------------------------------------------------------------------


@everywhere
@KINDS
def test_a_task_that_is_lost_too_often_is_given_up(world: World, kind: str) -> None:
    """`retries` speaks of failures: this task may be what kills its workers."""
    instance = flow(world, kind, retries=Retries(limit=5, delay=1))
    for nth in range(3):
        assert lose(world, world.sent[nth]) == 1
    assert len(world.sent) == 3
    assert instance.output == ["TaskLost", text(kind, "Celery task 'mill.grind' was lost 3 times: its worker died"), 1]


@everywhere
@KINDS
def test_on_lost_fail_ends_it_at_the_first_loss(world: World, kind: str) -> None:
    instance = flow(world, kind, on_lost="fail", retries=5)
    lose(world, world.sent[0])
    assert len(world.sent) == 1
    assert instance.output == ["TaskLost", text(kind, "Celery task 'mill.grind' was lost: its worker died"), 1]


@everywhere
@KINDS
def test_an_answer_that_comes_before_the_step_fails_wins_and_nothing_is_reported(world: World, kind: str) -> None:
    """The report has found the task without an answer, and has not yet failed its step."""
    instance = flow(world, kind, on_lost="fail")
    (first,) = world.sent
    reporting, answering = world.new_producer(), world.new_producer()
    found: list[str] = []
    reporting.runtime.at["after-commit"] = lambda: found.append(accept(answering, first))
    with hearing(signals.task_lost) as lost:
        assert report(reporting, first) == 0
    world.run_after(3)
    assert (found, lost, instance.output) == (["taken"], [], expected(kind))


@everywhere
@KINDS
def test_an_answer_that_comes_after_the_step_failed_is_ignored(world: World, kind: str) -> None:
    instance = flow(world, kind, on_lost="fail")
    (first,) = world.sent
    with hearing(signals.task_lost) as lost:
        assert report(world.new_producer(), first) == 1
    assert [each["outcome"] for each in lost] == ["failed"]
    assert accept(world.new_producer(), first) == "not awaited"
    world.run_after(3)
    assert instance.output[0] == "TaskLost"


@pytest.mark.parametrize("database", ["mariadb"], indirect=True)  # a single statement on PostgreSQL
def test_a_report_waits_for_an_answer_that_is_being_committed(world: World) -> None:
    instance = flow(world, "map", on_lost="fail")
    (first,) = world.sent
    reporting, answering = world.new_producer(), world.new_producer()
    is_answered, has_found = threading.Event(), threading.Event()

    def hold() -> None:
        is_answered.set()
        assert has_found.wait(SECONDS)

    answering.runtime.at["before-commit"] = hold
    reporting.runtime.at["after-commit"] = has_found.set
    with hearing(signals.task_lost) as lost, ThreadPoolExecutor(2) as threads:
        answered = threads.submit(accept, answering, first)
        assert is_answered.wait(SECONDS)
        reported = threads.submit(report, reporting, first)
        assert (answered.result(SECONDS), reported.result(SECONDS)) == ("taken", 0)
    world.run_after(3)
    assert (lost, instance.output) == ([], ["ground"])


@KINDS
def test_on_lost_wait_leaves_it_to_its_timeout(world: World, kind: str) -> None:
    """Where its queue is consumed by workers that cannot say what they hold."""
    instance = flow(world, kind, on_lost="wait")
    assert out(world) == []
    assert lose(world, world.sent[0], sent_by=world.now) == 0
    world.run_after(3601)
    assert instance.output[0] == "StepTimeout"


@KINDS
def test_on_lost_wait_does_not_wait_for_a_task_whose_process_was_seen_to_die(world: World, kind: str) -> None:
    instance = flow(world, kind, on_lost="wait")
    assert lose(world, world.sent[0], sent_by=None) == 1
    assert (len(world.sent), instance.status) == (2, "waiting")


@KINDS
def test_the_setting_speaks_for_steps_that_say_nothing(make_world: Any, kind: str) -> None:
    world = make_world(task_on_lost="fail", lost_limit=7)
    instance = flow(world, kind)
    lose(world, world.sent[0])
    assert instance.output[0] == "TaskLost"
    instance = flow(world, kind, id="other", on_lost="resend")
    assert lose(world, world.sent[1]) == 1
    assert (len(world.sent), instance.status) == (3, "waiting")


def test_on_lost_is_one_of_three_words(world: World) -> None:
    @world.workflow
    def wrong(event: WorkflowEvent, step: Step) -> Any:
        with pytest.raises(ValueRefused, match=r"^on_lost='retry' must be one of resend, fail, wait\.$"):
            step.task("grind", grind.s(0), on_lost="retry")
        return "refused"

    assert wrong.run().output == "refused"
    with pytest.raises(ConfigInvalid, match="use one of resend, fail, wait"):
        World(world.url, task_on_lost="retry")


# --- what is out --------------------------------------------------------------------------------


@everywhere
def test_tasks_are_read_a_page_at_a_time_each_once(world: World) -> None:
    """Also those that were sent in the same moment."""
    mill = flow_of(world, lambda step: step.map("grind", grind.s(), range(7)), name="mill")
    mill.run(id="one")
    world.advance(1)
    mill.run(id="two")
    found: list[str] = []
    for offset in range(0, 27, 3):
        tasks, has_more = world.store.read(
            lambda tx, offset=offset: lost_tasks.read_sent(tx, before=world.now, limit=3, offset=offset)
        )
        found += [task.id for task in tasks]
        if not has_more:
            break
    assert sorted(found) == sorted(message.id for message in world.sent)
    assert len(found) == 14


@everywhere
def test_only_what_was_sent_long_enough_ago_is_read(world: World) -> None:
    flow(world, "task")
    world.advance(59)
    assert out(world, age=60) == []
    world.advance(1)
    assert [task.id for task in out(world, age=60)] == [world.sent[0].id]


@everywhere
@KINDS
def test_what_is_still_in_the_outbox_is_not_lost(world: World, kind: str) -> None:
    world.is_broker_away = True
    flow(world, kind)
    assert out(world) == []
    world.is_broker_away = False
    world.run_after(30)
    assert len(world.sent) == 1
    tasks = out(world)
    (body,) = world.store.read(lambda tx: lost_tasks.read_bodies(tx, tasks)).values()
    assert '"name":"mill.grind"' in body


def test_what_is_out_is_found_by_an_index(world: World) -> None:
    """However many items there are that were answered long ago."""
    query = "EXPLAIN " + ("QUERY PLAN " if world.store.database.name == "sqlite" else "")
    flow(world, "task")
    with world.store.engine.begin() as connection:
        if world.store.database.name == "postgresql":
            connection.execute(sa.text("SET LOCAL enable_seqscan = off"))
        is_out = "status = 'sent' AND sent_at > 0 AND sent_at <= 5"
        text = f"SELECT * FROM workflow_item WHERE {is_out} ORDER BY sent_at LIMIT 10"
        plan = "\n".join(str(row) for row in connection.execute(sa.text(query + text)))
    assert f"ix_workflow_item_{'sent' if world.store.database.name == 'mariadb' else 'out'}" in plan
