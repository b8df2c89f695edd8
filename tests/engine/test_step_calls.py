"""What one step costs in Python: counts that only change with the code, so they are watched here."""

from __future__ import annotations

import pytest

from benchmarks.step_calls import measure


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_a_step_makes_no_more_calls_than_before(store_url: str) -> None:
    """Lower the limits when the counts fall. What is called how often: `python benchmarks/step_calls.py --calls`."""
    counts, calls = measure(store_url)
    assert counts["calls per step"] <= 100, calls.most_common(20)
    assert counts["deepest stack"] <= 14
