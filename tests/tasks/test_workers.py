"""Workflows run on workers of this process: threads and solo pools, several apps, pools that are refused."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import sqlalchemy as sa
from celery import Celery
from celery.concurrency.solo import TaskPool as SoloPool
from celery.concurrency.thread import TaskPool as ThreadsPool

from celery_durable import Durable, Retries, Step, StepConfig, StepTx, WorkflowEvent
from celery_durable.insight.explain import Code
from celery_durable.runner.group_commit import GroupCommit
from celery_durable.tasks import ADVANCE
from tests.support.celery_apps import MakeApp
from tests.support.databases import on_databases
from tests.support.embedded import messages, until, worker

database = on_databases("sqlite", "postgresql", "mariadb")


@pytest.mark.parametrize("pool", [ThreadsPool, SoloPool], ids=["threads", "solo"])
def test_a_workflow_completes(durable: Durable, app: Celery, pool: type) -> None:
    ran: list[str] = []

    def flaky(tx: StepTx) -> int:
        ran.append("flaky")
        if tx.attempt == 1:
            raise OSError("not yet")
        return tx.attempt

    @durable.workflow
    def order(event: WorkflowEvent[int], step: Step) -> list[int]:
        first = step.do("double", lambda: event.payload * 2)
        step.sleep("rest", 0.05)
        attempts = step.do("flaky", StepConfig(retries=Retries(limit=2, delay=0.05)), flaky)
        answer = step.wait_for_event("answer", "answer", timeout="1 minute").payload
        a, b = step.submit("a", lambda: 1), step.submit("b", lambda: 2)
        return [first, attempts, answer, *step.gather(a, b)]

    with worker(app, pool=pool, concurrency=2 if pool is ThreadsPool else 1):
        instance = order.create(21)
        instance.send_event("answer", 7)
        assert instance.result("20 seconds") == [42, 2, 7, 1, 2]
    assert ran == ["flaky", "flaky"]


@pytest.mark.parametrize("pool", [ThreadsPool, SoloPool], ids=["threads", "solo"])
def test_runs_commit_together_on_a_threads_pool_alone(
    durable: Durable, app: Celery, pool: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    grouped: list[str] = []
    commit = GroupCommit.commit
    monkeypatch.setattr(
        GroupCommit, "commit", lambda self, step, alone: grouped.append(step.write.name) or commit(self, step, alone)
    )

    @durable.workflow
    def order(event: WorkflowEvent[None], step: Step) -> int:
        return step.do("charge", lambda: 5)

    with worker(app, pool=pool, concurrency=2 if pool is ThreadsPool else 1):
        assert order.create().result("20 seconds") == 5
    assert grouped == (["charge"] if pool is ThreadsPool else [])


def test_many_instances_run_side_by_side(durable: Durable, app: Celery) -> None:
    together = threading.Barrier(4, timeout=20)

    @durable.workflow
    def meet(event: WorkflowEvent[Any], step: Step) -> None:
        step.do("meet", lambda: together.wait() and None)

    with worker(app, concurrency=4):
        instances = [meet.create() for _ in range(4)]
        for instance in instances:
            instance.result("20 seconds")


class OwnPool(SoloPool):
    """Somebody's own pool, whatever it derives from."""


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_a_worker_on_another_pool_does_its_own_tasks_and_leaves_workflows_alone(
    durable: Durable, app: Celery, caplog: pytest.LogCaptureFixture
) -> None:
    done = threading.Event()

    @app.task(name="mine", shared=False)
    def mine() -> None:
        done.set()

    @durable.workflow
    def order(event: WorkflowEvent[Any], step: Step) -> str:
        return "done"

    with caplog.at_level("INFO"), worker(app, pool=OwnPool, concurrency=1):
        instance = order.create()
        app.tasks["mine"].delay()
        assert done.wait(20)
    assert instance.status().status == "active"
    assert (
        "This worker's pool, 'tests.tasks.test_workers.OwnPool', runs no workflows: it does not consume queue "
        f"{app.conf.durable_queue!r}. Run workflows on a worker with -P prefork, threads or solo."
    ) in caplog.text
    assert [message.headers["task"] for message in messages(app)] == [ADVANCE]


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_a_workflow_on_the_own_queue_of_a_worker_on_another_pool_is_left_for_others(
    make_app: MakeApp, caplog: pytest.LogCaptureFixture
) -> None:
    app = make_app(durable_unknown_workflow_seconds=0.05, durable_dispatcher="worker")
    durable = Durable(app)

    @durable.workflow(queue=app.conf.task_default_queue)
    def order(event: WorkflowEvent[Any], step: Step) -> str:
        return "done"

    with worker(app, pool=OwnPool, concurrency=1):
        instance = order.create()
        until(lambda: "runs no workflows; instance" in caplog.text)
        until(lambda: instance.explain().code is Code.POOL_UNSUPPORTED)
    assert (
        f"This worker's pool, 'tests.tasks.test_workers.OwnPool', runs no workflows; instance {instance.id} is left "
        "for a worker with another pool. Give workflow 'order' a queue that workers with -P prefork, threads or solo "
        "consume."
    ) in caplog.text
    with worker(app):
        assert instance.result("20 seconds") == "done"


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_two_apps_in_one_process_keep_apart(make_app: MakeApp) -> None:
    """One store, two queues, and a workflow each that the other does not know."""
    apps = [make_app(), make_app()]
    instances = []
    for number, app in enumerate(apps):
        durable = Durable(app)

        @durable.workflow(name=f"which-{number}")
        def which(event: WorkflowEvent[Any], step: Step, number: int = number) -> int:
            step.sleep("nap", 0.01)
            return step.do("which", lambda: number)

        assert [f"which-{n}" in durable.workflows for n in range(2)] == [n == number for n in range(2)]
        assert durable.workflows.get(f"which-{1 - number}") is None
        instances.append(which.create())
    # One after the other: in one process Celery runs one app's worker at a time.
    for app, instance in reversed(list(zip(apps, instances, strict=True))):
        with worker(app):
            assert instance.result("20 seconds") == apps.index(app)


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_a_worker_that_does_not_know_the_workflow_leaves_it_for_one_that_does(
    make_app: MakeApp, caplog: pytest.LogCaptureFixture
) -> None:
    old = make_app(durable_unknown_workflow_seconds=0.05)
    new = make_app(durable_queue=old.conf.durable_queue, durable_unknown_workflow_seconds=0.05)
    Durable(old)
    durable = Durable(new)

    @durable.workflow
    def fresh(event: WorkflowEvent[Any], step: Step) -> str:
        return "done"

    instance = fresh.create()
    with worker(old, pool="solo", concurrency=1):
        until(lambda: told(caplog) > 1)  # again and again, as the dispatcher offers it
    assert instance.status().status == "active"
    with worker(new):
        assert instance.result("20 seconds") == "done"


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_a_worker_that_stops_hands_its_runs_on(durable: Durable, app: Celery) -> None:
    """However it is told: a remote `shutdown` raises no signal."""
    has_started, go_on = threading.Event(), threading.Event()

    @durable.workflow
    def two(event: WorkflowEvent[Any], step: Step) -> int:
        step.do("first", lambda: has_started.set() or go_on.wait(20))
        return step.do("second", lambda: 2)

    instance = two.create()

    def let_go() -> None:
        until(durable.internals.stop_flag.is_set)
        go_on.set()

    with worker(app):
        assert has_started.wait(20)
        threading.Thread(target=let_go).start()
    until(lambda: instance.history().steps)
    until(lambda: _claim(durable) is None)
    assert [step.name for step in instance.history().steps] == ["first"]
    assert instance.status().status == "active"
    with worker(app):
        assert instance.result("20 seconds") == 2


def _claim(durable: Durable) -> Any:
    with durable.internals.store.engine.connect() as connection:
        return connection.execute(sa.select(durable.internals.store.tables.instance.c.claim_token)).scalar()


def told(caplog: pytest.LogCaptureFixture) -> int:
    return caplog.text.count("This worker does not know workflow 'fresh'; instance ")
