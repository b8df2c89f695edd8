"""The attempts of Celery tasks that failed: with the traceback if the task's process has committed the answer."""

from __future__ import annotations

import os
from typing import Any

import pytest
import sqlalchemy as sa
from celery import Celery

from celery_durable import Durable, RedactionContext, Retries, Step, StepFailed, WorkflowEvent
from celery_durable.model import AttemptRecord
from tests.support.celery_apps import MakeApp
from tests.support.embedded import worker
from tests.support.three_frames import LINE, PLACE, charge

on_sqlite = pytest.mark.parametrize("database", ["sqlite"], indirect=True)
on_servers = pytest.mark.parametrize(
    "database", ["postgresql", pytest.param("mariadb", marks=pytest.mark.slow)], indirect=True
)
kinds = pytest.mark.parametrize("kind", ["task", "map"])


def fail_in_task(app: Celery, durable: Durable, kind: str) -> list[AttemptRecord]:
    """Run a workflow whose task fails in each of its two attempts; returns their records."""

    @app.task(name="price", shared=False)
    def price(number: int) -> int:
        return charge({})

    @durable.workflow(name="order")
    def order(event: WorkflowEvent[None], step: Step) -> str:
        task = price.si(7).set(queue=app.conf.durable_queue)
        try:
            if kind == "task":
                step.task("price", task, timeout="1 minute", retries=Retries(limit=1, delay=0))
            else:
                options: dict[str, Any] = {"timeout": "1 minute", "retries": Retries(limit=1, delay=0)}
                step.map("price", price.s().set(queue=app.conf.durable_queue), [7], **options)
        except StepFailed as exc:
            return exc.error_name
        return "paid"

    with worker(app, queues=[app.conf.durable_queue]):
        assert order.create(id="o-1").result(timeout=30) == "KeyError"
    return list(durable.internals.operations.history.read("order", "o-1").attempts)


@on_sqlite
@kinds
def test_an_attempt_of_a_task_has_its_traceback_and_its_worker(app: Celery, durable: Durable, kind: str) -> None:
    attempts = fail_in_task(app, durable, kind)
    assert [(each.attempt, each.item) for each in attempts] == [(n, None if kind == "task" else 0) for n in (1, 2)]
    for attempt in attempts:
        assert f"{attempt.file}:{attempt.line}" == PLACE
        assert attempt.traceback is not None
        assert f'", line {LINE}, in look_up' in attempt.traceback
        assert "4242" not in attempt.traceback
        assert attempt.traceback.splitlines()[-1] == "KeyError: 'total'"
        assert (attempt.pid, bool(attempt.worker), bool(attempt.task_id)) == (os.getpid(), True, True)


@on_sqlite
@kinds
def test_an_answer_that_comes_as_a_message_has_no_traceback(app: Celery, durable: Durable, kind: str) -> None:
    """It would have to travel past the redaction of errors."""
    durable.internals.answers.pause_direct_commits()
    attempts = fail_in_task(app, durable, kind)
    assert [(each.error.name, each.traceback, each.file, each.worker) for each in attempts] == [
        ("KeyError", None, None, None)
    ] * 2


@on_sqlite
def test_a_traceback_is_redacted_before_it_is_stored(make_app: MakeApp) -> None:
    def redact(value: Any, context: RedactionContext) -> Any:
        return "(hidden)" if context.kind == "error" else value

    app = make_app()
    durable = Durable(app, redact=redact)
    attempts = fail_in_task(app, durable, "task")
    assert attempts[0].traceback is not None
    assert attempts[0].traceback.splitlines()[-1] == "KeyError: (hidden)"
    assert "'total'" not in attempts[0].error.message


@on_servers
@pytest.mark.parametrize(
    ("kind", "is_direct"),
    [
        ("task", True),
        ("map", False),
        pytest.param("task", False, marks=pytest.mark.slow),
        pytest.param("map", True, marks=pytest.mark.slow),
    ],
)
def test_the_instance_is_not_locked_while_the_hook_runs(make_app: MakeApp, kind: str, is_direct: bool) -> None:
    """The hook is the application's code: it may be slow, or wait for a transaction that waits for the instance."""
    seen: list[tuple[str, str | None]] = []

    def redact(value: Any, context: RedactionContext) -> Any:
        store = durable.internals.store
        with store.engine.connect() as connection:  # a lock of the hook's own transaction would be waited for in vain
            connection.execute(sa.select(store.tables.instance.c.id).with_for_update()).all()
        seen.append((context.kind, context.name))
        return value

    app = make_app()
    durable = Durable(app, redact=redact)
    if not is_direct:
        durable.internals.answers.pause_direct_commits()
    attempts = fail_in_task(app, durable, kind)
    assert {each.error.message for each in attempts} == {"'total'"}
    assert set(seen) == {("error", "price"), ("traceback", "price")} if is_direct else {("error", "price")}
