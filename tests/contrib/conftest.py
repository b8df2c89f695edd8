"""The traces that an instrumented process records."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from celery_durable.contrib import otel
from tests.contrib.traces import Traces


@pytest.fixture
def traces() -> Iterator[Traces]:
    recorded = Traces()
    tracing = otel.instrument(recorded.provider)
    yield recorded
    tracing.disconnect()
