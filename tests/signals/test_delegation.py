"""Signals of steps that others do: each attempt that is sent is told, and how it ended; no body, so no duration."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from celery_durable import Retries, Step, WorkflowEvent, durable_workflow
from celery_durable.testing import DurableHarness
from tests.signals.conftest import Ear

MakeHarness = Callable[..., DurableHarness]
RUN = {"workflow": "media", "instance_id": "m-1", "run_number": 1}


@durable_workflow(name="signalled-rest")
def resting(event: WorkflowEvent[Any], step: Step) -> str:
    step.sleep("nap", "1 hour")
    return "rested"


def media(event: WorkflowEvent[Any], step: Step) -> Any:
    thumb = step.task("thumb", "media.resize", timeout="1 hour", retries=Retries(limit=1, delay=30))
    return thumb, step.child("rest", resting, id="r-1")


def of_step(name: str, type_: str, attempt: int = 1) -> dict[str, Any]:
    return {**RUN, "step": name, "step_key": name, "type": type_, "attempt": attempt}


def test_each_attempt_of_a_task_and_a_child_are_told(ear: Ear, make_harness: MakeHarness) -> None:
    harness = make_harness(media, resting)
    harness.mocks.mock_step_error("thumb", OSError("disk full"), times=1)
    harness.mocks.mock_step_result("thumb", "small")
    harness.create(media, id="m-1")
    harness.advance("2 hours")
    told = [(name, about) for name, sender, about in ear.heard if sender == "media" and name.startswith("step_")]
    failed = {"error_name": "OSError", "error_message": "disk full", "exception": None}
    assert told == [
        ("step_started", of_step("thumb", "task")),
        ("step_retrying", {**of_step("thumb", "task"), "duration": None, "delay": timedelta(seconds=30), **failed}),
        ("step_started", of_step("thumb", "task", 2)),
        ("step_completed", {**of_step("thumb", "task", 2), "duration": None}),
        ("step_started", of_step("rest", "child")),
        ("step_completed", {**of_step("rest", "child"), "duration": None}),
    ]
    assert [about["instance_id"] for about in ear.told("workflow_created")] == ["m-1", "r-1"]
    assert ear.told("event_received") == []  # what they answer is for nobody else


def test_the_ends_of_those_that_fail_are_told(ear: Ear, make_harness: MakeHarness) -> None:
    harness = make_harness(media, resting)
    harness.mocks.mock_step_error("thumb", OSError("disk full"))
    harness.mocks.disable_retry_delays()
    harness.create(media, id="m-1")
    harness.run_until_idle()
    failed = {"duration": None, "error_name": "OSError", "error_message": "disk full", "exception": None}
    assert ear.told("step_failed") == [{**of_step("thumb", "task", 2), **failed}]

    ear.heard.clear()
    harness.mocks.mock_step_result("thumb", 1)
    harness.durable.internals.operations.interventions.set_result("media", "m-1", "thumb", "by hand", by="eve")
    harness.run_until_idle()
    harness.instance(resting, "r-1").terminate("enough")
    harness.run_until_idle()
    assert [(told["step"], told["action"]) for told in ear.told("step_intervened")] == [("thumb", "set_result")]
    (lost,) = ear.told("step_failed")
    assert (lost["step"], lost["type"], lost["error_name"]) == ("rest", "child", "ChildTerminated")
