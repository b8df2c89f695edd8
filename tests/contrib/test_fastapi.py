"""celery_durable.contrib.fastapi: errors as responses, the lifespan, and the dependency."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery
from fastapi import Depends, FastAPI
from starlette.testclient import TestClient

from celery_durable import Durable, Step, WorkflowEvent
from celery_durable.app import override_durable
from celery_durable.contrib.fastapi import add_exception_handlers, lifespan
from celery_durable.errors import ConfigInvalid, SchemaOutdated
from celery_durable.testing import DurableHarness
from tests.support.databases import on_databases

database = on_databases("sqlite")


@pytest.fixture
def durable(store_url: str) -> Iterator[Durable]:
    app = Celery(f"app-{uuid.uuid4().hex}", broker="memory://", set_as_current=False)
    app.conf.durable_database_url = store_url
    durable = Durable(app)

    @durable.workflow
    def order(event: WorkflowEvent[int], step: Step) -> int:
        return event.payload

    yield durable
    durable.close()
    app.close()


@pytest.fixture
def site(durable: Durable) -> FastAPI:
    site = FastAPI(lifespan=lifespan(durable))
    add_exception_handlers(site)
    given = Depends(durable.client)

    @site.post("/orders/{id}")
    async def create(id: str, params: int, client: Durable = given) -> str:
        return (await client.workflows["order"].acreate(params, id=id)).id

    @site.post("/orders/{id}/end")
    async def end(id: str, client: Durable = given) -> None:
        await (await client.workflows["order"].aget(id)).aterminate()

    @site.get("/broken")
    async def broken() -> None:
        raise SchemaOutdated(None, "0002")

    return site


def test_errors_are_answered_as_by_the_http_api(site: FastAPI) -> None:
    with TestClient(site) as web:
        assert web.post("/orders/o-1?params=1").json() == "o-1"
        web.post("/orders/o-1/end")
        answers = [
            web.post(path)
            for path in ("/orders/o-2/end", "/orders/o-1?params=2", "/orders/o-1/end", "/orders/a%20b?params=1")
        ]
    assert [(each.status_code, each.json()["code"]) for each in answers] == [
        (404, "INSTANCE_NOT_FOUND"),
        (409, "INSTANCE_ID_ALREADY_EXISTS"),
        (409, "INSTANCE_TERMINAL"),
        (400, "INVALID_INSTANCE_ID"),
    ]
    assert {each.headers["content-type"] for each in answers} == {"application/problem+json"}
    assert answers[0].json()["message"] == (
        "Workflow 'order' has no instance 'o-2'. Check the id, or list the workflow's instances."
    )


def test_an_error_of_the_installation_is_logged_and_not_shown(site: FastAPI, caplog: pytest.LogCaptureFixture) -> None:
    with TestClient(site) as web, caplog.at_level(logging.ERROR, "celery_durable.http"):
        answer = web.get("/broken")
    assert (answer.status_code, answer.json()["message"]) == (500, "The request failed. See the server's log.")
    assert "SchemaOutdated" in caplog.text


def test_the_server_does_not_start_with_a_wrong_setting(durable: Durable, site: FastAPI) -> None:
    durable.app.conf.durable_poll_seconds = -1
    with pytest.raises(ConfigInvalid), TestClient(site):
        raise AssertionError("it has started")


def test_the_durable_is_closed_with_the_server(durable: Durable, site: FastAPI) -> None:
    closed: list[Any] = []
    with TestClient(site) as web:
        web.post("/orders/o-1?params=1")
        pool = durable.engine.pool
        durable.internals.processes.stop_jobs = lambda: closed.append(durable)  # type: ignore[method-assign]
    assert closed == [durable]
    assert durable.engine.pool is not pool  # disposed


@pytest.mark.durable
def test_in_a_test_the_dependency_is_the_durable_of_the_harness(site: FastAPI, durable: Durable) -> None:
    with (
        DurableHarness(workflows=[durable.workflows["order"]]) as harness,
        override_durable(harness.durable),
        TestClient(site) as web,
    ):
        web.post("/orders/o-1?params=42")
        harness.run_until_idle()
        assert durable.workflows["order"].get("o-1").result() == 42
