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


def _freeze_the_child(site: Site, worker: Proc, instance: WorkflowInstance[Any], child: int) -> None:
    _freeze(site, instance, child)


def _freeze_the_worker(site: Site, worker: Proc, instance: WorkflowInstance[Any], child: int) -> None:
    site.worker()
    _freeze(site, instance, worker.pid, *worker.children())


def _freeze(site: Site, instance: WorkflowInstance[Any], *pids: int) -> None:
    """Freeze processes longer than the lease. Then their body ends, while the run has ended without it."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    until("its end elsewhere", lambda: instance.status().status.is_terminal)
    site.let_go()
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    site.procs[1].wait_for_log("superseded: the instance was taken over, restarted or ended meanwhile")


def _exceed_the_hard_limit(site: Site, worker: Proc, instance: WorkflowInstance[Any], child: int) -> None:
    worker.wait_for_log("Hard time limit")


DIED, STOPPED = "the worker of attempt 2 died or lost its lease", "attempt 2 was interrupted: its worker stopped"
STOPS: dict[Callable[..., None], set[str]] = {
    _kill_the_child: {DIED},
    _kill_the_worker: {DIED},
    _freeze_the_child: {DIED},
    _freeze_the_worker: {DIED},
    _term_the_child: {STOPPED},
    _revoke: {STOPPED},
    _quit: {STOPPED},
    _exceed_the_hard_limit: {STOPPED, DIED},  # SIGTERM, and a tenth of a second later SIGKILL
}


@pytest.mark.parametrize("where", ["alone", "beside others"])
@pytest.mark.parametrize("stop", STOPS)
def test_a_step_whose_end_is_unknown_is_not_called_again_if_it_says_so(
    site_with: Callable[..., Site], stop: Callable[..., None], where: str
) -> None:
    site = site_with(durable_lease_seconds=2.0, worker_enable_remote_control=True)
    if stop is _exceed_the_hard_limit:
        site.project = "tests.smoke.limited"
    site.beat(wait=False)
    worker = site.worker()
    instance = site.create("once", where)
    stop(site, worker, instance, site.wait_for_body(instance, "pay", attempt=2))
    if not worker.is_running:
        site.worker()
    until("its end", lambda: instance.status().status.is_terminal)
    error = instance.status().error
    assert error is not None
    assert error.name == "OutcomeUnknown"
    what, _, _ = error.message.partition(", so")
    assert what in STOPS[stop]
    (step,) = [step for step in instance.history().steps if step.error is not None]
    assert (step.name, step.attempts, step.error) == ("pay", 2, error)
    called = [("pay", 1), ("pay", 2)]
    assert site.bodies(instance) == called
    site.let_go()
    instance.retry()
    assert instance.result("20 seconds") == 2
    assert site.bodies(instance) == called * 2


def test_a_soft_time_limit_is_no_attempt(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.beat(wait=False)
    with monkeypatch.context() as quiet:
        quiet.setattr(site.durable.internals.dispatch_publisher, "publish", lambda due_runs: None)
        instance = site.create("chain", {"steps": 2, "hold": 1})
    options: Any = {"queue": site.durable.internals.settings.queue, "soft_time_limit": 2}
    site.app.tasks[ADVANCE].apply_async(args=("chain", instance.id, 1), **options)
    site.worker()
    _wait_for_a_second_body(site, instance)
    assert site.bodies(instance)[1:] == [("plain 1", 1), ("plain 1", 1)]


def test_a_hard_time_limit_stops_the_pass_or_is_a_crash(site_with: Callable[..., Site]) -> None:
    """Celery sends SIGTERM, and SIGKILL a tenth of a second later."""
    site = site_with(durable_lease_seconds=2.0)
    site.project = "tests.smoke.limited"
    site.beat(wait=False)
    worker = site.worker()
    instance = site.create("chain", {"steps": 2, "hold": 1})
    worker.wait_for_log("Hard time limit")
    _wait_for_a_second_body(site, instance)
    assert site.bodies(instance)[1:] in ([("plain 1", 1), ("plain 1", 1)], [("plain 1", 1), ("plain 1", 2)])


def _wait_for_a_second_body(site: Site, instance: WorkflowInstance[Any]) -> None:
    """Wait until a stopped body of the second step has begun anew, and let it end."""
    until("another body", lambda: len(site.bodies(instance)) == 3)
    site.let_go()
    assert instance.result("20 seconds") == [0, 1]
