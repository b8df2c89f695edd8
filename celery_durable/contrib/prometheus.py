"""Prometheus metrics: counters of this process, from signals, and gauges of instances, from the database.

Needs ``celery-durable[prometheus]``. Call `instrument` in every process, before a worker forks, and serve the registry
that `exposed` returns.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from celery_durable import signals, values
from celery_durable.app import Durable
from celery_durable.model import Heartbeat, Status
from celery_durable.store import heartbeats, instance_counts, outbox
from celery_durable.values import Duration

__all__ = ["InstanceCounts", "Metrics", "exposed", "instrument"]

logger = logging.getLogger("celery_durable.prometheus")

_LATENCIES = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
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
        )

    def connect(self) -> None:
        """Start counting."""
        for signal, receiver in self._receivers:
            signals.listen(signal, receiver)

    def disconnect(self) -> None:
        """Stop counting. The counts stay."""
        for signal, receiver in self._receivers:
            signals.ignore(signal, receiver)

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

    def _on_answer_refused(self, **_: Any) -> None:
        self.refused.inc()

    def _observe_step(self, outcome: str, *, workflow: str, step: str, duration: timedelta | None, **_: Any) -> None:
        if duration is not None:
            labels = (workflow, *([step] if self._by_step else []), outcome)
            self.step_duration.labels(*labels).observe(duration.total_seconds())


def instrument(*, registry: CollectorRegistry = REGISTRY, by_step: bool = False) -> Metrics:
    """Count what happens in this process and in the processes that it forks.

    ``by_step`` counts each step name separately. Do not use it if step names are generated ("page 1", "page 2", ..).
    Raises ValueError if the registry has these metrics already.
    """
    metrics = Metrics(registry, by_step=by_step)
    metrics.connect()
    return metrics


class InstanceCounts(Collector):
    """Gauges from the database: instances by status, outbound events that were given up, and outages.

    It counts instances of the workflows that ``durable`` knows, and given-up events of all workflows. A scrape reads
    the database and keeps the values for ``fresh_for``. If the database cannot be read, there are no samples.
    """

    def __init__(self, durable: Durable, *, fresh_for: Duration = "10 seconds") -> None:
        self._durable, self._fresh_for = durable, values.parse_duration(fresh_for).total_seconds()
        self._counts: dict[tuple[str, Status], int] = {}
        self._given_up: int | None = None
        self._outages: dict[tuple[str, str], float] | None = None
        self._good_until = -math.inf

    def describe(self) -> list[Metric]:
        """Return nothing, so that registering needs no database."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield ``celery_durable_instances``, ``celery_durable_outbox_given_up``, ``celery_durable_outage_seconds``."""
        self._read()
        help_ = "Instances that have not ended, by status."
        gauge = GaugeMetricFamily("celery_durable_instances", help_, labels=["workflow", "status"])
        for (workflow, status), count in self._counts.items():
            gauge.add_metric([workflow, status.value], count)
        yield gauge
        help_ = "Outbound events that failed in every attempt and are kept."
        given_up = GaugeMetricFamily("celery_durable_outbox_given_up", help_, labels=[])
        if self._given_up is not None:
            given_up.add_metric([], self._given_up)
        yield given_up
        help_ = "How long a queue has refused messages, or a broker or the database has been unreachable."
        outages = GaugeMetricFamily("celery_durable_outage_seconds", help_, labels=["what", "where"])
        for (what, where), seconds in (self._outages or {}).items():
            outages.add_metric([what, where], seconds)
        yield outages

    def _read(self) -> None:
        now = self._durable.internals.runtime.monotonic()
        if now < self._good_until:
            return
        try:
            known = sorted(self._durable.internals.registry)
            self._counts = self._durable.internals.store.read(lambda tx: instance_counts.count_live(tx, known))
            self._given_up = self._durable.internals.store.read(outbox.count_given_up)
            self._outages = _lasting(*self._durable.internals.store.read(heartbeats.read))
        except Exception as exc:  # noqa: BLE001  # the other metrics are wanted all the more
            logger.warning("The instances cannot be counted: %s", exc)
            self._counts, self._given_up, self._outages = {}, None, None
            return
        self._good_until = now + self._fresh_for


def _lasting(now: datetime, beats: tuple[Heartbeat, ...]) -> dict[tuple[str, str], float]:
    """Return how many seconds each outage has lasted, as seen by the dispatcher that noticed it first."""
    lasting: dict[tuple[str, str], float] = {}
    for outage in (each for beat in beats if beat.is_live(now) for each in beat.outages):
        key = outage.what, outage.where
        lasting[key] = max(lasting.get(key, 0.0), (now - outage.since).total_seconds())
    return lasting


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

    If ``PROMETHEUS_MULTIPROC_DIR`` is set, the metrics of all processes in that directory replace those of
    ``registry``.
    """
    served = CollectorRegistry()
    if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
        MultiProcessCollector(served)  # type: ignore[no-untyped-call]  # its types are incomplete
    else:
        served.register(_Whole(registry))
    served.register(InstanceCounts(durable, fresh_for=fresh_for))
    return served
