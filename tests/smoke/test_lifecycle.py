"""The whole life of an instance on a real worker and a real beat, on every broker and database."""

from __future__ import annotations

import pytest

from tests.smoke.site import Site

pytestmark = [pytest.mark.smoke, pytest.mark.timeout(400)]

EACH_ONCE = [("redis", "postgresql"), pytest.param("rabbitmq", "mariadb", marks=pytest.mark.gate)]
THE_OTHERS = [("redis", "mariadb"), ("rabbitmq", "postgresql")]


@pytest.mark.parametrize(
    ("broker", "database"),
    [*EACH_ONCE, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in THE_OTHERS)],
    indirect=True,
)
def test_an_instance_lives_its_whole_life(site: Site) -> None:
    beat = site.beat(wait=False)
    worker = site.worker()
    beat.wait_for_log("The durable dispatcher is running")
    instance = site.create("lifecycle", 7)
    instance.send_event("answer", {"is": "yes"})
    expected = {"first": 7, "flaky": "at last", "answer": {"is": "yes"}, "branches": [0, 1, 2, None]}
    assert instance.result("30 seconds") == expected
    before = instance.history()

    assert instance.restart() == 2
    site.wait_for_body(instance, "book first")
    instance.send_event("answer", {"is": "no"})
    assert instance.result("30 seconds") == {**expected, "answer": {"is": "no"}}
    assert instance.history(run=1) == before

    flaky = next(step for step in instance.history().steps if step.name == "book flaky")
    assert (flaky.attempts, flaky.error) == (3, None)
    assert [line.message for line in instance.logs() if line.category == "workflow" and not line.is_replay]
    site.finish()
    assert worker.text().count("Traceback") == 2 * 2  # the attempts of "book flaky" that failed, in two runs
    assert "Traceback" not in beat.text()
