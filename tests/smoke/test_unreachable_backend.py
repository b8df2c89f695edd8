"""A result backend that real workers cannot reach: the steps of the tasks have their answers all the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kombu.utils.url import parse_url

from tests.smoke.fault_proxy import FaultProxy, Mode
from tests.smoke.proc import until
from tests.smoke.site import REDIS_AND_POSTGRESQL, Site
from tests.smoke.test_ends import EndsSite, answers_in, differences
from tests.support.services import BROKERS

pytestmark = [pytest.mark.smoke, pytest.mark.timeout(200)]

# How long Celery itself waits for its backend, before it calls an errback, is the application's choice.
IMPATIENT = {
    "redis_socket_timeout": 1.0,
    "redis_socket_connect_timeout": 1.0,
    "result_backend_transport_options": {
        "retry_policy": {"max_retries": 1, "interval_start": 0, "interval_step": 0.1, "interval_max": 0.1}
    },
}
WANTED: dict[str, Any] = {
    "returns": 42,
    "returns late": 42,
    "raises": ["LookupError", "no 21"],
    "raises from another": ["LookupError", "no 21"],
    "retries itself": 42,
}


@pytest.fixture
def backend_url(request: pytest.FixtureRequest) -> Iterator[str]:
    parts = parse_url(BROKERS["redis"])
    proxy = FaultProxy((parts["hostname"], parts["port"]))
    proxy.set(request.param)
    yield f"redis://127.0.0.1:{proxy.port}/0"
    proxy.close()


@pytest.mark.slow
@REDIS_AND_POSTGRESQL
@pytest.mark.parametrize(
    ("backend_url", "pool"),
    [
        pytest.param(Mode.HANG, "prefork", marks=pytest.mark.gate),
        (Mode.HANG, "threads"),
        (Mode.REFUSE, "prefork"),
        (Mode.REFUSE, "threads"),
    ],
    indirect=["backend_url"],
)
def test_steps_have_their_answers_while_the_result_backend_is_away(
    site_with: Callable[..., Site], backend_url: str, pool: str
) -> None:
    settings = {"durable_dispatcher": "worker", "result_backend": backend_url, **IMPATIENT}
    site = site_with(kind=EndsSite, **settings)
    assert isinstance(site, EndsSite)
    worker = site.worker_of("ours", pool, "durable", "ends")
    instance = site.create("ends", [*WANTED])
    try:
        until("the end", lambda: instance.status().status.is_terminal, 60)
    except AssertionError:
        pytest.fail(site.logs())
    assert differences(instance.result("1 second"), WANTED) == {}
    assert answers_in(worker) == []
    site.finish()
