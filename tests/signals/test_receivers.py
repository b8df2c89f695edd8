"""Receivers: for one workflow, that fail, that use the database; and what goes around a pass and a body."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from celery_durable import signals
from tests.signals.conftest import ALL
from tests.signals.flows import RUN, failing, on_sqlite, order, writing

# --- receivers ----------------------------------------------------------------------------------


@on_sqlite
def test_a_receiver_may_be_for_one_workflow_alone(store_url: str, make_harness: Any) -> None:
    heard: list[str] = []

    def alert(sender: str, error_name: str, **_: Any) -> None:
        heard.append(f"{sender}: {error_name}")

    signals.workflow_failed.connect(alert, sender="failing")
    harness = make_harness(failing, order, store_url=store_url, wipe=True)
    harness.create(failing)
    harness.run_until_idle()
    assert heard == ["failing: LookupError"]
    signals.workflow_failed.disconnect(alert, sender="failing")
    signals.workflow_failed.connect(alert, sender="order")
    harness.create(failing)
    harness.run_until_idle()
    signals.workflow_failed.disconnect(alert, sender="order")
    assert heard == ["failing: LookupError"]


@on_sqlite
@pytest.mark.parametrize("error", [ZeroDivisionError, SystemExit, GeneratorExit])
def test_a_receiver_that_fails_is_logged_and_breaks_nothing(
    store_url: str, make_harness: Any, caplog: pytest.LogCaptureFixture, error: type[BaseException]
) -> None:
    def break_(**_: Any) -> None:
        raise error("in a receiver")

    for signal in ALL.values():
        signal.connect(break_)
    harness = make_harness(order, store_url=store_url, wipe=True)
    instance = harness.create(order)
    instance.send_event("approved")
    harness.advance("70 seconds")
    for signal in ALL.values():
        signal.disconnect(break_)
    assert instance.result() == "TooExpensive"
    assert "in a receiver" in caplog.text


def test_a_receiver_may_use_the_database(store_url: str, make_harness: Any) -> None:
    """Also after a step that had a session of its own, on SQLite where that holds the only write lock."""
    harness = make_harness(writing, failing, store_url=store_url, wipe=True)

    def follow_up(**_: Any) -> None:
        harness.create(failing, id="follow-up")

    signals.step_completed.connect(follow_up, sender="writing")
    harness.create(writing)
    harness.tick()
    signals.step_completed.disconnect(follow_up, sender="writing")
    assert not harness.instance(failing, "follow-up").has_ended


# --- around -------------------------------------------------------------------------------------


class Manager:
    """A context manager that keeps a diary."""

    def __init__(self, diary: list[Any], **told: Any) -> None:
        self.diary, self.told = diary, told

    def __enter__(self) -> None:
        self.diary.append(("enter", self.told))

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        self.diary.append(("exit", kind and kind.__name__))
        return True  # which holds nothing up


@on_sqlite
@pytest.mark.parametrize("error", [ZeroDivisionError, SystemExit, GeneratorExit])
def test_what_goes_around_a_pass_and_a_body(store_url: str, make_harness: Any, error: type[BaseException]) -> None:
    diary: list[Any] = []

    @signals.around_pass.connect
    @signals.around_step.connect
    def around(**told: Any) -> Manager:
        return Manager(diary, **told)

    def broken(**_: Any) -> Manager:
        raise error

    signals.around_pass.connect(broken)
    signals.around_pass.connect(around)  # is connected already
    harness = make_harness(order, store_url=store_url, wipe=True)
    harness.create(order, id="o-1")
    harness.tick()
    for each in (signals.around_pass, signals.around_step):
        each.disconnect(around)
        each.disconnect(broken)
    assert diary == [
        ("enter", {**RUN, "latency": timedelta(0)}),
        ("enter", {**RUN, "step": "charge", "step_key": "charge", "attempt": 1}),
        ("exit", "OSError"),
        ("exit", None),
    ]
    assert harness.instance(order, "o-1").is_waiting
