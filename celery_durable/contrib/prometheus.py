"""Prometheus metrics: what this process does, from our signals, and how the instances stand, from the database.

Needs ``celery-durable[prometheus]``. `instrument` is called in every process, before a worker forks; `exposed` is the
registry to serve.
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
    """Counters and histograms of what happens in this process, while it is connected to the signals."""

    def __init__(self, registry: CollectorRegistry, *, by_step: bool) -> None:
        self._by_step = by_step
        self.started = Counter("celery_durable_runs_started", "Runs begun.", ["workflow"], registry=registry)
        self.ended = Counter(
            "celery_durable_runs_ended", "Runs ended, by how they did.", ["workflow", "status"], registry=registry
        )
        self.queue_wait = Histogram(
            "celery_durable_queue_wait_seconds",
            "From when a run was to start to its start.",
            ["workflow"],
            registry=registry,
            buckets=_LATENCIES,
        )
        self.resume_latency = Histogram(
            "celery_durable_resume_latency_seconds",
            "From when a run was due again to a worker going on with it.",
            ["workflow"],
            registry=registry,
            buckets=_LATENCIES,
        )
        self.step_duration = Histogram(
            "celery_durable_step_duration_seconds",
            "Attempts at steps: how long the function ran.",
            ["workflow", *(["step"] if by_step else []), "outcome"],
            registry=registry,
            buckets=_DURATIONS,
        )
        self.refused = Counter(
            "celery_durable_answers_refused",
            "Answers of Celery tasks that were refused for a wrong token: the messages may be forged.",
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
        """Listen."""
        for signal, receiver in self._receivers:
            signals.listen(signal, receiver)

    def disconnect(self) -> None:
        """Listen no more; what was counted stays."""
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
    """Count what happens in this process and in those that it forks.

    ``by_step``: one series for each step name too; not for names that are made up as it goes ("page 1", "page 2", ..).
    Raises ValueError where the registry has these metrics already.
    """
    metrics = Metrics(registry, by_step=by_step)
    metrics.connect()
    return metrics


class InstanceCounts(Collector):
    """How many instances are active, waiting and paused, of the workflows that ``durable`` knows, in all processes.

    And how many outbound events were given up, of whatever workflow, and what keeps dispatchers from their work.
    Asked for when it is scraped; the answer is kept for ``fresh_for``. Without an answer there are no samples.
    """

    def __init__(self, durable: Durable, *, fresh_for: Duration = "10 seconds") -> None:
        self._durable, self._fresh_for = durable, values.parse_duration(fresh_for).total_seconds()
        self._counts: dict[tuple[str, Status], int] = {}
        self._given_up: int | None = None
        self._outages: dict[tuple[str, str], float] | None = None
        self._good_until = -math.inf

    def describe(self) -> list[Metric]:
        """Nothing: to be registered must not need a database."""
        return []

    def collect(self) -> Iterator[Metric]:
        """The gauges ``celery_durable_instances``, ``celery_durable_outbox_given_up``, ``.._outage_seconds``."""
        self._read()
        help_ = "Instances that have not ended, by how they stand."
        gauge = GaugeMetricFamily("celery_durable_instances", help_, labels=["workflow", "status"])
        for (workflow, status), count in self._counts.items():
            gauge.add_metric([workflow, status.value], count)
        yield gauge
        help_ = "Outbound events that no handler took, kept for people."
        given_up = GaugeMetricFamily("celery_durable_outbox_given_up", help_, labels=[])
        if self._given_up is not None:
            given_up.add_metric([], self._given_up)
        yield given_up
        help_ = "For how long a queue has refused messages, a broker or the database has been away, by dispatchers."
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
    """How many seconds each outage has lasted, by the dispatcher that saw it first."""
    lasting: dict[tuple[str, str], float] = {}
    for outage in (each for beat in beats if beat.is_live(now) for each in beat.outages):
        key = outage.what, outage.where
        lasting[key] = max(lasting.get(key, 0.0), (now - outage.since).total_seconds())
    return lasting


class _Whole(Collector):
    """All that another registry has."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        yield from self._registry.collect()


def exposed(
    durable: Durable, *, registry: CollectorRegistry = REGISTRY, fresh_for: Duration = "10 seconds"
) -> CollectorRegistry:
    """A registry to serve: ``registry`` and the counts of instances.

    With ``PROMETHEUS_MULTIPROC_DIR`` it has, instead of ``registry``, what all processes wrote into that directory.
    """
    served = CollectorRegistry()
    if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
        MultiProcessCollector(served)  # type: ignore[no-untyped-call]  # it ships half of its types
    else:
        served.register(_Whole(registry))
    served.register(InstanceCounts(durable, fresh_for=fresh_for))
    return served
