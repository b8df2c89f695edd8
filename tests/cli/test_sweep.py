"""`durable sweep` from cron, where the broker is away."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from celery import Celery

from celery_durable import Durable, Step, WorkflowEvent
from tests.cli.test_refusals import call
from tests.support.databases import on_databases

NOWHERE = "redis://127.0.0.1:1/0"


database = on_databases("sqlite")


@pytest.fixture
def app(store_url: str) -> Iterator[Celery]:
    app = Celery("shop", broker=NOWHERE, set_as_current=False)
    app.conf.durable_database_url = store_url
    durable = Durable(app)

    @durable.workflow(name="order")
    def order(event: WorkflowEvent[Any], step: Step) -> None:
        """Never run here."""

    yield app
    durable.close()
    app.close()


def test_a_sweep_that_could_not_publish_says_why_and_fails(app: Celery) -> None:
    """Before it said "Published 0", as if nothing were due, and cron took it for done."""
    durable = vars(app)["durable"]
    durable.workflows["order"].create(id="o-1")
    i = durable.internals.store.tables.instance
    with durable.internals.store.engine.begin() as connection:
        connection.execute(sa.update(i).values(next_check_at=i.c.run_at))
    said = call(app, "sweep")
    assert said.rows == [["Published", "0"]]
    assert said.code == 1
    error, hint = said.err.splitlines()
    broker = app.connection_for_write().as_uri()  # kombu 5.7 masks a password even if there is none, kombu 5.5 does not
    assert error.startswith(f"error: The broker {broker} takes no messages: OperationalError: ")
    assert hint == "hint: Nothing listens there: start the broker, or correct broker_url."
