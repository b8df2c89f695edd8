"""The task `celery_durable.sweep` where no dispatcher lives: each look may be another process's first."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from celery import Celery

from celery_durable import Durable, Step, WorkflowEvent
from celery_durable.model import duration_us
from celery_durable.store import heartbeats
from celery_durable.store.heartbeats import HeartbeatUpdate
from celery_durable.tasks import SWEEP
from tests.support.celery_apps import MakeApp
from tests.support.embedded import messages


@pytest.fixture
def app(make_app: MakeApp) -> Celery:
    return make_app(durable_dispatcher="none")


@pytest.fixture
def durable(app: Celery) -> Durable:
    """One instance is due, its message was sent ten seconds ago, and is gone."""
    durable = Durable(app)

    @durable.workflow
    def order(event: WorkflowEvent[Any], step: Step) -> None:
        """Never run here."""

    order.create(id="o-1")
    assert len(messages(app)) == 1
    i = durable.internals.store.tables.instance
    with durable.internals.store.engine.begin() as connection:
        connection.execute(sa.update(i).values(sent_at=i.c.sent_at - duration_us(timedelta(seconds=10))))
    return durable


def sweep(app: Celery) -> str:
    return str(app.tasks[SWEEP].apply().get(disable_sync_subtasks=False))  # this is no task


def test_it_sends_a_lost_hint_again_at_its_first_look(app: Celery, durable: Durable) -> None:
    assert sweep(app) == "1 published"
    assert len(messages(app)) == 1
    assert sweep(app) == "0 published"  # the new one is given its time


def test_its_own_heartbeat_is_no_dispatcher(app: Celery, durable: Durable) -> None:
    durable.internals.sweep_task_heartbeat.write_if_due("w@here")
    assert sweep(app) == "1 published"


def test_a_dispatcher_that_is_gone_counts_no_more(app: Celery, durable: Durable) -> None:
    long_ago = HeartbeatUpdate("d-1", "dispatcher", "beat@here", 1, swept_ago=timedelta(minutes=5))
    durable.internals.store.transact_once(lambda tx: heartbeats.upsert(tx, long_ago))
    assert sweep(app) == "1 published"


def test_beside_a_dispatcher_it_leaves_to_it_what_a_worker_may_hold(app: Celery, durable: Durable) -> None:
    """It looks again soon, and so can tell a hint that is lost from one that a worker took this moment."""
    lives = HeartbeatUpdate("d-1", "dispatcher", "beat@here", 1, swept_ago=timedelta(0))
    durable.internals.store.transact_once(lambda tx: heartbeats.upsert(tx, lives))
    assert sweep(app) == "0 published"


@pytest.mark.parametrize("is_enabled", [True, False])
def test_while_execution_is_off_it_does_not_search_for_lost_tasks(make_app: MakeApp, is_enabled: bool) -> None:
    """A search that finds a dead worker reports and forgets what it held."""
    app = make_app(durable_dispatcher="none", durable_execution_enabled=is_enabled)
    store = Durable(app).internals.store
    long_ago = duration_us(timedelta(minutes=1))
    silent = {"seen_at": store.clock() - long_ago, "silent_at": store.clock() - long_ago, "held_tasks": "[]"}
    store.transact_once(lambda tx: heartbeats.upsert(tx, HeartbeatUpdate("w-1", "worker", "w@here", 1)))
    store.transact_once(lambda tx: tx.execute(sa.update(store.tables.heartbeat).values(silent)))
    sweep(app)
    _, (worker,) = store.read(heartbeats.read_workers)
    assert worker.has_list is not is_enabled
