"""What the bootstep does in the main loop of a worker."""

from __future__ import annotations

from types import SimpleNamespace

from celery import Celery
from celery.worker import state
from celery.worker.request import Request

from celery_durable import Durable
from celery_durable.tasks.worker import check_for_dead_processes
from tests.support.embedded import messages


def test_a_worker_checks_its_pool_when_a_process_has_died_in_a_pass(app: Celery, durable: Durable) -> None:
    """Monitors show a pass under another name than that of its task."""
    durable.workflow(name="order")(lambda event, step: None).create(id="o-1")
    (message,) = messages(app)
    request = Request(message, app=app)
    checks: list[bool] = []
    processes = [SimpleNamespace(pid=1, exitcode=None), SimpleNamespace(pid=2, exitcode=-9)]
    pool = SimpleNamespace(_pool=SimpleNamespace(_pool=processes), maintain_pool=lambda: checks.append(True))
    state.active_requests.clear()  # other tests may have left some
    try:
        request.on_accepted(pid=1, time_accepted=0.0)
        check_for_dead_processes(pool)
        assert checks == []
        request.on_accepted(pid=2, time_accepted=0.0)
        check_for_dead_processes(pool)
        assert checks == [True]
    finally:
        state.task_ready(request)
