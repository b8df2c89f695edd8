"""Installations to check with `durable doctor`, and what it finds."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery

from celery_durable import Durable, Step, WorkflowEvent
from celery_durable.doctor import workers
from celery_durable.store import heartbeats
from celery_durable.store.heartbeats import HeartbeatUpdate
from tests.cli.test_refusals import call

Make = Callable[..., Celery]


@pytest.fixture
def make(store_url: str) -> Iterator[Make]:
    made: list[Celery] = []

    def build(broker: str = "memory://", **settings: Any) -> Celery:
        app = Celery("shop", broker=broker, set_as_current=False)
        app.conf.durable_database_url = store_url
        app.conf.control_exchange = f"control-{uuid.uuid4().hex[:8]}"
        app.conf.broker_transport_options = {"polling_interval": 0.01}
        app.conf.update(settings)
        durable = Durable(app)
        made.append(app)

        @durable.workflow(name="order")
        def order(event: WorkflowEvent[Any], step: Step) -> None:
            step.sleep("nap", "1 day")

        return app

    yield build
    for app in made:
        app.durable.close()
        app.close()


def findings(app: Celery, *, wait_seconds: float = 0.02) -> dict[str, list[tuple[str, str, str]]]:
    """Call doctor, which waits so long for the replies of workers. Most tests have none."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers, "_PING_SECONDS", wait_seconds)
        said = call(app, "doctor")
    found: dict[str, list[tuple[str, str, str]]] = {}
    for level, about, sentence, *remedy in (line.split("\t") for line in said.out.splitlines()):
        found.setdefault(about, []).append((level, sentence, *remedy))
    levels = {level for each in found.values() for level, *_ in each}
    assert said.code == (1 if "FAIL" in levels else 0), said
    for each in found.values():
        for level, _, remedy in each:
            assert bool(remedy) is (level != "OK"), each
    return found


def one(app: Celery, about: str) -> tuple[str, str, str]:
    (found,) = findings(app)[about]
    return found


def live(app: Celery, *pulses: HeartbeatUpdate) -> None:
    for pulse in pulses:
        app.durable.internals.store.transact_once(lambda tx, pulse=pulse: heartbeats.upsert(tx, pulse))
