"""Prometheus metrics, as the real client counts and exposes them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from celery import Celery, Signature
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from celery_durable import (
    Durable,
    Limit,
    NonRetryableError,
    OutboundEvent,
    Step,
    StepConfig,
    StepFailed,
    StepTx,
    WorkflowEvent,
    durable_workflow,
)
from celery_durable.contrib import prometheus
from celery_durable.model import Outage
from celery_durable.store import heartbeats
from celery_durable.store.heartbeats import HeartbeatUpdate
from celery_durable.testing import DurableHarness
from tests.docs.blocks import ROOT
from tests.runner.test_no_writes import read_only
from tests.support.embedded import worker

Samples = dict[str, float]


def charge(tx: StepTx) -> str:
    if tx.attempt == 1:
        raise OSError("the bank is closed")
    return "paid"


def refuse() -> None:
    raise NonRetryableError("over the limit")


def order(event: WorkflowEvent[Any], step: Step) -> None:
    step.do("charge", charge)
    step.wait_for_event("approval", "approved", timeout="1 hour")
    try:
        step.do("refuse", refuse)
    except StepFailed:
        step.sleep("rest", "1 day")


def failing(event: WorkflowEvent[Any], step: Step) -> None:
    raise LookupError("no such order")


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def metrics(registry: CollectorRegistry) -> Iterator[prometheus.Metrics]:
    metrics = prometheus.instrument(registry=registry)
    yield metrics
    metrics.disconnect()


def scraped(registry: CollectorRegistry) -> Samples:
    """The exposition, parsed: ``name{label="value",..}`` to the sample."""
    found: Samples = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            if "bucket" not in sample.name and not sample.name.endswith("_created"):
                labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
                found[f"{sample.name.removeprefix('celery_durable_')} {labels}"] = sample.value
    return found


def series_of(*workflows: str) -> Samples:
    """The counters of workflows without any events."""
    return {
        f"{name} {labels}workflow={workflow}": 0.0
        for workflow in workflows
        for name, labels in [
            ("runs_started_total", ""),
            ("runs_ended_total", "status=complete,"),
            ("runs_ended_total", "status=errored,"),
            ("runs_ended_total", "status=terminated,"),
            ("tasks_lost_total", "outcome=resent,"),
            ("tasks_lost_total", "outcome=failed,"),
            ("steps_lost_total", ""),
            ("passes_stalled_total", ""),
        ]
    }


def test_the_counters_of_known_workflows_begin_at_zero(
    metrics: prometheus.Metrics, registry: CollectorRegistry
) -> None:
    """Also those of a workflow that was registered after the registry was made: increase() needs a sample before."""
    with DurableHarness([order]) as harness:
        exposed = prometheus.exposed(harness.durable, registry=registry)
        harness.durable.workflow(name="late")(failing)
        zeros = series_of("order", "late")
        assert {name: value for name, value in scraped(exposed).items() if name in zeros} == zeros


def test_what_happens_is_counted_and_measured(metrics: prometheus.Metrics, registry: CollectorRegistry) -> None:
    with DurableHarness([order, failing]) as harness:
        instance = harness.create(order)
        harness.create(failing)
        harness.clock.advance(3)  # the messages lie in their queue
        harness.run_until_idle()
        harness.advance("10 seconds")
        instance.send_event("approved")
        harness.run_until_idle()
        instance.terminate()
        exposed = prometheus.exposed(harness.durable, registry=registry)
        assert scraped(exposed) == {
            **series_of("order", "failing"),
            "runs_started_total workflow=order": 1.0,
            "runs_started_total workflow=failing": 1.0,
            "runs_ended_total status=terminated,workflow=order": 1.0,
            "runs_ended_total status=errored,workflow=failing": 1.0,
            "queue_wait_seconds_count workflow=order": 1.0,
            "queue_wait_seconds_sum workflow=order": 3.0,
            "queue_wait_seconds_count workflow=failing": 1.0,
            "queue_wait_seconds_sum workflow=failing": 3.0,
            "resume_latency_seconds_count workflow=order": 2.0,
            "resume_latency_seconds_sum workflow=order": 0.0,
            "step_duration_seconds_count outcome=retrying,workflow=order": 1.0,
            "step_duration_seconds_sum outcome=retrying,workflow=order": 0.0,
            "step_duration_seconds_count outcome=completed,workflow=order": 1.0,
            "step_duration_seconds_sum outcome=completed,workflow=order": 0.0,
            "step_duration_seconds_count outcome=failed,workflow=order": 1.0,
            "step_duration_seconds_sum outcome=failed,workflow=order": 0.0,
            "answers_refused_total ": 0.0,
            "consuming_resumed_total ": 0.0,
            "database_connections_cut_total ": 0.0,
            "oldest_due_seconds ": 0.0,
            "outbox_given_up ": 0.0,
            **{
                f"instances status={status},workflow={workflow}": 0.0
                for status in ("active", "waiting", "paused")
                for workflow in ("order", "failing")
            },
        }
        metrics.disconnect()
        harness.create(failing)
        harness.run_until_idle()
        assert scraped(registry)["runs_started_total workflow=failing"] == 1.0


def test_steps_may_have_series_of_their_own(registry: CollectorRegistry) -> None:
    metrics = prometheus.instrument(registry=registry, by_step=True)
    with DurableHarness([order]) as harness:
        harness.create(order)
        harness.advance("10 seconds")
    metrics.disconnect()
    assert scraped(registry)["step_duration_seconds_count outcome=completed,step=charge,workflow=order"] == 1.0


def test_what_others_do_is_no_duration_of_a_function(registry: CollectorRegistry) -> None:
    @durable_workflow(name="measured-child")
    def child(event: WorkflowEvent[None], step: Step) -> None:
        step.do("charge", str)

    def parent(event: WorkflowEvent[None], step: Step) -> None:
        step.task("resize", "media.resize", retries=1)
        step.child("child", child)

    metrics = prometheus.instrument(registry=registry, by_step=True)
    with DurableHarness([parent, child]) as harness:
        harness.mocks.mock_step_error("resize", OSError("disk full"), times=1)
        harness.mocks.mock_step_result("resize", 7)
        harness.create(parent)
        harness.advance("1 minute")
    metrics.disconnect()
    found = scraped(registry)
    assert {name for name in found if name.startswith("step_duration_seconds_count")} == {
        "step_duration_seconds_count outcome=completed,step=charge,workflow=measured-child"
    }
    assert [found[f"runs_ended_total status=complete,workflow={name}"] for name in ("parent", "measured-child")] == [
        1,
        1,
    ]


@pytest.mark.parametrize("end", ["dies", "raises"])
def test_a_step_whose_end_is_unknown_is_counted_once(
    metrics: prometheus.Metrics, registry: CollectorRegistry, end: str
) -> None:
    def payment(event: WorkflowEvent[None], step: Step) -> None:
        step.do("pay", StepConfig(on_lost="fail", retries=0), refuse if end == "raises" else str)

    with DurableHarness([payment]) as harness:
        if end == "dies":
            harness.faults.crash_in_step("pay", when="after")
        exposed = prometheus.exposed(harness.durable, registry=registry)
        instance = harness.create(payment)
        harness.advance("1 hour")
        assert instance.status().error.name == ("OutcomeUnknown" if end == "dies" else "NonRetryableError")
        assert scraped(exposed)["steps_lost_total workflow=payment"] == (end == "dies")


def test_a_registry_has_the_metrics_once(metrics: prometheus.Metrics, registry: CollectorRegistry) -> None:
    with pytest.raises(ValueError, match="Duplicated timeseries in CollectorRegistry"):
        prometheus.instrument(registry=registry)


def test_instances_are_counted_in_the_database(store_url: str) -> None:
    """Whichever process made them; the answer is kept for a while."""
    with DurableHarness([order, failing], store_url=store_url, wipe=True) as harness:
        counts = CollectorRegistry()
        counts.register(prometheus.InstanceCounts(harness.durable))
        harness.create(order)
        harness.run_until_idle()
        harness.create(order, id="paused").pause()
        harness.create(failing, run_at=harness.clock.now + timedelta(days=1))
        assert {name: count for name, count in scraped(counts).items() if count} == {
            "instances status=waiting,workflow=order": 1.0,
            "instances status=paused,workflow=order": 1.0,
            "instances status=waiting,workflow=failing": 1.0,
        }
        harness.create(order, id="late")
        assert scraped(counts)["instances status=active,workflow=order"] == 0.0
        harness.clock.advance(10)
        assert scraped(counts)["instances status=active,workflow=order"] == 1.0


def test_outbound_events_that_were_given_up_are_counted_in_the_database(store_url: str) -> None:
    def telling(event: WorkflowEvent[None], step: Step) -> None:
        step.do("tell", lambda tx: tx.send_outbound("OrderShipped"))

    with DurableHarness([telling], store_url=store_url, wipe=True) as harness:

        @harness.outbound("OrderShipped", retries=0)
        def shipped(event: OutboundEvent) -> None:
            raise ValueError("full")

        counts = CollectorRegistry()
        counts.register(prometheus.InstanceCounts(harness.durable))
        assert scraped(counts)["outbox_given_up "] == 0.0
        harness.create(telling)
        harness.run_until_idle()
        harness.clock.advance(10)
        assert scraped(counts)["outbox_given_up "] == 1.0


def test_limits_for_which_steps_wait_are_counted(store_url: str) -> None:
    @durable_workflow(name="limited", limits=[Limit("import", at_once=1)])
    def limited(event: WorkflowEvent[None], step: Step) -> None:
        step.sleep("pause", 60)

    with DurableHarness([limited], store_url=store_url, wipe=True) as harness:
        counts = CollectorRegistry()
        counts.register(prometheus.InstanceCounts(harness.durable))
        for _ in range(3):
            harness.create(limited)
        harness.run_until_idle()
        found = scraped(counts)
        assert found["limit_steps limit=import,state=held"] == 1.0
        assert found["limit_steps limit=import,state=waiting"] == 2.0


def test_a_run_that_no_worker_claims_grows_old(store_url: str) -> None:
    with DurableHarness([order], store_url=store_url, wipe=True) as harness:
        counts = CollectorRegistry()
        counts.register(prometheus.InstanceCounts(harness.durable))
        harness.create(order, run_at=harness.clock.now + timedelta(seconds=20))
        harness.create(order, run_at=harness.clock.now + timedelta(seconds=25))
        assert scraped(counts)["oldest_due_seconds "] == 0.0
        harness.clock.advance(50)
        assert scraped(counts)["oldest_due_seconds "] == 30.0
        harness.run_until_idle()
        harness.clock.advance(10)
        assert scraped(counts)["oldest_due_seconds "] == 0.0


def resized(event: WorkflowEvent[Any], step: Step) -> None:
    step.map("resize", Signature("resize", options={"queue": "images"}), [1, 2])


def test_a_queue_of_tasks_that_no_worker_consumes_grows_old(store_url: str) -> None:
    with DurableHarness([resized], store_url=store_url, wipe=True) as harness:
        counts = CollectorRegistry()
        counts.register(prometheus.InstanceCounts(harness.durable))
        instance = harness.create(resized)
        harness.run_until_idle()
        harness.clock.advance(50)
        assert scraped(counts)["unconsumed_task_seconds queue=images"] == 50.0
        assert "images" in harness.durable.internals.operations.stats.task_queues()
        beat = HeartbeatUpdate("w", "worker", "w", 1, queues=["images"])
        harness.durable.internals.store.transact_once(lambda tx: heartbeats.upsert(tx, beat))
        harness.clock.advance(11)
        assert "unconsumed_task_seconds queue=images" not in scraped(counts)
        instance.terminate()
        assert harness.durable.internals.operations.stats.task_queues() == {}


def test_what_keeps_a_dispatcher_from_its_work_is_measured_until_it_is_over(store_url: str) -> None:
    """By the one that saw it first, and while that one lives."""
    with DurableHarness([failing], store_url=store_url, wipe=True) as harness:

        def say(id_: str, seconds: float, error: str = "no") -> None:
            refused = Outage("queue", "q", harness.clock.now, error, 1)
            pulse = HeartbeatUpdate(
                id_, "dispatcher", id_, 1, outages=[(refused, timedelta(seconds=seconds))] if seconds else ()
            )
            harness.durable.internals.store.transact_once(lambda tx: heartbeats.upsert(tx, pulse))

        counts = CollectorRegistry()
        counts.register(prometheus.InstanceCounts(harness.durable))

        def lasting() -> Samples:
            harness.clock.advance(10)
            return {name: value for name, value in scraped(counts).items() if name.startswith("outage")}

        assert lasting() == {}
        say("first", 60)
        say("second", 5, "no again")
        assert lasting() == {"outage_seconds what=queue,where=q": 70.0}
        say("first", 0)
        say("second", 15, "no again")
        assert lasting() == {"outage_seconds what=queue,where=q": 25.0}
        harness.clock.advance(10)  # without a word from it
        assert lasting() == {}


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_a_read_only_database_is_an_outage_that_no_dispatcher_can_store(store_url: str) -> None:
    with DurableHarness([failing], store_url=store_url, wipe=True) as harness:
        counts = CollectorRegistry()
        counts.register(prometheus.InstanceCounts(harness.durable))
        name = "outage_seconds what=database,where=database"
        with read_only(store_url):
            harness.durable.internals.store._connections.reconnect()
            assert scraped(counts)[name] == 0.0
            harness.clock.advance(70)
            assert scraped(counts)[name] == 70.0
        harness.durable.internals.store._connections.reconnect()
        harness.clock.advance(10)
        assert name not in scraped(counts)


def test_without_a_database_the_other_metrics_are_there(
    metrics: prometheus.Metrics, registry: CollectorRegistry, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    away = Celery("away", broker="memory://", set_as_current=False)
    away.conf.durable_database_url = f"sqlite:///{tmp_path}/nowhere/durable.sqlite3"
    metrics.started.labels("order").inc()
    exposed = prometheus.exposed(Durable(away), registry=registry)
    unlabelled = ("answers_refused_total ", "consuming_resumed_total ", "database_connections_cut_total ")
    assert scraped(exposed) == {"runs_started_total workflow=order": 1.0, **dict.fromkeys(unlabelled, 0.0)}
    assert "The instances cannot be counted: " in caplog.text


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_a_worker_counts(
    metrics: prometheus.Metrics, registry: CollectorRegistry, app: Celery, durable: Durable
) -> None:
    @durable.workflow
    def hello(event: WorkflowEvent[Any], step: Step) -> str:
        step.sleep("nap", 0.01)
        return step.do("greet", lambda: "hello")

    with worker(app):
        assert hello.create().result("20 seconds") == "hello"
    found = scraped(prometheus.exposed(durable, registry=registry))
    assert found["runs_ended_total status=complete,workflow=hello"] == 1.0
    assert found["resume_latency_seconds_count workflow=hello"] == 1.0
    assert found["step_duration_seconds_count outcome=completed,workflow=hello"] == 1.0


PREFORK = """
import os, sys
from prometheus_client import generate_latest
from celery_durable.contrib import prometheus
from celery_durable.testing import DurableHarness

def hello(event, step):
    return step.do("greet", lambda: "hello")

def run():
    with DurableHarness([hello]) as harness:
        harness.create(hello)
        harness.run_until_idle()

prometheus.instrument()
for _ in range(2):
    child = os.fork()
    if not child:
        run()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
with DurableHarness([hello]) as harness:
    sys.stdout.write(generate_latest(prometheus.exposed(harness.durable)).decode())
"""


@pytest.mark.gate
@pytest.mark.timeout(180)
def test_the_processes_of_a_worker_are_added_up(tmp_path: Path) -> None:
    """Under PROMETHEUS_MULTIPROC_DIR, which the client reads when it is imported."""
    done = subprocess.run(
        [sys.executable, "-c", PREFORK],
        env=os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    assert 'celery_durable_runs_ended_total{status="complete",workflow="hello"} 2.0' in done.stdout
    assert 'celery_durable_step_duration_seconds_count{outcome="completed",workflow="hello"} 2.0' in done.stdout
    assert 'celery_durable_instances{status="waiting",workflow="hello"} 0.0' in done.stdout
    assert 'celery_durable_tasks_lost_total{outcome="failed",workflow="hello"} 0.0' in done.stdout
