"""A database that goes silent: connections stay open and nothing comes back. What waits for it, and for how long."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator

import pytest
import sqlalchemy as sa

from celery_durable.runtime import real_monotonic
from tests.smoke.fault_proxy import FaultProxy, Mode
from tests.smoke.proc import until
from tests.smoke.site import REDIS_AND_POSTGRESQL, Site

pytestmark = [pytest.mark.smoke, pytest.mark.slow, pytest.mark.timeout(400)]

MakeSite = Callable[..., Site]


@pytest.fixture
def proxy(store_url: str) -> Iterator[FaultProxy]:
    url = sa.make_url(store_url)
    assert url.host is not None
    assert url.port is not None
    proxy = FaultProxy((url.host, url.port))
    yield proxy
    proxy.close()


@pytest.fixture
def detoured(make_site: MakeSite, broker_url: str, store_url: str, proxy: FaultProxy) -> Callable[..., Site]:
    """Makes a site whose worker reaches the database through the proxy; bodies and the test reach it directly."""
    url = sa.make_url(store_url).set(host="127.0.0.1", port=proxy.port).render_as_string(hide_password=False)
    return lambda **settings: make_site(broker_url, url, bodies_url=store_url, **settings)


# --- Celery's main loop -------------------------------------------------------------------------


@pytest.mark.parametrize("broker", ["redis"], indirect=True)
def test_foreign_tasks_run_while_a_pool_process_died_and_the_database_hangs(
    detoured: Callable[..., Site], proxy: FaultProxy
) -> None:
    """Handing on what the dead process held is SQL, and so nothing for the loop that serves all tasks."""
    site = detoured()
    site.beat(wait=False)
    worker = site.worker()
    held = site.create("chain", {"steps": 3, "hold": 1})
    child = site.wait_for_body(held, "plain 1")
    proxy.set(Mode.HANG)
    os.kill(child, signal.SIGKILL)
    worker.wait_for_log("exited with 'signal 9|Worker exited prematurely", 20)
    for number in range(5):
        site.app.send_task("media.mark", (number,))
    until("the foreign tasks have run", lambda: len(list(site.folder.glob("mark-*"))) == 5, 10)
    proxy.set(Mode.PASS)
    site.let_go()
    site.finish()
    assert worker.is_running


# --- a dispatcher -------------------------------------------------------------------------------


@pytest.mark.parametrize("broker", ["redis"], indirect=True)
@pytest.mark.parametrize("mode", [Mode.STALL_OLD, Mode.BLACKHOLE])
def test_a_dispatcher_is_at_work_again_soon_after_its_database_went_silent(
    detoured: Callable[..., Site], proxy: FaultProxy, mode: Mode
) -> None:
    """After a fail-over old connections never say anything again; after a lost route they are all silent for a time."""
    site = detoured()
    site.detoured = ("beat",)
    site.worker()
    beat = site.beat()
    first = site.create("nap", 0.1)
    assert first.result("20 seconds") == "rested"
    proxy.set(mode)
    if mode is Mode.BLACKHOLE:
        beat.wait_for_log("cannot check for due work|not answered in time", 20)
        proxy.set(Mode.PASS)
    silent = site.create("nap", 0.1)
    assert silent.result("20 seconds") == "rested"
    site.finish()
    assert beat.is_running


# --- passes that are stuck, and authors who are slow --------------------------------------------


@REDIS_AND_POSTGRESQL
def test_a_stuck_pass_is_taken_over_within_two_leases_beside_its_living_worker(site_with: Callable[..., Site]) -> None:
    site = site_with(durable_lease_seconds=6.0)
    site.beat(wait=False)
    worker = site.worker()
    site.order("child.hang.before-body")
    stuck = site.create("chain", {"steps": 2})
    site.wait_until_done("child.hang.before-body")
    began = real_monotonic()
    assert stuck.result("60 seconds") == [0, 1]
    assert real_monotonic() - began < 2 * 6.0 + 5
    assert "PassStalled: The pass over chain/" in worker.text()
    assert [attempt for _, attempt in site.bodies(stuck)] == [1, 1]  # no worker died
    site.finish()


@REDIS_AND_POSTGRESQL
def test_slow_code_and_slow_writes_of_an_author_are_done_once(site_with: Callable[..., Site]) -> None:
    """Each of them lasts three leases."""
    site = site_with(durable_lease_seconds=2.0)
    site.beat(wait=False)
    worker = site.worker()
    assert site.create("slow", {"code": 6.0, "write": 6.0}).result("60 seconds") == [1, 6.0]
    site.finish()
    assert "PassStalled" not in worker.text()
