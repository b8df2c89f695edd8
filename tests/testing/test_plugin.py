"""The pytest plugin, in pytest sessions of its own."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.mark.gate
def test_a_harness_is_there_for_every_workflow_that_is_registered(run_tests_in_new_interpreter) -> None:
    said = run_tests_in_new_interpreter("""
def test_it(durable_harness):
    handle = plugged.create()
    durable_harness.advance("3 days")
    assert durable_harness.instance(plugged, handle.id).result() == "paid"
""")
    assert "1 passed" in said, said


def test_the_marker_says_what_the_harness_is_made_with(run_tests) -> None:
    said = run_tests("""
def alone(event, step):
    return step.do("one", int)

@pytest.mark.durable([alone], seed=7, settings={"durable_lease_seconds": 5})
def test_it(durable_harness):
    assert durable_harness.seed == 7
    assert durable_harness.settings.lease_seconds == 5
    assert list(durable_harness.durable.workflows) == ["alone"]

@pytest.mark.durable(workflows=[alone], seed=7)
class TestAll:
    def test_it(self, durable_harness):
        assert durable_harness.seed == 7
""")
    assert "2 passed" in said, said


def test_a_failed_test_shows_its_seed_and_what_was_delivered(run_tests) -> None:
    test = """
def test_it(durable_harness):
    durable_harness.create(plugged, id="p-1")
    durable_harness.advance("1 day")
    assert 0
"""
    said = run_tests(test)
    assert "durable harness" in said
    assert "seed 0, <Clock 2030-01-02 00:00:00.000000 UTC>" in said
    assert "2030-01-01 00:00:00 runner-1 plugged/p-1#1: waiting until 2030-01-04 00:00:00 UTC" in said
    assert "seed 42, <Clock" in run_tests(test, "--durable-seed", "42")


def test_a_failed_test_is_not_blamed_for_a_mock_that_it_did_not_reach(run_tests) -> None:
    said = run_tests("""
def test_it(durable_harness):
    durable_harness.mocks.mock_step_result("ship", 1)
    assert 0
""")
    assert "1 failed" in said
    assert "1 error" not in said, said


def test_the_database_is_the_one_of_an_overridden_durable_store(run_tests, tmp_path: Path) -> None:
    said = run_tests(
        """
def test_it(durable_harness):
    durable_harness.create(plugged)
""",
        conftest=f"""
import pytest

@pytest.fixture
def durable_store():
    return "sqlite:///{tmp_path}/own.sqlite3"
""",
    )
    assert "1 passed" in said, said
    assert (tmp_path / "own.sqlite3").exists()


@pytest.mark.gate
def test_the_plugin_is_loaded_by_itself_and_brings_no_celery_along(run_tests, run_tests_in_new_interpreter) -> None:
    said = run_tests_in_new_interpreter(
        """
def test_it(heavy):
    assert heavy == []
""",
        *("-p", "no:celery"),  # that of pytest-celery, where it is installed, imports it
        conftest="""
import sys
import pytest

HEAVY = [name for name in ("celery", "sqlalchemy", "pydantic", "celery_durable.app") if name in sys.modules]

@pytest.fixture
def heavy(pytestconfig):
    assert pytestconfig.pluginmanager.has_plugin("celery_durable")
    return HEAVY
""",
    )
    assert "1 passed" in said, said
    listed = run_tests("", "--markers")
    assert "@pytest.mark.durable(workflows=None, *, seed=0, start=..., settings=None, wipe=False): " in listed
    listed = run_tests("", "--fixtures")
    assert "durable_harness" in listed
    assert "durable_store" in listed


def test_it_works_beside_celerys_own_plugin(run_tests) -> None:
    said = run_tests(
        """
def test_it(durable_harness, celery_app):
    @celery_app.task
    def add(x, y):
        return x + y

    celery_app.conf.task_always_eager = True
    durable_harness.create(plugged)
    durable_harness.advance("3 days")
    assert add.delay(1, 2).get() == 3
""",
        "-p",
        "celery.contrib.pytest",
    )
    assert "1 passed" in said, said
