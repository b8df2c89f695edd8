"""The life of an order on pytest-celery's nodes. Everything is done inside the worker's container, as with compose."""

from __future__ import annotations

import pytest
from pytest_celery import CeleryTestSetup, CeleryTestWorker

pytestmark = [pytest.mark.smoke, pytest.mark.timeout(180)]

STEPS = ["record order", "charge card", "ask for approval", "wait for approval", "mark shipped", "tell customer"]


def order(worker: CeleryTestWorker, *words: str) -> list[str]:
    """Call the application's own program; answers with the lines that show the order."""
    code, said = worker.container.exec_run(["python", "-m", "examples.order_approval", *words])
    assert code == 0, said.decode()
    return said.decode().splitlines()


@pytest.mark.gate
def test_an_order_lives_its_whole_life(celery_setup: CeleryTestSetup) -> None:
    worker = celery_setup.worker
    order(worker, "start", "order-1")
    worker.wait_for_log("'waiting until")
    order(worker, "approve", "order-1")
    worker.wait_for_log("'complete'")
    head, *steps = order(worker, "show", "order-1")
    assert head == "order-1: complete shipped"
    assert [line.split("  ")[1].strip() for line in steps] == STEPS
    assert all(line.endswith("completed  attempts 1") for line in steps if "wait for" not in line)
    assert "Traceback" not in worker.logs()


@pytest.mark.slow
def test_an_order_outlives_a_worker_that_is_killed_and_restarted(celery_setup: CeleryTestSetup) -> None:
    worker = celery_setup.worker
    order(worker, "start", "order-1", "--card", "4100")  # the third attempt at charging succeeds
    worker.wait_for_log("durable:order")
    worker.kill()
    assert worker.container.status == "exited"
    worker.restart()
    worker.wait_for_log("'waiting until")
    order(worker, "approve", "order-1")
    worker.wait_for_log("'complete'")
    head, *steps = order(worker, "show", "order-1")
    assert head == "order-1: complete shipped"
    assert [line.split("  ")[1].strip() for line in steps] == STEPS
