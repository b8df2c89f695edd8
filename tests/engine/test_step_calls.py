"""What one step costs in Python: counts that only change with the code, so they are watched here."""

from __future__ import annotations

import pytest

from benchmarks.step_calls import measure
from celery_durable import signals


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_a_step_makes_no_more_calls_than_before(store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower the limits when the counts fall. What is called how often: `python benchmarks/step_calls.py --calls`."""
    for hook in (signals.around_pass, signals.around_step):
        monkeypatch.setattr(hook, "managers", [])  # integrations that other tests of this process have connected
    counts, calls = measure(store_url)
    assert counts["calls per step"] <= 100, calls.most_common(20)
    assert counts["deepest stack"] <= 14
