"""Servers that forget, stop, crash, or lose a connection in the middle of a commit; dispatchers in every number."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import sqlalchemy as sa

from celery_durable import CreateOptions
from celery_durable.errors import StoreUnavailable
from celery_durable.model import Status
from tests.smoke.proc import MariadbServer, PostgresqlCluster, RedisServer, until
from tests.smoke.proxy import TcpProxy
from tests.smoke.site import POSTGRESQL, REDIS_AND_POSTGRESQL, Site

pytestmark = [pytest.mark.smoke, pytest.mark.slow, pytest.mark.timeout(400)]

MakeSite = Callable[..., Site]


def crowd(site: Site, size: int) -> None:
    """As many more instances of `sprint`, in batches."""
    begin = len(site.instances)
    for first in range(begin, begin + size, 100):
        batch = [CreateOptions(id=f"s-{number}") for number in range(first, min(first + 100, begin + size))]
        site.instances += site.workflow("sprint").create_batch(batch)


def ended(site: Site) -> int:
    try:
        return len(site.workflow("sprint").list(status=Status.COMPLETE, limit=1000).items)
    except StoreUnavailable:  # the database is not quite back
        return 0


# --- the broker ---------------------------------------------------------------------------------


@POSTGRESQL
def test_instances_are_accepted_without_a_broker_and_run_when_it_is_back(
    make_site: MakeSite, own_redis: RedisServer, store_url: str
) -> None:
    site = make_site(own_redis.url, store_url)
    worker, beat = site.worker(wait=False), site.beat()
    worker.wait_for_log(r"ready\.")
    running = site.create("chain", {"steps": 4, "hold": 1})
    site.wait_for_body(running, "plain 1")
    waiting = site.create("lifecycle", 1)
    until("it waits", lambda: waiting.status().status is Status.WAITING)
    own_redis.stop()
    crowd(site, 20)
    assert waiting.send_event("answer", "sent without a broker")
    site.let_go()  # a run that has started needs none
    assert running.result("20 seconds") == [0, 1, 2, 3]
    own_redis.start()
    # The worker has a new connection; it still sees its processes die.
    site.order("child.after-body")
    site.create("chain", {"steps": 2})
    site.wait_until_done("child.after-body")
    site.finish(site.durable.internals.settings.lease_seconds - 5)
    assert worker.is_running
    assert beat.is_running


@POSTGRESQL
def test_a_worker_consumes_again_that_lost_redis_while_it_held_all_messages_it_may_hold(
    make_site: MakeSite, own_redis: RedisServer, store_url: str
) -> None:
    """Celery does not look at its connection then; what cannot be acknowledged keeps its place for good."""
    site = make_site(own_redis.url, store_url)
    site.beat(wait=False)
    worker = site.worker(concurrency=1)
    running = site.create("chain", {"steps": 3, "hold": 1})
    site.wait_for_body(running, "plain 1")
    site.create("chain", {"steps": 1})
    until("the only place is taken", lambda: own_redis.size(f"{site.config.name}:unacked") == 1)
    own_redis.stop()
    site.let_go()
    assert running.result("20 seconds") == [0, 1, 2]
    worker.wait_for_log("Couldn't ack")
    own_redis.start()
    crowd(site, 10)
    site.finish()
    assert "This worker had stopped consuming: Redis had not taken 1 acknowledgement," in worker.text()
    assert "Trying to re-establish the connection" not in worker.text()
    assert worker.is_running


# --- the database -------------------------------------------------------------------------------


@pytest.mark.parametrize("broker", ["redis"], indirect=True)
def test_workers_and_beat_survive_crashes_of_the_database(
    make_site: MakeSite, own_database: PostgresqlCluster | MariadbServer, broker_url: str
) -> None:
    site = make_site(broker_url, own_database.url, durable_lease_seconds=2.0)
    worker, beat = site.worker(wait=False), site.beat()
    worker.wait_for_log(r"ready\.")
    held = site.create("chain", {"steps": 5, "hold": 2})
    site.wait_for_body(held, "book 2")
    for turn in (1, 2):
        crowd(site, 40)
        own_database.restart()
        until("what was created before it goes on", lambda turn=turn: ended(site) == 40 * turn, 60)
    site.let_go()
    site.finish(60, reruns=None)
    assert worker.is_running
    assert beat.is_running


@pytest.mark.parametrize("own_database", ["postgresql"], indirect=True)
def test_a_task_that_ends_while_the_database_is_away_answers_when_it_is_back(
    make_site: MakeSite, own_database: PostgresqlCluster, broker_url: str
) -> None:
    """Nobody but the broker has the answer meanwhile."""
    site = make_site(broker_url, own_database.url)
    site.beat(wait=False)
    worker = site.worker()
    instance = site.create("errands", {"tasks": {"hold": None}})
    until("the task runs", (site.folder / "held").exists)
    own_database.stop()
    site.let_go()
    worker.wait_for_log("This worker cannot commit an answer and sends its message to the broker again")
    own_database.start()
    assert instance.result("60 seconds")[0]["hold"] == 21
    site.finish(reruns=None)


@pytest.fixture
def proxy(store_url: str) -> Iterator[TcpProxy]:
    url = sa.make_url(store_url)
    assert url.host is not None
    assert url.port is not None
    proxy = TcpProxy((url.host, url.port))
    yield proxy
    proxy.close()


CUTS = [("book 0", "cut-before"), ("book 0", "cut-after"), ("plain 1", "cut-before"), ("plain 1", "cut-after")]


@pytest.mark.parametrize("on_lost", ["resend", "fail"])
@pytest.mark.parametrize("broker", ["redis"], indirect=True)
def test_a_commit_whose_connection_is_cut_is_decided_once(
    make_site: MakeSite, broker_url: str, store_url: str, proxy: TcpProxy, on_lost: str
) -> None:
    """Before the server got it: done again. After it: seen to be done. A body runs again only for its session.

    If that body may not be called again, its step fails, because the end of the attempt is unknown.
    """
    through_proxy = sa.make_url(store_url).set(host="127.0.0.1", port=proxy.port).render_as_string(hide_password=False)
    site = make_site(broker_url, through_proxy, bodies_url=store_url, control_port=proxy.control_port)
    site.beat(wait=False)
    worker = site.worker(concurrency=1)
    for number, (step, cut) in enumerate(CUTS):
        instance = site.create("chain", {"steps": 3, "hold": number // 2, "on_lost": on_lost})
        site.wait_for_body(instance, step)
        site.order(f"child.{cut}")
        site.let_go()
        until("its end", lambda instance=instance: instance.status().status.is_terminal, 20)
        assert len(proxy.cuts) == number + 1
        status = instance.status()
        if (step, cut) == ("book 0", "cut-before") and on_lost == "fail":
            assert status.error is not None
            assert status.error.name == "OutcomeUnknown"
            assert status.error.message.startswith("the database lost the transaction of attempt 1 (")
            assert site.bodies(instance) == [(step, 1)]
        else:
            assert status.output == [0, 1, 2], (step, cut)
            again = [(step, 1)] if (step, cut) == ("book 0", "cut-before") else []
            assert sorted(site.bodies(instance)) == sorted([("book 0", 1), ("plain 1", 1), ("book 2", 1), *again])
        site.hold_again()
    assert proxy.cuts == [cut for _, cut in CUTS]
    assert "The outcome of a commit is unknown, looking it up" in worker.text()
    site.check(reruns=1 if on_lost == "resend" else 0)


# --- dispatchers --------------------------------------------------------------------------------


@REDIS_AND_POSTGRESQL
def test_two_beats_at_once_do_everything_once(site: Site) -> None:
    beats = [site.beat(wait=False), site.beat(wait=False)]
    site.worker("--max-tasks-per-child=30")
    for beat in beats:
        beat.wait_for_log("The durable dispatcher is running")
    crowd(site, 100)
    for _ in range(20):
        site.create("nap", 0.1)
    site.finish(60)
