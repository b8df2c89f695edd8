"""Steps that others do, over real brokers: tasks of this application and of a foreign one, tasks that die, children."""

from __future__ import annotations

import pytest

from tests.smoke.site import RABBITMQ_IN_GATE, Site

pytestmark = [pytest.mark.smoke, pytest.mark.timeout(300)]


@RABBITMQ_IN_GATE
def test_whichever_worker_runs_a_task_its_step_gets_the_result_or_the_error(site: Site) -> None:
    site.beat(wait=False)
    site.foreign()
    worker = site.worker()
    abroad = f"foreign-{site.config.name}"
    tasks = {"double": None, "fail": None, "die": None, "abroad": abroad, "broken": abroad}
    instance = site.create("errands", {"tasks": tasks})
    got, kids = instance.result("60 seconds")
    (task,) = [step.task_id for step in instance.history().steps if step.name == "broken"]
    assert got["double"] == 42
    assert got["fail"] == ["KeyError", "21"]
    assert got["die"] == ["TaskLost", "Celery task 'media.die' was lost 3 times: the process that ran it died"]
    assert got["abroad"] == {"abroad": 21}
    assert got["broken"] == [
        "TaskFailed", f"Celery task {task} failed; its worker, which does not import celery_durable, has logged why",
    ]  # fmt: skip
    assert got["many"] == [number * 2 for number in range(12)]
    assert kids == [0, 1]
    assert worker.text().count("Errback") == 0
    site.finish()
