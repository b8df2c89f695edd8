"""Messages of what is created and sent inside a caller's transaction."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa
from celery import Celery
from sqlalchemy.orm import Session

from celery_durable import Durable, InstanceAlreadyExists, Step, StepTx, WorkflowEvent
from tests.support.brokerless import approval
from tests.support.celery_apps import MakeApp
from tests.support.databases import on_databases
from tests.support.embedded import messages

database = on_databases("sqlite", "postgresql")


@pytest.fixture
def engine(store_url: str) -> Any:
    engine = sa.create_engine(store_url)
    yield engine
    engine.dispose()


def test_create_in_a_session_publishes_only_after_its_commit(app: Celery, durable: Durable, engine: sa.Engine) -> None:
    workflow = approval(durable)
    with Session(engine) as session:
        instance = workflow.create(id="i-1", session=session)
        session.flush()
        assert messages(app) == []
        with session.begin_nested():
            session.execute(sa.text("SELECT 1"))
        assert messages(app) == []
        session.commit()
    assert [message.payload[0] for message in messages(app)] == [["approval", "i-1", 1]]
    assert instance.status().status == "active"


def test_a_session_that_rolls_back_creates_and_publishes_nothing(
    app: Celery, durable: Durable, engine: sa.Engine
) -> None:
    workflow = approval(durable)
    with Session(engine) as session:
        workflow.create(id="i-1", session=session)
        session.rollback()
        session.execute(sa.text("SELECT 1"))
        session.commit()
    assert messages(app) == []
    assert workflow.list().items == ()
    workflow.create(id="i-1")


def test_an_id_that_exists_leaves_the_session_usable(app: Celery, durable: Durable, engine: sa.Engine) -> None:
    workflow = approval(durable)
    workflow.create(id="i-1")
    messages(app)
    with Session(engine) as session:
        with pytest.raises(InstanceAlreadyExists):
            workflow.create(id="i-1", session=session)
        workflow.create(id="i-1", if_exists="return", session=session)
        workflow.create(id="i-2", session=session)
        session.commit()
    assert [message.payload[0][1] for message in messages(app)] == ["i-2"]


def test_a_broker_that_is_away_fails_no_commit(brokerless: Celery, engine: sa.Engine) -> None:
    workflow = approval(Durable(brokerless))
    with Session(engine) as session:
        workflow.create(id="i-1", session=session)
        session.commit()
    assert workflow.get("i-1").status().status == "active"


def test_an_event_in_a_session_wakes_only_after_its_commit(app: Celery, durable: Durable, engine: sa.Engine) -> None:
    workflow = approval(durable)
    instance = workflow.create(id="i-1")
    app.tasks["celery_durable.advance"].apply(args=("approval", "i-1", 1))
    assert instance.status().status == "waiting"
    messages(app)
    with Session(engine) as session:
        assert instance.send_event("approval", "yes", session=session)
        assert messages(app) == []
        session.commit()
    assert [message.payload[0] for message in messages(app)] == [["approval", "i-1", 1]]


def test_what_a_step_creates_is_published_after_its_commit(app: Celery, durable: Durable) -> None:
    child = approval(durable)

    @durable.workflow
    def parent(event: WorkflowEvent[Any], step: Step) -> str:
        def body(tx: StepTx) -> str:
            return tx.create(child, id="child-1")

        def fails(tx: StepTx) -> None:
            tx.create(child, id="child-2")
            raise ValueError("after the create was buffered")

        made = step.do("create", body)
        step.do("fail", fails)
        return made

    parent.create(id="p-1")
    messages(app)
    app.tasks["celery_durable.advance"].apply(args=("parent", "p-1", 1))
    assert [message.payload[0] for message in messages(app)] == [["approval", "child-1", 1]]
    assert [item.id for item in child.list().items] == ["child-1"]


def test_a_queue_that_the_app_does_not_have_holds_up_nobody_else(
    make_app: MakeApp, caplog: pytest.LogCaptureFixture
) -> None:
    app = make_app(task_create_missing_queues=False)
    durable = Durable(app)

    @durable.workflow(name="renamed", queue="gone")
    def renamed(event: WorkflowEvent[Any], step: Step) -> None: ...

    renamed.create(id="r-1")
    approval(durable).create(id="a-1")
    assert [message.payload[0] for message in messages(app)] == [["approval", "a-1", 1]]
    assert (
        "Queue 'gone' takes no messages; other queues are not affected. Retries follow with growing pauses"
        in caplog.text
    )
    assert "QueueNotFound" in durable.internals.publisher.outages()["gone"].error
