"""Golden histories, in pytest sessions of their own: recorded with --durable-update, replayed without."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

TEST = """
def test_it(durable_harness, durable_golden):
    instance = durable_harness.create(plugged, id="p-1")
    durable_harness.run_until_idle()
    durable_golden.check(instance)
    durable_harness.advance("3 days")
    durable_golden.check(instance, "after a nap/end")
"""
CHANGED = """
@durable_workflow(name="plugged")
def plugged(event, step):
    step.sleep("nap", "3 days")
    return step.do("invoice", lambda: "paid")
"""


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    return tmp_path / "golden" / "test_shop"


def test_a_run_is_recorded_the_same_each_time(run_tests, golden: Path) -> None:
    said = run_tests(TEST)
    assert (
        f"GoldenHistoryMissing: There is no golden history {golden}/test_it.json. Record it, and commit it: "
        "pytest --durable-update"
    ) in said
    assert not golden.exists()

    assert "1 passed" in run_tests(TEST, "--durable-update")
    recorded = {path.name: path.read_text() for path in golden.iterdir()}
    assert sorted(recorded) == ["test_it-after-a-nap-end.json", "test_it.json"]
    document = json.loads(recorded["test_it.json"])
    assert [(step["name"], step["status"]) for step in document["steps"]] == [("nap", "waiting")]

    assert "1 passed" in run_tests(TEST, "--durable-update")
    assert {path.name: path.read_text() for path in golden.iterdir()} == recorded  # the same seed, the same run


def test_code_that_takes_other_steps_fails_until_it_is_recorded_again(run_tests, golden: Path) -> None:
    assert "1 passed" in run_tests(TEST, "--durable-update")
    said = run_tests(CHANGED + TEST)
    assert "NotReplayed: Workflow 'plugged' does not follow what is recorded of run 1 of instance 'p-1':" in said
    assert "The code calls step 'invoice', which is not recorded, where the record has step 'charge' (do)." in said
    assert "1 passed" in run_tests(CHANGED + TEST, "--durable-update")
    assert '"invoice"' in (golden / "test_it-after-a-nap-end.json").read_text()
    assert "1 passed" in run_tests(CHANGED + TEST)


def test_code_that_comes_out_differently_each_time_is_found_when_it_is_recorded(run_tests) -> None:
    said = run_tests(
        """
import itertools
passes = itertools.count()

@durable_workflow
def lottery(event, step):
    step.do(f"draw {next(passes)}", int)
    step.sleep("nap", 60)

def test_it(durable_harness, durable_golden):
    instance = durable_harness.create(lottery)
    durable_harness.run_until_idle()
    durable_golden.check(instance)
""",
        "--durable-update",
    )
    assert "NotReplayed: Workflow 'lottery' does not follow what is recorded" in said


def test_two_histories_of_a_test_need_two_names(run_tests) -> None:
    said = run_tests(
        """
def test_it(durable_harness, durable_golden):
    instance = durable_harness.create(plugged)
    durable_golden.check(instance, "new")
    durable_golden.check(instance, "new")
""",
        "--durable-update",
    )
    assert (
        "HarnessMisuse: test_it-new.json was checked before in this test. Give each history a name of its own." in said
    )
