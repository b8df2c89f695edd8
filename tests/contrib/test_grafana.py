"""The dashboard and the alert rules name metrics and labels that a real scrape has, and Prometheus can read them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.request
from datetime import timedelta
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from celery import Signature
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.parser import text_string_to_metric_families

from celery_durable import NonRetryableError, Step, WorkflowEvent, notify, signals
from celery_durable.cli import durable
from celery_durable.contrib import grafana, prometheus
from celery_durable.model import Outage, RunRef
from celery_durable.store import heartbeats
from celery_durable.store.heartbeats import HeartbeatUpdate
from celery_durable.testing import DurableHarness
from tests.docs.blocks import ROOT
from tests.signals.conftest import hearing
from tests.support.embedded import until
from tests.support.services import missing_tool

DASHBOARD: dict[str, Any] = json.loads(grafana.DASHBOARD.read_text())
GROUPS: list[dict[str, Any]] = yaml.safe_load(grafana.ALERTS.read_text())["groups"]
RULES = [rule for group in GROUPS for rule in group["rules"]]
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
EXPRESSIONS = {
    **{f"{panel['title']} {target['refId']}": target["expr"] for panel in PANELS for target in panel["targets"]},
    **{rule["alert"]: rule["expr"] for rule in RULES},
}
SELECTOR = re.compile(r"\b(celery_durable_\w+)(?:\{([^}]*)\})?")
MATCHER = re.compile(r'(\w+)\s*(?:=~|!~|!=|=)\s*"[^"]*"')


def order(event: WorkflowEvent[Any], step: Step) -> None:
    step.do("charge", lambda: "paid")
    step.wait_for_event("approval", "approved")


def failing(event: WorkflowEvent[Any], step: Step) -> None:
    raise NonRetryableError("no such order")


def resized(event: WorkflowEvent[Any], step: Step) -> None:
    step.task("resize", Signature("resize", options={"queue": "images"}))


@pytest.fixture
def scrape() -> dict[str, set[str]]:
    """What Prometheus gets over HTTP when everything has happened once: the names of samples, with their labels."""
    registry = CollectorRegistry()
    metrics = prometheus.instrument(registry=registry)
    with DurableHarness([order, failing, resized]) as harness:
        instance = harness.create(order)
        harness.create(failing)
        harness.create(resized)
        harness.run_until_idle()
        instance.send_event("approved")
        harness.run_until_idle()
        ref = RunRef("order", "order-1", 1)
        notify.send_task_lost(ref, outcome="resent")
        notify.send_pass_stalled(ref, timedelta(seconds=31))
        until(lambda: registry.get_sample_value("celery_durable_passes_stalled_total", {"workflow": "order"}))
        refused = Outage("queue", "q", harness.clock.now, "refused", 1)
        beat = HeartbeatUpdate("d", "dispatcher", "d", 1, outages=[(refused, timedelta(seconds=60))])
        harness.durable.internals.store.transact_once(lambda tx: heartbeats.upsert(tx, beat))
        server, thread = start_http_server(0, "127.0.0.1", prometheus.exposed(harness.durable, registry=registry))
        with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/metrics", timeout=30) as response:
            text = response.read().decode()
        server.shutdown()
        server.server_close()
        thread.join()
    metrics.disconnect()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    found: dict[str, set[str]] = {}
    for sample in samples:
        found.setdefault(sample.name, set()).update(sample.labels)
    return found


def test_each_metric_and_label_is_one_that_a_scrape_has(scrape: dict[str, set[str]]) -> None:
    for where, expression in EXPRESSIONS.items():
        selectors = SELECTOR.findall(expression)
        assert selectors, where
        labels: set[str] = set()
        for name, matchers in selectors:
            assert name in scrape, f"{where}: {name} is not exported"
            matched = MATCHER.findall(matchers)
            assert len(matched) == matchers.count('"') / 2, where
            assert set(matched) <= scrape[name], f"{where}: {name} has no label {set(matched) - scrape[name]}"
            labels |= scrape[name]
        for grouped in re.findall(r"\bby \(([^)]*)\)", expression):
            assert set(re.split(r",\s*", grouped)) <= labels, f"{where}: {grouped}"


def test_the_commands_that_a_rule_names_exist() -> None:
    context = click.Context(durable)
    named = re.findall(r"durable ([a-z][a-z-]*)((?: --[a-z-]+)*)", grafana.ALERTS.read_text(encoding="utf-8"))
    assert len(named) > 5
    for verb, options in named:
        command = durable.get_command(context, verb)
        assert command is not None, verb
        known = {option for parameter in command.params for option in parameter.opts}
        assert set(options.split()) <= known, f"{verb}{options}"


def test_the_signals_of_faults_are_counted() -> None:
    registry = CollectorRegistry()
    metrics = prometheus.instrument(registry=registry)
    ref = RunRef("order", "order-1", 1)
    notify.send_task_lost(ref, outcome="failed")
    notify.send_pass_stalled(ref, timedelta(seconds=31))
    notify.send_consuming_resumed(3)
    signals.send_from_monitor(signals.connections_cut, sender=None, count=2)

    def counted() -> list[float | None]:
        return [
            registry.get_sample_value("celery_durable_tasks_lost_total", {"workflow": "order", "outcome": "failed"}),
            registry.get_sample_value("celery_durable_passes_stalled_total", {"workflow": "order"}),
            registry.get_sample_value("celery_durable_consuming_resumed_total"),
            registry.get_sample_value("celery_durable_database_connections_cut_total"),
        ]

    until(lambda: counted() == [1, 1, 1, 2])
    metrics.disconnect()
    notify.send_consuming_resumed(3)
    with hearing(signals.connections_cut) as cut:
        signals.send_from_monitor(signals.connections_cut, sender=None, count=1)
        until(lambda: cut)  # they are sent in order, so the signal before it is over
    assert counted() == [1, 1, 1, 2]


# --- with Prometheus' own tool ------------------------------------------------------------------


@pytest.fixture
def promtool() -> str:
    found = shutil.which("promtool")
    if found is None:
        missing_tool("promtool")
    return found


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_reads_the_rules_and_the_expressions_of_the_panels(promtool: str, tmp_path: Path) -> None:
    run(promtool, "check", "rules", str(grafana.ALERTS))
    filled = [
        target["expr"].replace("$__rate_interval", "5m").replace("$workflow", ".*")
        for panel in PANELS
        for target in panel["targets"]
    ]
    rules = [{"record": f"panel:{number}", "expr": expression} for number, expression in enumerate(filled)]
    panels = tmp_path / "panels.yml"
    panels.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    run(promtool, "check", "rules", str(panels))


def test_each_alert_fires_for_its_cause_and_none_without(promtool: str, tmp_path: Path) -> None:
    text = (ROOT / "tests" / "contrib" / "grafana_alerts.yml").read_text()
    assert {rule["alert"] for rule in RULES} == set(re.findall(r'alertname="(\w+)"', text))
    cases = tmp_path / "cases.yml"
    cases.write_text(text.replace("[RULES]", json.dumps([str(grafana.ALERTS)])))
    run(promtool, "test", "rules", str(cases))
