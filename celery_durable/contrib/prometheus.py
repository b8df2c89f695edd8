"""Prometheus metrics: counters of this process, from signals, and gauges of instances, from the database.

Needs ``celery-durable[prometheus]``. Call `instrument` in every process, before a worker forks, and serve the registry
that `exposed` returns.
"""

from __future__ import annotations

import logging
import math
import os
from collections import Counter as Counts
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from typing import Any
from weakref import WeakKeyDictionary

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from celery_durable import signals, values
from celery_durable.app import Durable
from celery_durable.model import OUTCOME_UNKNOWN, TERMINAL, Count, Heartbeat, LimitRecord, Status
from celery_durable.store.engine.faults import describe_fault
from celery_durable.store.instances import overview
from celery_durable.values import Duration

__all__ = ["InstanceCounts", "Metrics", "exposed", "instrument"]

logger = logging.getLogger("celery_durable.prometheus")

_LATENCIES = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
_LOSSES = ("resent", "failed")
_DURATIONS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 600.0)


class Metrics:
    """Counters and histograms of this process. They count while they are connected to the signals."""

    def __init__(self, registry: CollectorRegistry, *, by_step: bool) -> None:
        self._by_step = by_step
        self.started = Counter("celery_durable_runs_started", "Runs started.", ["workflow"], registry=registry)
        self.ended = Counter(
            "celery_durable_runs_ended", "Runs ended, by status.", ["workflow", "status"], registry=registry
        )
        self.queue_wait = Histogram(
            "celery_durable_queue_wait_seconds",
            "Time from when a run was due to its start.",
            ["workflow"],
            registry=registry,
            buckets=_LATENCIES,
        )
        self.resume_latency = Histogram(
            "celery_durable_resume_latency_seconds",
            "Time from when a waiting run was due to when a worker continued it.",
            ["workflow"],
            registry=registry,
            buckets=_LATENCIES,
        )
        self.step_duration = Histogram(
            "celery_durable_step_duration_seconds",
            "Duration of attempts of steps.",
            ["workflow", *(["step"] if by_step else []), "outcome"],
            registry=registry,
            buckets=_DURATIONS,
        )
        self.refused = Counter(
            "celery_durable_answers_refused",
            "Answers of Celery tasks refused for a wrong token. The messages may be forged.",
            registry=registry,
        )
        self._add_fault_counters(registry)
        self._receivers = (
            (signals.workflow_started, self._on_started),
            (signals.workflow_resumed, self._on_resumed),
            (signals.workflow_completed, self._on_completed),
            (signals.workflow_failed, self._on_failed),
            (signals.workflow_terminated, self._on_terminated),
            (signals.step_completed, self._on_step_completed),
            (signals.step_retrying, self._on_step_retrying),
            (signals.step_failed, self._on_step_failed),
            (signals.answer_refused, self._on_answer_refused),
            (signals.pass_stalled, self._on_pass_stalled),
            (signals.task_lost, self._on_task_lost),
            (signals.connections_cut, self._on_connections_cut),
            (signals.consuming_resumed, self._on_consuming_resumed),
        )

    def _add_fault_counters(self, registry: CollectorRegistry) -> None:
        self.stalled = Counter(
            "celery_durable_passes_stalled",
            "Passes that made no progress outside of the workflow's code and lost their claim (PassStalled).",
            ["workflow"],
            registry=registry,
        )
        self.lost = Counter(
            "celery_durable_tasks_lost",
            "Celery tasks of steps that a worker or a queue lost: resent, or failed.",
            ["workflow", "outcome"],
            registry=registry,
        )
        self.steps_lost = Counter(
            "celery_durable_steps_lost",
            "Steps that failed because the end of an attempt is unknown (StepLost).",
            ["workflow"],
            registry=registry,
        )
        self.cut = Counter(
            "celery_durable_database_connections_cut",
            "Connections that were cut because the database did not answer in time.",
            registry=registry,
        )
        self.resumed = Counter(
            "celery_durable_consuming_resumed",
            "Times that a worker had stopped consuming from Redis and was made to consume again.",
            registry=registry,
        )

    def connect(self) -> None:
        """Start counting."""
        for signal, receiver in self._receivers:
            signals.listen(signal, receiver)

    def disconnect(self) -> None:
        """Stop counting. The counts stay."""
        for signal, receiver in self._receivers:
            signals.ignore(signal, receiver)

    def create_series(self, workflows: Iterable[str]) -> None:
        """Create the counters of these workflows at zero: ``increase()`` sees no count without a sample before it."""
        for workflow in workflows:
            self.started.labels(workflow)
            self.stalled.labels(workflow)
            self.steps_lost.labels(workflow)
            for status in TERMINAL:
                self.ended.labels(workflow, status.value)
            for outcome in _LOSSES:
                self.lost.labels(workflow, outcome)

    def _on_started(self, workflow: str, latency: timedelta, **_: Any) -> None:
        self.started.labels(workflow).inc()
        self.queue_wait.labels(workflow).observe(latency.total_seconds())

    def _on_resumed(self, workflow: str, latency: timedelta, **_: Any) -> None:
        self.resume_latency.labels(workflow).observe(latency.total_seconds())

    def _on_completed(self, workflow: str, **_: Any) -> None:
        self.ended.labels(workflow, Status.COMPLETE.value).inc()

    def _on_failed(self, workflow: str, **_: Any) -> None:
        self.ended.labels(workflow, Status.ERRORED.value).inc()

    def _on_terminated(self, workflow: str, **_: Any) -> None:
        self.ended.labels(workflow, Status.TERMINATED.value).inc()

    def _on_step_completed(self, **told: Any) -> None:
        self._observe_step("completed", **told)

    def _on_step_retrying(self, **told: Any) -> None:
        self._observe_step("retrying", **told)

    def _on_step_failed(self, **told: Any) -> None:
        self._observe_step("failed", **told)
        if told["error_name"] == OUTCOME_UNKNOWN:
            self.steps_lost.labels(told["workflow"]).inc()

    def _on_answer_refused(self, **_: Any) -> None:
        self.refused.inc()

    def _on_pass_stalled(self, workflow: str, **_: Any) -> None:
        self.stalled.labels(workflow).inc()

    def _on_task_lost(self, workflow: str, outcome: str, **_: Any) -> None:
        self.lost.labels(workflow, outcome).inc()

    def _on_connections_cut(self, count: int, **_: Any) -> None:
        self.cut.inc(count)

    def _on_consuming_resumed(self, **_: Any) -> None:
        self.resumed.inc()

    def _observe_step(self, outcome: str, *, workflow: str, step: str, duration: timedelta | None, **_: Any) -> None:
        if duration is not None:
            labels = (workflow, *([step] if self._by_step else []), outcome)
            self.step_duration.labels(*labels).observe(duration.total_seconds())


_metrics: WeakKeyDictionary[CollectorRegistry, Metrics] = WeakKeyDictionary()
"""What `instrument` has added to each registry."""


def instrument(*, registry: CollectorRegistry = REGISTRY, by_step: bool = False) -> Metrics:
    """Count what happens in this process and in the processes that it forks.

    ``by_step`` counts each step name separately. Do not use it if step names are generated ("page 1", "page 2", ..).
    Raises ValueError if the registry has these metrics already.
    """
    metrics = Metrics(registry, by_step=by_step)
    metrics.connect()
    _metrics[registry] = metrics
    return metrics


class InstanceCounts(Collector):
    """Gauges from the database: instances by status, overdue runs, given-up messages, unconsumed queues, and outages.

    It counts instances of the workflows that ``durable`` knows, and given-up messages of all workflows. A scrape reads
    the database and keeps the values for ``fresh_for``. If the database cannot be read, there are no samples.
    """

    def __init__(self, durable: Durable, *, fresh_for: Duration = "10 seconds") -> None:
        self._durable, self._fresh_for = durable, values.parse_duration(fresh_for).total_seconds()
        self._counts: dict[tuple[str, Status], Count] = {}
        self._given_up: int | None = None
        self._oldest_due_seconds: float | None = None
        self._outages: dict[tuple[str, str], float] | None = None
        self._unconsumed: dict[str, float] = {}
        self._limits: Sequence[LimitRecord] = ()
        self._read_only_since: float | None = None
        """When this process found the database read-only, by the monotonic clock."""
        self._good_until = -math.inf

    def describe(self) -> list[Metric]:
        """Return nothing, so that registering needs no database."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the gauges."""
        self._read()
        help_ = "Instances that have not ended, by status; 10,000 stands for 10,000 or more."
        gauge = GaugeMetricFamily("celery_durable_instances", help_, labels=["workflow", "status"])
        for (workflow, status), count in self._counts.items():
            gauge.add_metric([workflow, status.value], count.count)
        yield gauge
        help_ = "How long the oldest run that no worker has claimed has been due; 0 if none is due."
        oldest = GaugeMetricFamily("celery_durable_oldest_due_seconds", help_, labels=[])
        if self._oldest_due_seconds is not None:
            oldest.add_metric([], self._oldest_due_seconds)
        yield oldest
        help_ = "Tasks and outbound events of the outbox that were given up."
        given_up = GaugeMetricFamily("celery_durable_outbox_given_up", help_, labels=[])
        if self._given_up is not None:
            given_up.add_metric([], self._given_up)
        yield given_up
        help_ = "For how long the oldest task of a step has waited in a queue that no worker with Durable consumes."
        unconsumed = GaugeMetricFamily("celery_durable_unconsumed_task_seconds", help_, labels=["queue"])
        for queue, seconds in self._unconsumed.items():
            unconsumed.add_metric([queue], seconds)
        yield unconsumed
        help_ = "How long a queue has refused messages, or a broker or the database has been unreachable."
        outages = GaugeMetricFamily("celery_durable_outage_seconds", help_, labels=["what", "where"])
        for (what, where), seconds in (self._outages or {}).items():
            outages.add_metric([what, where], seconds)
        yield outages
        help_ = "How many steps hold a limit for which others wait, and how many wait, of its first 100 keys."
        limits = GaugeMetricFamily("celery_durable_limit_steps", help_, labels=["limit", "state"])
        counts = Counts[tuple[str, str]]()
        for each in self._limits:
            counts.update({(each.name, "held"): each.held, (each.name, "waiting"): each.waiting.count})
        for labels, steps in counts.items():
            limits.add_metric(labels, steps)
        yield limits

    def _read(self) -> None:
        now = self._durable.internals.runtime.monotonic()
        if now < self._good_until:
            return
        try:
            known = sorted(self._durable.internals.registry)
            self._counts = self._durable.internals.read_store.read(lambda tx: overview.count_by_status(tx, known))
            health = self._durable.internals.operations.stats.health()
            self._given_up, self._limits = health.given_up, health.limits
            self._outages = _lasting(health.now, health.heartbeats)
            # Dispatchers cannot store the outage in a database that takes no writes.
            if not health.is_read_only:
                self._read_only_since = None
            else:
                self._read_only_since = now if self._read_only_since is None else self._read_only_since
                self._outages["database", "database"] = now - self._read_only_since
            oldest = health.due.oldest
            self._oldest_due_seconds = 0.0 if oldest is None else max(0.0, (health.now - oldest).total_seconds())
            queues = health.task_queues.items()
            self._unconsumed = {name: queue.age.total_seconds() for name, queue in queues if not queue.is_consumed}
        except Exception as exc:  # noqa: BLE001  # the other metrics are wanted all the more
            logger.warning("The instances cannot be counted: %s", describe_fault(exc))
            self._counts, self._given_up, self._outages, self._oldest_due_seconds = {}, None, None, None
            self._unconsumed, self._limits = {}, ()
            return
        self._good_until = now + self._fresh_for


def _lasting(now: datetime, beats: tuple[Heartbeat, ...]) -> dict[tuple[str, str], float]:
    """Return how many seconds each outage has lasted, as seen by the dispatcher that noticed it first."""
    lasting: dict[tuple[str, str], float] = {}
    for outage in (each for beat in beats if not beat.is_silent(now) for each in beat.outages):
        key = outage.what, outage.where
        lasting[key] = max(lasting.get(key, 0.0), (now - outage.since).total_seconds())
    return lasting


class _KnownWorkflows(Collector):
    """Creates the counters of the workflows that ``durable`` knows, at zero, before they are collected."""

    def __init__(self, durable: Durable, metrics: Metrics) -> None:
        self._durable, self._metrics = durable, metrics

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        self._metrics.create_series(self._durable.internals.registry)
        yield from ()


class _Whole(Collector):
    """Collects all metrics of another registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        yield from self._registry.collect()


def exposed(
    durable: Durable, *, registry: CollectorRegistry = REGISTRY, fresh_for: Duration = "10 seconds"
) -> CollectorRegistry:
    """Return a registry to serve: the metrics of ``registry`` and `InstanceCounts`.

    The counters of each workflow that ``durable`` knows begin at zero with the first scrape.
    If ``PROMETHEUS_MULTIPROC_DIR`` is set, the metrics of all processes in that directory replace those of
    ``registry``.
    """
    served = CollectorRegistry()
    metrics = _metrics.get(registry)
    if metrics is not None:
        served.register(_KnownWorkflows(durable, metrics))
    if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
        MultiProcessCollector(served)  # type: ignore[no-untyped-call]  # its types are incomplete
    else:
        served.register(_Whole(registry))
    served.register(InstanceCounts(durable, fresh_for=fresh_for))
    return served
