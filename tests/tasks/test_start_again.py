"""`celery_durable.start` while the database, the workflow's code or the broker is missing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery, signals
from kombu.exceptions import OperationalError

from celery_durable import Durable, Step, Workflow, WorkflowEvent
from celery_durable.errors import SchemaOutdated, WorkflowNotFound
from celery_durable.tasks.start import START
from tests.support.celery_apps import MakeApp
from tests.support.embedded import until, worker


@pytest.fixture
def retries() -> Iterator[list[BaseException]]:
    """Why tasks were sent again, from now on."""
    reasons: list[BaseException] = []

    def note(reason: Any, **_: Any) -> None:
        reasons.append(reason.exc)

    signals.task_retry.connect(note)
    yield reasons
    signals.task_retry.disconnect(note)


@pytest.fixture
def app(make_app: MakeApp, tmp_path: Path) -> Celery:
    """An app whose database has no tables yet, and that does not look for due work itself."""
    return make_app(durable_database_url=f"sqlite:///{tmp_path}/empty.sqlite3", durable_dispatcher="none")


def doubling(durable: Durable) -> Workflow[int, int]:
    @durable.workflow(name="order")
    def order(event: WorkflowEvent[int], step: Step) -> int:
        return event.payload * 2

    return order


def test_an_instance_starts_when_the_database_is_there_again(
    app: Celery, durable: Durable, retries: list[BaseException]
) -> None:
    order = doubling(durable)

    with worker(app):
        sent = order.s(21).delay()
        until(lambda: retries)
        durable.migrate()
        until(lambda: order.list().items)
        assert order.get(sent.id).result("20 seconds") == 42
    assert {type(each) for each in retries} == {SchemaOutdated}


def test_an_instance_starts_when_the_worker_knows_the_workflow(
    app: Celery, durable: Durable, retries: list[BaseException]
) -> None:
    durable.migrate()
    with worker(app):
        sent = app.tasks[START].apply_async((21,), {"workflow": "order"})
        until(lambda: retries)

        order = doubling(durable)

        until(lambda: order.list().items)
        assert order.get(sent.id).result("20 seconds") == 42
    assert {type(each) for each in retries} == {WorkflowNotFound}


def test_the_broker_keeps_the_message_if_it_cannot_be_sent_again(
    app: Celery, durable: Durable, retries: list[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: list[str] = []

    order = doubling(durable)

    with worker(app):
        sending = app.amqp.send_task_message

        def refuse_retries(producer: Any, name: str, message: Any, **options: Any) -> Any:
            if message.headers["retries"]:
                refused.append(name)
                raise OperationalError("the broker is away")
            return sending(producer, name, message, **options)

        monkeypatch.setattr(app.amqp, "send_task_message", refuse_retries)
        sent = order.s(21).delay()
        until(lambda: refused)
        durable.migrate()
        until(lambda: order.list().items)
        assert order.get(sent.id).result("20 seconds") == 42
    assert retries == []


def test_an_eager_signature_starts_the_instance_and_returns_its_id(make_app: MakeApp) -> None:
    app = make_app(task_always_eager=True, durable_grace_seconds=0.001)
    durable = Durable(app)

    order = doubling(durable)

    sent = order.s(21).delay()
    assert sent.get() == sent.id
    assert order.get(sent.id).status().output == 42


def test_an_eager_signature_raises_at_once_what_a_worker_would_try_again(app: Celery, durable: Durable) -> None:
    app.conf.update(task_always_eager=True, task_eager_propagates=True)

    order = doubling(durable)

    with pytest.raises(SchemaOutdated):
        order.s(21).delay()
