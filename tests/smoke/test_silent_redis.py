"""Redis connections that go silent for good, as after a fail-over: what becomes of a worker, and of what it holds.

kombu acknowledges in Celery's main loop, and without `socket_timeout` it waits there for ever. So it does without us:
of 60 tasks of plain Celery 28 were done; with the options of docs/how-to/outages.md all were, after 12 s.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kombu.utils.url import parse_url

from celery_durable import WorkflowInstance
from tests.smoke.fault_proxy import FaultProxy, Mode
from tests.smoke.proc import Proc
from tests.smoke.site import REDIS_AND_POSTGRESQL, Site
from tests.smoke.test_lost import ALL_DONE_SECONDS, SLACK, wait_for_notes

pytestmark = [
    pytest.mark.smoke,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    REDIS_AND_POSTGRESQL,
]
COUNT = 60


@pytest.fixture
def proxy(broker_url: str) -> Iterator[FaultProxy]:
    parts = parse_url(broker_url)
    proxy = FaultProxy((parts["hostname"], parts["port"]))
    yield proxy
    proxy.close()


@pytest.fixture
def fail_over(
    make_site: Callable[..., Site], broker_url: str, store_url: str, site_name: str, proxy: FaultProxy
) -> Callable[..., tuple[Site, Proc, WorkflowInstance[Any]]]:
    """Starts a map on a worker behind the proxy, and has the worker's connections go silent in the midst of it."""

    def begin(**options: Any) -> tuple[Site, Proc, WorkflowInstance[Any]]:
        transport = {"global_keyprefix": f"{site_name}:", **options}
        site = make_site(broker_url, store_url, worker_prefetch_multiplier=4, broker_transport_options=transport)
        site.beat()
        direct, port = site.config, parse_url(broker_url)["port"]
        site.config = dataclasses.replace(direct, broker_url=broker_url.replace(f":{port}", f":{proxy.port}"))
        worker = site.worker()
        site.config = direct
        instance = site.create("notes", {"task": "media.note", "seconds": 0.1, "count": COUNT})
        wait_for_notes(site, 10)
        proxy.set(Mode.STALL_OLD)
        return site, worker, instance

    return begin


def test_what_a_worker_holds_that_stands_still_goes_to_another_and_its_log_says_where_it_stands(
    fail_over: Callable[..., tuple[Site, Proc, WorkflowInstance[Any]]],
) -> None:
    site, stuck, instance = fail_over()
    site.worker()
    assert instance.result(SLACK * ALL_DONE_SECONDS) == list(range(COUNT))
    stuck.wait_for_log(r"The main loop of this worker has been stuck for \d+ s: [^\0]*redis.py\", line \d+, in ack")


def test_with_a_bound_a_worker_connects_anew_and_goes_on(
    fail_over: Callable[..., tuple[Site, Proc, WorkflowInstance[Any]]],
) -> None:
    _, worker, instance = fail_over(socket_timeout=2, socket_connect_timeout=2, health_check_interval=2)
    assert instance.result(SLACK * ALL_DONE_SECONDS) == list(range(COUNT))
    assert worker.is_running
