"""Grafana and Prometheus: a dashboard and alert rules for the metrics of `celery_durable.contrib.prometheus`."""

from __future__ import annotations

from pathlib import Path

__all__ = ["ALERTS", "DASHBOARD"]

DASHBOARD = Path(__file__).with_name("dashboard.json")
"""The dashboard, as Grafana imports it. It asks for the data source and filters by workflow."""
ALERTS = Path(__file__).with_name("alerts.yml")
"""The alert rules, as Prometheus loads them."""
