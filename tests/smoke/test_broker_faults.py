"""A broker that hangs, fails over or refuses one queue: what is healthy goes on, with real workers and beats."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import pytest
from kombu import Connection
from kombu.utils.url import parse_url

from celery_durable import CreateOptions
from celery_durable.model import Status
from tests.smoke.fault_proxy import FaultProxy, Mode
from tests.smoke.proc import Proc, until
from tests.smoke.site import POSTGRESQL, Site

pytestmark = [pytest.mark.smoke, pytest.mark.slow, pytest.mark.timeout(300)]

RABBITMQ = pytest.mark.parametrize("broker", ["rabbitmq"], indirect=True)


def completed(site: Site, workflow: str) -> int:
    return len(site.workflow(workflow).list(status=Status.COMPLETE, limit=1000).items)


@RABBITMQ
@POSTGRESQL
def test_a_queue_that_exists_with_other_arguments_holds_up_nobody_else(site: Site, broker_url: str) -> None:
    """406 PRECONDITION_FAILED; before, 1 of 20 healthy instances was complete after 45 s."""
    poison = f"elsewhere-{site.config.name}"
    with Connection(broker_url) as connection:
        connection.channel().queue_declare(poison, durable=True, auto_delete=False, arguments={"x-max-priority": 5})
        try:
            beat = site.beat()
            site.worker()
            refused = site.workflow("elsewhere").create(id="refused")
            batch = [CreateOptions(id=f"s-{number}") for number in range(20)]
            site.instances += site.workflow("sprint").create_batch(batch)
            until("20 healthy instances complete", lambda: completed(site, "sprint") == 20, 20)
            assert refused.status().status is Status.ACTIVE
            said = beat.wait_for_log(f"Queue '{poison}' takes no messages; other queues are not affected.*")
            assert "inequivalent arg 'x-max-priority'" in said
        finally:
            connection.channel().queue_delete(poison)
            connection.channel().exchange_delete(poison)


@pytest.fixture
def site(make_site: Callable[..., Site], broker_url: str, store_url: str) -> Site:
    """Beat's thread alone finds due work: the task `sweep` would find it over the connections of a worker."""
    sweep = "celery_durable.sweep"
    return make_site(broker_url, store_url, beat_schedule={sweep: {"task": sweep, "schedule": 3600.0}})


@pytest.fixture
def proxy(broker_url: str) -> Iterator[FaultProxy]:
    parts = parse_url(broker_url)
    proxy = FaultProxy((parts["hostname"], parts["port"]))
    yield proxy
    proxy.close()


def beat_behind(site: Site, proxy: FaultProxy, url: str) -> Proc:
    """A beat alone has the proxy between itself and the broker."""
    port = parse_url(url)["port"]
    config = site.config
    site.config = dataclasses.replace(config, broker_url=url.replace(f":{port}", f":{proxy.port}"))
    try:
        return site.beat()
    finally:
        site.config = config


@POSTGRESQL
def test_timers_are_back_within_10_s_of_a_fail_over(site: Site, broker_url: str, proxy: FaultProxy) -> None:
    """The old connections of beat hang for good; before, its timers were 89 s late and counting."""
    site.worker()
    beat = beat_behind(site, proxy, broker_url)
    site.create("nap", 0.2)
    until("a first timer", lambda: completed(site, "nap") == 1, 30)
    for _ in range(20):
        site.create("nap", 1)
    proxy.set(Mode.STALL_OLD)
    until("timers after the fail-over", lambda: completed(site, "nap") == 21, 15)
    assert beat.is_running
    site.finish()


@POSTGRESQL
@pytest.mark.parametrize("mode", [Mode.HANG, Mode.REFUSE, Mode.BLACKHOLE])
def test_beat_goes_on_when_its_broker_answers_again(site: Site, broker_url: str, proxy: FaultProxy, mode: Mode) -> None:
    site.worker()
    beat = beat_behind(site, proxy, broker_url)
    site.create("nap", 0.2)
    until("a first timer", lambda: completed(site, "nap") == 1, 30)
    proxy.set(mode)
    for _ in range(20):
        site.create("nap", 1)
    beat.wait_for_log("The broker .* takes no messages; due work is published when it takes messages again", 20)
    assert completed(site, "nap") == 1
    proxy.set(Mode.PASS)
    until("timers when the broker answers again", lambda: completed(site, "nap") == 21, 15)
    site.finish()
