"""A shop behind its HTTP API: the real ASGI app over a real database, on a clock that a test moves."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import fields
from typing import Any, cast

import pytest
from celery import Celery
from fastapi import FastAPI
from pydantic import BaseModel, Field
from starlette.testclient import TestClient

from celery_durable import Durable, NonRetryableError, Step, WorkflowEvent
from celery_durable.http import Authorize, asgi, timeouts
from tests.conftest import MovableRuntime
from tests.http.served import Served
from tests.support.databases import on_databases


@pytest.fixture(autouse=True)
def time_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the time limits of a response, which a busy machine may exceed. The tests of these limits set their own."""
    monkeypatch.setattr(timeouts, "_DATABASE_SECONDS", 60.0)
    monkeypatch.setattr(timeouts, "_ANSWER_SECONDS", 65.0)


class OrderIn(BaseModel):
    order_id: str
    cents: int = Field(500, gt=0)


class Amount(BaseModel):
    cents: int = Field(gt=0)


class Shop:
    """An app with a few workflows; `work` is a worker that comes by."""

    def __init__(self, url: str, **settings: Any) -> None:
        self.app = Celery("shop", broker="memory://", set_as_current=False)
        self.app.conf.update(durable_database_url=url, **settings)
        self.clock = MovableRuntime()
        self.durable = Durable(self.app, runtime=self.clock)
        self.ran: list[str] = []
        self._add_workflows()

    def _add_workflows(self) -> None:
        @self.durable.workflow(name="order")
        def order(event: WorkflowEvent[OrderIn], step: Step) -> str:
            step.log.info("order received", cents=event.payload.cents, category="payments")
            step.do("charge", lambda: {"cents": event.payload.cents, "card": "4242"})
            answer = step.wait_for_event("await approval", "approval", timeout="24 hours")
            step.log.warning("decided", by=answer.payload)
            step.do("ship", self.ran.append, event.instance_id)
            return "shipped"

        @self.durable.workflow(name="refund")
        def refund(event: WorkflowEvent[None], step: Step) -> int:
            return step.wait_for_event("amount", "amount", schema=Amount).payload.cents

        @self.durable.workflow(name="echo")
        def echo(event: WorkflowEvent[Any], step: Step) -> Any:
            return event.payload

        @self.durable.workflow(name="bad")
        def bad(event: WorkflowEvent[None], step: Step) -> None:
            step.do("print", self._jam)

        @self.durable.workflow(name="count")
        def count(event: WorkflowEvent[int], step: Step) -> int:
            for number in range(event.payload or 0):
                said = f"line {number}"
                step.log.debug(said)
                step.do(f"step {number}", self.ran.append, f"{event.instance_id} {number}")
            return len(self.ran)

    @staticmethod
    def _jam() -> None:
        raise NonRetryableError("paper jam in tray 7", name="NoPaper")

    def work(self) -> int:
        return self.durable.tick(max_instances=100)

    def client(self, **options: Any) -> TestClient:
        """A client. Without options everybody may do everything, the tick included."""
        _served.durable = self.durable
        if not options:
            return TestClient(_shared_api())
        if options.keys() <= {"authorize", "tick"} and options.get("tick", True):
            hooks = options["authorize"]
            hooks = hooks if isinstance(hooks, Authorize) else Authorize(hooks)
            for each in fields(hooks):  # it is frozen for applications
                object.__setattr__(_current, each.name, getattr(hooks, each.name))
            return TestClient(_shared_guarded_api())
        return TestClient(asgi(self.durable, **options))

    def close(self) -> None:
        self.durable.close()
        self.app.close()


_served, _current = Served(), Authorize(lambda _: True)


@functools.cache
def _shared_api() -> FastAPI:
    """One application for most tests."""
    return asgi(cast(Durable, _served), allow_anonymous=True, tick=True)


@functools.cache
def _shared_guarded_api() -> FastAPI:
    """One application for the tests of hooks."""
    return asgi(cast(Durable, _served), authorize=_current, tick=True)


database = on_databases("sqlite")


@pytest.fixture
def shop(store_url: str) -> Iterator[Shop]:
    shop = Shop(store_url)
    yield shop
    shop.close()


@pytest.fixture
def api(shop: Shop) -> TestClient:
    return shop.client()


@pytest.fixture
def order(shop: Shop, api: TestClient) -> str:
    """The path of an order that waits for its approval."""
    made = api.post("/workflows/order/instances", json={"id": "o-1", "params": {"order_id": "42", "cents": 1999}})
    assert made.status_code == 201
    shop.work()
    return "/workflows/order/instances/o-1"
