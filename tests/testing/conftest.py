"""Harnesses for the tests of the harness."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from celery_durable.testing import DurableHarness


@pytest.fixture
def make_harness() -> Iterator[Callable[..., DurableHarness]]:
    made: list[DurableHarness] = []

    def make(*workflows: Any, **options: Any) -> DurableHarness:
        made.append(DurableHarness(workflows, **options))
        return made[-1]

    yield make
    for harness in made:
        harness.close()
