"""How Celery tasks answer: through the callbacks of a worker, eagerly, and when the database cannot take it."""

from __future__ import annotations

import datetime as dt
import logging
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import Ignore

from celery_durable import Durable, NonRetryableError, Retries, Step, StepFailed, WorkflowEvent
from celery_durable.tasks import TASK_DONE, TASK_FAILED
from tests.celery.conftest import MakeApp
from tests.celery.embedded import messages, until, worker

_ATTEMPTS: list[int] = []


class CardDeclined(Exception):
    """One that pickle cannot carry, which is what Celery tries."""

    def __init__(self, card: str, why: str) -> None:
        super().__init__(f"{card}: {why}")


def adding_tasks(app: Celery) -> None:
    @app.task(name="fine", shared=False)
    def fine(number: int) -> Any:
        return {"number": number, "day": dt.date(2030, 1, 2)}

    @app.task(name="fails", shared=False)
    def fails(number: int) -> None:
        raise LookupError(f"no {number}")

    @app.task(name="final", shared=False)
    def final(number: int) -> None:
        raise NonRetryableError("no use", name="Gone")

    @app.task(name="declined", shared=False)
    def declined(number: int) -> None:
        raise CardDeclined("4242", "no cover")

    @app.task(name="odd", shared=False)
    def odd(number: int) -> float:
        return float("nan")

    @app.task(name="again", bind=True, shared=False, max_retries=2)
    def again(task: Any, number: int) -> int:
        _ATTEMPTS.append(number)
        if len(_ATTEMPTS) < 3:
            raise task.retry(countdown=0)
        return number

    @app.task(name="silent", shared=False)
    def silent(number: int) -> None:
        raise Ignore


@pytest.fixture
def ask(durable: Durable, app: Celery) -> Any:
    """A workflow that has the tasks of these names do a step each, and tells what came of them."""
    adding_tasks(app)
    _ATTEMPTS.clear()

    @durable.workflow
    def ask(event: WorkflowEvent[list[str]], step: Step) -> Any:
        got = []
        for name in event.payload:
            try:
                task = app.signature(name, (7,)).set(queue=app.conf.durable_queue)
                got.append(step.task(name, task, timeout="1 minute", retries=Retries(limit=1, delay=0)))
            except StepFailed as exc:
                got.append([exc.error_name, exc.error_message, exc.attempts])
        return got

    return ask


EXPECTED = {
    "fine": {"number": 7, "day": "2030-01-02T00:00:00"},
    "fails": ["LookupError", "no 7", 2],
    "final": ["Gone", "no use", 1],
    "again": 7,
    "declined": ["CardDeclined", "CardDeclined('4242: no cover')", 2],
}


def test_results_and_errors_come_back_from_a_worker(app: Celery, ask) -> None:
    with worker(app, queues=[app.conf.durable_queue]):
        got = ask.create([*EXPECTED, "odd"]).result(timeout=30)
    assert got[0]["day"].startswith("2030-01-02")
    assert got[1:-1] == [*EXPECTED.values()][1:]
    assert (got[-1][0], got[-1][2]) == ("NotSerializable", 1)  # again it would be the same
    assert len(_ATTEMPTS) == 3  # Celery's own retries are one attempt


def test_what_runs_eagerly_answers_at_once(make_app: MakeApp) -> None:
    app = make_app(broker_url="redis://127.0.0.1:1/0", task_always_eager=True)
    durable = Durable(app)
    adding_tasks(app)

    @durable.workflow
    def kid(event: WorkflowEvent[int], step: Step) -> int:
        return event.payload + 1

    @durable.workflow
    def all_sorts(event: WorkflowEvent, step: Step) -> Any:
        got = step.map("map", app.signature("fine"), range(3), max_concurrency=1, return_exceptions=True)
        try:
            step.task("unknown", "nobody.knows.it")
        except StepFailed as exc:
            return [[each["number"] for each in got], exc.error_name, step.child("kid", kid, 1)]

    assert all_sorts.create().status().output == [[0, 1, 2], "NotRegistered", 2]


def test_an_answer_waits_in_the_broker_while_the_database_does_not_take_it(
    app: Celery, durable: Durable, ask, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer, refused = durable.operations.answer, []

    def refuse(*args: Any) -> bool:
        if len(refused) < 2:
            refused.append(args)
            raise OSError("the database is away")
        return answer(*args)

    monkeypatch.setattr(durable.operations, "answer", refuse)
    monkeypatch.setattr(durable.answers, "rest", lambda: None)
    with caplog.at_level(logging.WARNING), worker(app, queues=[app.conf.durable_queue]):
        assert ask.create(["again"]).result(timeout=30) == [7]
    assert len(refused) == 2
    assert "its message goes back to the broker: the database is away" in caplog.text


def test_a_task_that_celery_will_not_run_fails_its_step_at_once(app: Celery, durable: Durable) -> None:
    adding_tasks(app)

    @durable.workflow
    def late(event: WorkflowEvent, step: Step) -> Any:
        try:
            step.task("fine", app.signature("fine", (7,)).set(queue=app.conf.durable_queue, expires=-1))
        except StepFailed as exc:
            return [exc.error_name, exc.error_message.partition(" (")[0], exc.error_message.partition(") ")[2]]

    with worker(app, queues=[app.conf.durable_queue]):
        got = late.create().result(timeout=30)
    assert got == ["TaskRevoked", "Celery task 'fine'", "was not run: it had expired"]


def test_a_task_that_never_answers_is_waited_for(app: Celery, ask) -> None:
    with worker(app, queues=[app.conf.durable_queue]):
        instance = ask.create(["silent"])
        until(lambda: instance.status().status == "waiting")
        step = instance.history().steps[0]
    assert (step.status, step.task, step.attempts) == ("waiting", "silent", 1)
    assert instance.explain().code == "WAITING_TASKS"


def test_an_error_goes_to_the_queue_of_who_has_asked(app: Celery, durable: Durable) -> None:
    """The worker that did the task may have workflows of its own, and a queue and a database for them."""
    asked = ("ask", "i-1", 1, "task:1:1:1:x")
    theirs = f"theirs-{app.conf.durable_queue}"
    app.tasks[TASK_FAILED](object(), LookupError("no 7"), None, *asked, theirs)
    (message,) = messages(app, theirs)
    (error, *rest), _, _ = message.decode()
    assert (error, rest) == ({"name": "LookupError", "message": "no 7"}, [*asked, theirs])
    assert messages(app) == []


@pytest.mark.parametrize("asked", [(), ("ask",), ("ask", 7, 1, "task:1:1:x"), ("ask", "i-1", "one", "x"), ("a",) * 9])
def test_a_message_that_nobody_can_read_is_dropped(app: Celery, durable: Durable, asked: Any) -> None:
    for name, what in ((TASK_DONE, 1), (TASK_FAILED, {"name": "E", "message": "m"}), (TASK_FAILED, "task-id")):
        assert app.tasks[name].apply((what, *asked)).get() == "noop: malformed message"


@pytest.mark.parametrize("asked", ["task:1:1:x", "item:0:1:map", "approval", "item:x", "item:a:b:c", ""])
def test_an_answer_to_nothing_changes_nothing(app: Celery, durable: Durable, ask, asked: str) -> None:
    instance = ask.create(["fine"])
    messages(app)
    for ref in (("ask", instance.id, 1), ("ask", "other", 1), ("ask", instance.id, 9), ("\0", "\0", 1)):
        said = app.tasks[TASK_DONE].apply(("forged", *ref, asked)).get()
        assert said.startswith("noop: ")
    assert instance.history().events == ()
