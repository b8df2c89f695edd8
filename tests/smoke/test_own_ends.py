"""LAW 9 in real workers: what a body raises itself is a failed attempt, what is done to its process is none."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from celery_durable import WorkflowInstance
from celery_durable.model import Status
from celery_durable.tasks import ADVANCE
from tests.smoke.proc import Proc, until
from tests.smoke.site import REDIS_AND_POSTGRESQL, Site

pytestmark = [
    pytest.mark.smoke,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    REDIS_AND_POSTGRESQL,
]
OWN = {
    "exit": "SystemExit: 2",
    "cancelled": "CancelledError: ",
    "ctrl-c": "KeyboardInterrupt: ",
    "generator": "GeneratorExit: ",
    "soft limit": "SoftTimeLimitExceeded: SoftTimeLimitExceeded()",
}


@pytest.fixture
def site(make_site: Callable[..., Site], broker_url: str, store_url: str) -> Site:
    return make_site(broker_url, store_url, worker_enable_remote_control=True, durable_pass_seconds=3600)


@pytest.mark.parametrize("pool", ["prefork", "threads", "solo"])
def test_what_a_body_raises_itself_is_a_failed_attempt_and_ends_no_process(site: Site, pool: str) -> None:
    site.beat(wait=False)
    worker = site.worker(f"--pool={pool}")
    children = worker.children()
    created = {
        (way, where): site.create("leave", {"way": way, "where": where})
        for way in OWN
        for where in ("body", "branch", "function")
    }
    for (way, where), instance in created.items():
        until(f"the end of {way} in a {where}", lambda each=instance: each.status().status.is_terminal)
        error = instance.status().error
        assert error is not None
        assert f"{error.name}: {error.message}" == OWN[way]
        steps = [attempt for _, attempt in site.bodies(instance)]
        assert steps == ([] if where == "function" else [1, 2])
    assert (worker.children(), worker.is_running) == (children, True)
    assert {row["crash_count"] for row in site.rows()} == {0}


def _term_the_child(site: Site, worker: Proc, instance: WorkflowInstance[Any], child: int) -> None:
    os.kill(child, signal.SIGTERM)


def _revoke(site: Site, worker: Proc, instance: WorkflowInstance[Any], child: int) -> None:
    (row,) = site.rows()
    site.app.control.revoke(row["claim_task_id"], terminate=True)


def _quit(site: Site, worker: Proc, instance: WorkflowInstance[Any], child: int) -> None:
    os.kill(worker.pid, signal.SIGQUIT)
    worker.process.wait(60)


def _ctrl_c_twice(site: Site, worker: Proc, instance: WorkflowInstance[Any], child: int) -> None:
    os.killpg(worker.pid, signal.SIGINT)
    worker.wait_for_log("Warm shutdown")
    os.killpg(worker.pid, signal.SIGINT)
    worker.process.wait(60)


@pytest.mark.parametrize("stop", [_term_the_child, _revoke, _quit, _ctrl_c_twice])
def test_what_is_done_to_a_pool_process_is_no_attempt(site: Site, stop: Callable[..., None]) -> None:
    site.beat(wait=False)
    worker = site.worker()
    instance = site.create("chain", {"steps": 2, "hold": 1})
    stop(site, worker, instance, site.wait_for_body(instance, "plain 1"))
    site.let_go()
    if not worker.is_running:
        site.worker()
    until("its end", lambda: instance.status().status.is_terminal)
    assert instance.status().status is Status.COMPLETE
    assert set(site.bodies(instance)) == {("book 0", 1), ("plain 1", 1)}
    assert {row["crash_count"] for row in site.rows()} == {0}
    site.check(reruns=1)


def _kill_the_child(site: Site, worker: Proc, instance: WorkflowInstance[Any], child: int) -> None:
    os.kill(child, signal.SIGKILL)


def _kill_the_worker(site: Site, worker: Proc, instance: WorkflowInstance[Any], child: int) -> None:
    os.killpg(worker.pid, signal.SIGKILL)
    worker.process.wait(60)


@pytest.mark.parametrize("where", ["alone", "beside others"])
@pytest.mark.parametrize("stop", [_kill_the_child, _kill_the_worker, _term_the_child, _quit])
def test_a_step_whose_end_is_unknown_is_not_called_again_if_it_says_so(
    site: Site, stop: Callable[..., None], where: str
) -> None:
    site.beat(wait=False)
    worker = site.worker()
    instance = site.create("once", where)
    stop(site, worker, instance, site.wait_for_body(instance, "pay"))
    if not worker.is_running:
        site.worker()
    until("its end", lambda: instance.status().status.is_terminal)
    error = instance.status().error
    assert error is not None
    assert error.name == "OutcomeUnknown"
    assert site.bodies(instance) == [("pay", 1)]
    site.let_go()
    instance.retry()
    assert instance.result("20 seconds") == 1
    assert site.bodies(instance) == [("pay", 1), ("pay", 1)]


@pytest.mark.parametrize(("limit", "attempts"), [("soft_time_limit", [1, 1]), ("time_limit", [1, 2])])
def test_a_soft_time_limit_is_no_attempt_and_a_hard_one_is_a_crash(
    site: Site, limit: str, attempts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    site.beat(wait=False)
    with monkeypatch.context() as quiet:
        quiet.setattr(site.durable.internals.dispatch_publisher, "publish", lambda due_runs: None)
        instance = site.create("chain", {"steps": 2, "hold": 1})
    options: Any = {"queue": site.durable.internals.settings.queue, limit: 2}
    site.app.tasks[ADVANCE].apply_async(args=("chain", instance.id, 1), **options)
    site.worker()
    site.wait_for_body(instance, "plain 1")
    until("another body", lambda: len(site.bodies(instance)) == 3)
    site.let_go()
    until("its end", lambda: instance.status().status.is_terminal)
    assert [attempt for step, attempt in site.bodies(instance) if step == "plain 1"] == attempts
