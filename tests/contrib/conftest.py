"""Celery apps as those of the Celery tests, and the traces that an instrumented process records."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from celery_durable.contrib import otel
from tests.celery.conftest import _leave_logging_alone, app, durable, make_app
from tests.contrib.traces import Traces

__all__ = ["_leave_logging_alone", "app", "durable", "make_app", "traces"]


@pytest.fixture
def traces() -> Iterator[Traces]:
    recorded = Traces()
    tracing = otel.instrument(recorded.provider)
    yield recorded
    tracing.disconnect()
