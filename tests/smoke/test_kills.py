"""Processes that die: in a body, between two effects, by kill -9, by SIGTERM. Whatever was recorded stays so, once."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest

from celery_durable.model import Status
from tests.smoke.proc import until
from tests.smoke.site import RABBITMQ_IN_GATE, REDIS_AND_POSTGRESQL, REDIS_IN_GATE, Site

pytestmark = [pytest.mark.smoke, pytest.mark.slow, pytest.mark.timeout(400)]

LEASE_SECONDS = 30.0


@RABBITMQ_IN_GATE
def test_a_pool_process_that_is_killed_in_a_body_hands_its_run_on_long_before_its_lease_ends(
    site: Site, record_property: Callable[[str, object], None]
) -> None:
    """The worker's parent sees its child die and releases the claim; nobody waits for the lease."""
    assert site.durable.internals.settings.lease_seconds == LEASE_SECONDS
    site.beat(wait=False)
    worker = site.worker()
    seconds = []
    for _ in range(3):
        instance = site.create("chain", {"steps": 3, "hold": 1})
        child = site.wait_for_body(instance, "plain 1")
        assert child in worker.children()
        killed_at = time.monotonic()
        os.kill(child, signal.SIGKILL)
        other = site.wait_for_body(instance, "plain 1", attempt=2)
        seconds.append(round(time.monotonic() - killed_at, 3))
        assert other != child
        site.let_go()
        assert instance.result("20 seconds") == [0, 1, 2]
        assert site.bodies(instance) == [("book 0", 1), ("plain 1", 1), ("plain 1", 2), ("book 2", 1)]
        site.hold_again()
        error = instance.history().attempts[-1].error
        assert error.name == "WorkerLostError"
        assert "signal 9 (SIGKILL)" in error.message
        assert error.message.endswith("The last step that it recorded is 'book 0'.")
    record_property("seconds from the kill to the next body", seconds)
    print("seconds from the kill to the next body:", seconds)
    assert f"A pool process died while it advanced {instance.workflow.name}/{instance.id}#1" in worker.text()
    site.finish()


@REDIS_IN_GATE
def test_a_worker_that_is_killed_with_all_its_processes_loses_its_runs_to_another_when_the_lease_ends(
    site_with: Callable[..., Site],
) -> None:
    site = site_with(durable_lease_seconds=2.0)
    site.beat(wait=False)
    first = site.worker()
    instances = [site.create("chain", {"steps": 3, "hold": hold}) for hold in (0, 1)]
    for instance, step in zip(instances, ("book 0", "plain 1"), strict=True):
        site.wait_for_body(instance, step)
    os.killpg(first.pid, signal.SIGKILL)
    site.worker(wait=False)
    for instance, step in zip(instances, ("book 0", "plain 1"), strict=True):
        site.wait_for_body(instance, step, attempt=2)
    site.let_go()
    site.finish()


@REDIS_AND_POSTGRESQL
def test_the_orphans_of_a_killed_worker_do_no_harm(site_with: Callable[..., Site]) -> None:
    """Only the parent dies; its children live on with their bodies, renew their leases and record what they did."""
    site = site_with(durable_lease_seconds=2.0)
    site.beat(wait=False)
    first = site.worker()
    instances = [site.create("chain", {"steps": 4, "hold": hold}) for hold in (0, 1)]
    for instance, step in zip(instances, ("book 0", "plain 1"), strict=True):
        site.wait_for_body(instance, step)
    first.kill()
    site.worker()
    site.let_go()
    site.finish()


@REDIS_AND_POSTGRESQL
def test_a_process_that_froze_longer_than_its_lease_changes_nothing_when_it_thaws(
    site_with: Callable[..., Site],
) -> None:
    site = site_with(durable_lease_seconds=2.0)
    site.beat(wait=False)
    worker = site.worker()
    instance = site.create("chain", {"steps": 3, "hold": 0})
    frozen = site.wait_for_body(instance, "book 0")
    os.kill(frozen, signal.SIGSTOP)
    site.wait_for_body(instance, "book 0", attempt=2)
    os.kill(frozen, signal.SIGCONT)
    site.let_go(attempt=1)  # it ends its body while the other is still at it
    worker.wait_for_log("superseded: the instance was taken over, restarted or ended meanwhile")
    assert instance.history().steps == ()
    site.let_go()
    assert instance.result("20 seconds") == [0, 1, 2]
    assert [step.attempts for step in instance.history().steps] == [2, 1, 1]
    site.finish()


@pytest.mark.parametrize(
    ("broker", "database", "pool"),
    [
        ("redis", "postgresql", "prefork"),
        ("rabbitmq", "mariadb", "prefork"),
        ("redis", "postgresql", "threads"),
        ("redis", "postgresql", "solo"),
    ],
    indirect=["broker", "database"],
)
def test_a_worker_that_is_told_to_stop_hands_its_runs_on_and_no_crash_is_counted(site: Site, pool: str) -> None:
    site.beat(wait=False)
    first = site.worker(f"--pool={pool}")
    steps = ["plain 1"] if pool == "solo" else ["plain 1", "book 2"]
    instances = [site.create("chain", {"steps": 5, "hold": int(step[-1])}) for step in steps]
    pids = {site.wait_for_body(instance, step) for instance, step in zip(instances, steps, strict=True)}
    os.kill(first.pid, signal.SIGTERM)
    first.wait_for_log("Warm shutdown")
    site.let_go()
    assert first.process.wait(30) == 0
    assert {instance.status().status for instance in instances} == {Status.ACTIVE}
    assert {(row["claim_token"], row["crash_count"]) for row in site.rows()} == {(None, 0)}
    assert first.text().count("released: due again") == len(steps)
    site.worker()
    site.finish()
    for instance in instances:
        assert [attempt for _, attempt in site.bodies(instance)] == [1] * 5
        assert site.wait_for_body(instance, "book 4") not in pids


@RABBITMQ_IN_GATE
def test_a_worker_that_is_told_to_quit_leaves_its_bodies_and_no_crash_is_counted(site: Site) -> None:
    """A cold shutdown: Celery raises SystemExit in the bodies. They run again elsewhere, as the same attempt."""
    site.beat(wait=False)
    first = site.worker()
    instances = [site.create("chain", {"steps": 3, "hold": hold}) for hold in (0, 1)]
    for instance, step in zip(instances, ("book 0", "plain 1"), strict=True):
        site.wait_for_body(instance, step)
    os.kill(first.pid, signal.SIGQUIT)
    first.process.wait(30)
    assert {instance.status().status for instance in instances} == {Status.ACTIVE}
    assert {(row["claim_token"], row["crash_count"]) for row in site.rows()} == {(None, 0)}
    site.let_go()
    site.worker()
    site.finish(reruns=2)


# --- between two effects ------------------------------------------------------------------------

CHILD = ("claimed", "before-body", "after-body", "before-commit", "after-commit", "before-publish", "after-publish")


@REDIS_IN_GATE
def test_a_pool_process_may_die_between_any_two_effects(site_with: Callable[..., Site]) -> None:
    """Passes end after each step here, so that a process publishes too."""
    site = site_with(durable_pass_seconds=1e-6)
    site.beat(wait=False)
    site.worker()
    for point in CHILD:
        site.order(f"child.{point}")
        instance = site.create("chain", {"steps": 4})
        site.wait_until_done(f"child.{point}")
        assert instance.result("20 seconds") == [0, 1, 2, 3], point
    site.finish()


@REDIS_AND_POSTGRESQL
def test_beat_may_die_between_a_sweep_and_its_messages(site: Site) -> None:
    site.worker()
    for point in ("before-commit", "after-commit", "before-publish", "after-publish"):
        site.order(f"beat.{point}")
        beat = site.beat(wait=False)
        site.create("nap", 0.2)
        site.wait_until_done(f"beat.{point}")
        assert beat.process.wait(20) == -signal.SIGKILL
    site.beat()
    site.finish()


@REDIS_AND_POSTGRESQL
def test_a_client_may_die_between_its_commit_and_its_message(site: Site) -> None:
    site.beat(wait=False)
    site.worker()
    for point, is_created in (("before-commit", False), ("after-commit", True), ("before-publish", True)):
        site.order(f"client.{point}")
        died = site.client(f"durable.workflows['chain'].create({{'steps': 2}}, id={point!r})")
        assert died == -signal.SIGKILL
        found = {item.id for item in site.workflow("chain").list(limit=100).items}
        assert (point in found) == is_created
        if is_created:
            site.instances.append(site.workflow("chain").get(point))
    site.finish()


@REDIS_IN_GATE
def test_the_children_end_although_the_client_died_when_it_had_terminated_their_parent(site: Site) -> None:
    site.beat(wait=False)
    site.worker()
    family = site.workflow("family")

    def statuses() -> set[str]:
        return {item.status for item in family.list(limit=100).items}

    family.create(2, id="f")
    until("the grandchild", lambda: len(family.list().items) == 3 and statuses() == {"waiting"})
    site.order("client.after-commit")
    assert site.client("durable.workflows['family'].get('f').terminate('sold twice')") == -signal.SIGKILL
    until("the end of all", lambda: statuses() == {"terminated"})
    site.check()
