"""Every code provoked in the engine itself, on a clock of its own; with real processes missing: tests/smoke."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from celery import Celery

from celery_durable import Durable, NonRetryableError, Retries, Step, StepConfig, WorkflowEvent, durable_workflow
from celery_durable.errors import InstanceNotFound
from celery_durable.insight.explain import Code
from celery_durable.model import RunRef
from celery_durable.store import heartbeats
from celery_durable.store.heartbeats import HeartbeatUpdate
from celery_durable.testing import DurableHarness
from tests.support.embedded import until


@durable_workflow(name="explained")
def explained(event: WorkflowEvent[str], step: Step) -> str:
    match event.payload:
        case "sleep":
            step.sleep("nap", "1 day")
        case "event":
            step.wait_for_event("await approval", "approval", timeout="2 days")
        case "retry":
            step.do("charge", StepConfig(retries=Retries(limit=2, delay="10s")), lambda: 1 / 0)
        case "fail":
            step.do("pay", _declined)
        case "once":
            step.do("pay", StepConfig(on_lost="fail"), lambda: "paid")
        case "limit":
            step.do("one", lambda: 1)
            step.do("two", lambda: 2)
            step.do("three", lambda: 3)
        case "reuse":
            step.do("one", lambda: 1)
            step.do("one", lambda: 2)
        case "both":
            step.gather(step.submit_sleep("nap", "1 hour"), step.submit_wait_for_event("wait", "go"))
        case "task":
            step.task("thumb", "media.resize", timeout="1 hour")
        case "tasks":
            step.gather(*(step.submit_task(f"page {n}", "media.resize", retries=1) for n in range(2)))
        case "child":
            step.child("bill", explained, "event", id="c-1", timeout="1 hour")
        case "long":
            step.do("work", lambda: "worked")
            step.do("more", lambda: "worked more")
        case _:
            step.do("work", lambda: "worked")
    return "done"


def _declined() -> None:
    raise NonRetryableError("no money", name="CardDeclined")


@pytest.fixture
def world(store_url: str) -> Iterator[DurableHarness]:
    settings = {"durable_max_steps": 2, "durable_max_crashes": 3}
    with DurableHarness([explained], store_url=store_url, settings=settings) as world:
        yield world


def made(world: DurableHarness, what: str = "work", **options: Any) -> Any:
    return world.create(explained, what, id="e-1", **options)


def ran(world: DurableHarness, what: str) -> Any:
    instance = made(world, what)
    world.run_until_idle()
    return instance


def live(world: DurableHarness, *pulses: HeartbeatUpdate) -> None:
    for pulse in pulses:
        world.durable.internals.store.transact_once(lambda tx, pulse=pulse: heartbeats.upsert(tx, pulse))


BEAT = HeartbeatUpdate("d", "dispatcher", "beat@here", 1, swept_ago=timedelta(0))
WORKER = HeartbeatUpdate("w", "worker", "celery@here", 2, queues=["durable"], workflows=["explained"])


CODES = {
    "sleep": Code.SLEEPING,
    "event": Code.WAITING_EVENT,
    "retry": Code.RETRY_SCHEDULED,
    "both": Code.SLEEPING,
    "task": Code.WAITING_TASKS,
    "tasks": Code.WAITING_TASKS,
    "child": Code.WAITING_CHILD,
    "fail": Code.FAILED,
    "limit": Code.STEP_LIMIT,
    "reuse": Code.NONDETERMINISTIC,
    "work": Code.DONE,
}


def test_what_a_workflow_does_has_its_code(world: DurableHarness) -> None:
    instances = {what: world.create(explained, what, id=f"e-{what}") for what in CODES}
    world.run_until_idle()
    assert {what: instance.explain().code for what, instance in instances.items()} == CODES


def test_an_event_of_nearly_the_right_type_is_told(world: DurableHarness) -> None:
    instance = ran(world, "event")
    instance.send_event("aproval", {"by": "eve"})
    found = instance.explain()
    assert found.code is Code.WAITING_EVENT
    assert found.sentence == (
        'Waits for event "approval" at step "await approval"; times out in 2 d. An event "aproval" is stored, but '
        'the wait is for "approval": a typing mistake?'
    )
    assert found.facts["buffered"] == ["aproval"]
    instance.send_event("approval")
    world.run_until_idle()
    assert instance.explain().code is Code.DONE


def test_a_failure_is_told_with_its_step(world: DurableHarness) -> None:
    found = ran(world, "fail").explain()
    sentence, _, place = found.sentence.partition(" Raised at ")
    assert sentence == 'It failed 0 ms ago with CardDeclined: no money (step "pay", 1 attempt).'
    assert place.startswith(f"{__file__}:")
    again = [f"celery -A <your app> durable {command} explained e-1" for command in ("retry", "restart")]
    assert list(found.actions[-2:]) == again


def test_a_task_is_told_until_it_answers(world: DurableHarness) -> None:
    instance = ran(world, "task")
    [message] = world.outbox
    world.advance("10 minutes")
    found = instance.explain()
    assert (found.code, found.sentence, found.actions) == (
        Code.WAITING_TASKS,
        f"Waits for Celery task media.resize ({message.id}), under way for 10 min, "
        'at step "thumb"; times out in 50 min.',
        (f"celery -A <your app> inspect query_task {message.id}",),
    )
    world.mocks.mock_step_result("thumb", "small")
    world.run_until_idle()
    assert instance.explain().code is Code.DONE


def test_a_task_that_the_broker_does_not_take_is_told(store_url: str) -> None:
    app = Celery("away", broker="redis://127.0.0.1:1/0", set_as_current=False)
    app.conf.update(durable_database_url=store_url)
    durable = Durable(app)
    durable.workflow(name="explained")(explained.definition.fn)
    instance = durable.workflows["explained"].create("tasks", id="e-1")
    durable.internals.runner.advance(RunRef("explained", "e-1", 1), task_id="task-1", node="celery@here")
    found = instance.explain()
    durable.close()
    app.close()
    assert (found.code, found.facts["tasks_unsent"]) == (Code.WAITING_TASKS, 2)
    assert found.sentence.endswith(
        ". 2 of them have not been sent yet: the broker does not accept them, or no dispatcher sends them."
    )
    assert found.actions == ("celery -A <your app> durable outbox", "celery -A <your app> durable doctor")


def test_tasks_are_counted_and_one_that_failed_is_tried_again(world: DurableHarness) -> None:
    instance = ran(world, "tasks")
    first, second = (message.id for message in world.outbox)
    world.advance("10 minutes")
    assert instance.explain().sentence == (
        f"Waits for 2 Celery tasks, 0 of 2 have answered; the oldest is media.resize ({first}), under way for 10 min, "
        'at step "page 0"; the next times out in 23 h 50 min.'
    )
    world.mocks.mock_step_error("page 1", OSError("disk full"), times=1)
    world.run_until_idle()
    found = instance.explain()
    assert (found.code, found.sentence.partition(" again in")[0]) == (Code.RETRY_SCHEDULED, 'Tries step "page 1"')
    assert found.sentence.endswith(
        'attempt 1/2 failed: OSError: disk full. Also: step "page 0" waits for Celery task media.resize.'
    )
    world.advance("10 minutes")
    again = world.outbox[-1].id
    assert again not in (first, second)
    world.mocks.mock_step_result("page 0", None)
    world.run_until_idle()
    found = instance.explain()
    assert found.sentence.startswith(f"Waits for Celery task media.resize ({again}), under way for 9 min, ")
    assert (found.facts["tasks_out"], found.facts["tasks_answered"]) == (1, 1)


def test_a_child_is_told_with_how_it_stands(world: DurableHarness) -> None:
    instance = ran(world, "child")
    sentence = 'Waits for instance explained/c-1, which is {}, at step "bill"; times out in 1 h.'
    found = instance.explain()
    assert (found.code, found.sentence, found.actions) == (
        Code.WAITING_CHILD, sentence.format("waiting"), ("celery -A <your app> durable explain explained c-1",),
    )  # fmt: skip
    child = world.instance(explained, "c-1")
    assert child.explain().code is Code.WAITING_EVENT
    child.pause()
    assert instance.explain().sentence == sentence.format("paused")
    child.resume()
    child.send_event("approval")
    world.run_until_idle()
    assert (child.explain().code, instance.explain().code) == (Code.DONE, Code.DONE)


def test_a_pause_is_told_before_and_after_it_takes_effect(world: DurableHarness) -> None:
    gate = world.faults.hold("work")
    instance = ran(world, "long")
    found = instance.explain()
    assert found.code is Code.RUNNING
    assert found.sentence == (
        "It runs the code before its first step, on runner-1, which has held it for 0 ms; the lease is valid for 30 s."
    )
    instance.pause()
    assert instance.explain().code is Code.PAUSED
    assert instance.explain().sentence.startswith("A pause is requested; it takes effect when the running step ends")
    gate.release()
    world.run_until_idle()
    assert instance.explain().sentence == "It has been paused for 0 ms; its timers keep running."
    instance.terminate("no more")
    assert instance.explain().sentence == "It was terminated 0 ms ago: no more."


def test_what_is_due_is_told_by_who_is_missing(world: DurableHarness) -> None:
    instance = made(world)
    world.messages.clear()  # lost
    assert instance.explain().code is Code.DUE
    world.clock.set_to(world.clock.now + timedelta(seconds=3))
    live(world, WORKER)
    assert instance.explain().code is Code.DUE_NOT_DISPATCHED
    live(world, BEAT)
    assert instance.explain().code is Code.DUE
    world.tick()  # a sweep
    world.clock.set_to(world.clock.now + timedelta(seconds=3))
    live(world, BEAT)
    live(world, WORKER)
    assert instance.explain().code is Code.DISPATCHED_NOT_CLAIMED
    live(world, HeartbeatUpdate("w", "worker", "celery@here", 2, queues=["durable"], workflows=["order"]))
    assert instance.explain().code is Code.NOT_REGISTERED
    live(world, HeartbeatUpdate("w", "worker", "celery@here", 2, queues=["celery"], workflows=["explained"]))
    found = instance.explain()
    assert found.code is Code.DISPATCHED_NOT_CLAIMED
    assert found.sentence == (
        "It has been due for 6 s and its message was sent once, but no worker consumes queue 'durable'."
    )


def test_a_dead_worker_is_told_when_its_lease_has_ended(world: DurableHarness) -> None:
    world.faults.crash_at("claimed")
    instance = ran(world, "work")
    assert instance.explain().code is Code.RUNNING
    world.clock.set_to(world.clock.now + timedelta(seconds=31))
    found = instance.explain()
    assert (found.code, found.actions) == (Code.LEASE_EXPIRED, ("celery -A <your app> beat",))
    live(world, BEAT)
    assert (instance.explain().code, instance.explain().actions) == (Code.LEASE_EXPIRED, ())


def test_workers_that_die_again_and_again_are_told_while_it_rests(world: DurableHarness) -> None:
    world.faults.crash_in_step("work", times=9)
    instance = ran(world, "work")
    seen = []
    while not instance.has_ended:
        seen.append(instance.explain())
        world.advance("1 s")
    resting = next(found for found in seen if found.code is Code.CRASHING)
    assert resting.sentence.startswith("It is delayed after a crash and continues in ")
    last = "Last: The worker died, hung or lost its lease. It recorded no step."
    assert resting.sentence.endswith(f": 2 workers in a row died or lost their lease, without finishing a step. {last}")
    assert f"Before that, 1 worker died or lost its lease, without finishing a step. {last}" in {
        found.sentence.partition("s. ")[2] for found in seen
    }
    assert instance.explain().sentence.startswith("It failed 0 ms ago with WorkerCrashLoop: 3 workers in a row died")


def test_a_step_whose_end_is_unknown_is_explained_with_the_worker_and_what_to_do(world: DurableHarness) -> None:
    crash = world.faults.crash_in_step("pay")
    instance = ran(world, "once")
    world.advance("1 minute")
    found = instance.explain()
    assert (crash.calls, found.code) == (1, Code.OUTCOME_UNKNOWN)
    assert "OutcomeUnknown: the worker of attempt 1 died or lost its lease, so it is unknown whether" in found.sentence
    assert " The attempt on " in found.sentence
    assert [action.split("durable ")[1].split()[0] for action in found.actions] == [
        "show",
        "retry",
        "set-result",
        "skip",
    ]
    instance.retry()
    world.run_until_idle()
    assert instance.status().status.value == "complete"


def test_the_current_run_is_what_is_explained(world: DurableHarness) -> None:
    instance = ran(world, "event")
    instance.send_event("aproval")
    instance.restart()
    world.run_until_idle()
    assert instance.explain().facts["run_number"] == 2
    assert "aproval" not in instance.explain().sentence


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_it_has_an_async_twin_and_refuses_what_is_not_there(world: DurableHarness) -> None:
    instance = ran(world, "sleep")
    assert asyncio.run(instance.aexplain()) == instance.explain()
    with pytest.raises(InstanceNotFound):
        world.durable.internals.operations.queries.explain("explained", "none")


def test_explain_says_how_old_the_report_of_the_running_step_is(world: DurableHarness) -> None:
    gate = world.faults.hold("work")
    instance = ran(world, "long")
    world.clock.advance(timedelta(seconds=8))
    assert instance.explain().sentence == (
        "It runs the code before its first step, on runner-1, which has held it for 8 s, as of 8 s ago; the lease is "
        "valid for 22 s."
    )
    gate.release()


@pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)
def test_explain_names_the_session_that_locks_the_row(world: DurableHarness) -> None:
    store = world.durable.internals.store
    instance = made(world)
    with store.engine.connect() as blocker:
        is_postgresql = store.database.name == "postgresql"
        pid = blocker.execute(sa.text(f"SELECT {'pg_backend_pid' if is_postgresql else 'connection_id'}()")).scalar()
        blocker.execute(sa.select(store.tables.instance.c.id).with_for_update())
        until(lambda: instance.explain().code is Code.DUE_NOT_DISPATCHED)  # once it is older than a second
        found = instance.explain()
        assert f"the database session with pid {pid} (idle in transaction) has held a lock on its row" in found.sentence
        end = f"psql -c 'SELECT pg_terminate_backend({pid})'" if is_postgresql else f"mariadb -e 'KILL {pid}'"
        assert found.actions == (end,)
    world.run_until_idle()
    assert instance.explain().code is Code.DONE
