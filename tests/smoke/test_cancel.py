"""Functions of a minute in real workers, whose runs are cancelled."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from celery_durable import Status
from tests.smoke.proc import until
from tests.smoke.site import REDIS_AND_POSTGRESQL, Site

pytestmark = [pytest.mark.smoke, pytest.mark.slow, pytest.mark.gate, pytest.mark.timeout(120)]


@REDIS_AND_POSTGRESQL
@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_a_function_ends_when_the_worker_notices_the_cancel(site_with: Callable[..., Site], pool: str) -> None:
    site = site_with(durable_lease_seconds=3.0)
    site.worker("--pool", pool, concurrency=3)
    instances = [site.create("long", how) for how in ("polls", "is interrupted", "is async")]
    for instance in instances:
        site.wait_for_body(instance, "work")
    for instance in instances:
        instance.cancel("sold twice")
    for instance in instances:
        until("the end", lambda: instance.status().status.is_terminal)
        history = instance.history()
        assert (history.status.status, history.reason) == (Status.TERMINATED, "cancelled: sold twice")
        assert [(step.step_key, str(step.status), step.attempts) for step in history.steps] == [
            ("work", "cancelled", 1),
            ("clean up", "completed", 1),
        ]
        assert site.bodies(instance) == [("work", 1), ("clean up", 1)]
