"""Published values in a harness: read by the handle, by its clock, and the same wherever runners die."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from celery_durable import Published, Step, WorkflowEvent, durable_workflow
from celery_durable.testing import START, DurableHarness, assert_crash_safe


def pack(step: Step, boxes: int) -> int:
    for box in range(boxes):
        step.publish("boxes", {"done": box + 1, "total": boxes})
    return boxes


@durable_workflow
def packing(event: WorkflowEvent[int], step: Step) -> int:
    step.publish("phase", "packs")
    packed = step.do("pack", pack, step, event.payload)
    step.sleep("the road", "2 hours")
    step.publish("phase", "unpacks")
    return step.do("unpack", int, packed)


def test_the_handle_reads_what_is_published() -> None:
    seen: list[Any] = []

    def count(event: WorkflowEvent[Any], step: Step) -> None:
        def work() -> None:
            for number in range(3):
                step.publish("n", number)
                seen.append({key: each.value for key, each in handle.published().items()})
                harness.clock.advance("1 second")

        step.do("work", work)

    with DurableHarness([count, packing]) as harness:
        handle = harness.create(count)
        harness.run_until_idle()
        assert seen == [{"n": 0}, {"n": 1}, {"n": 2}]
        moved = harness.create(packing, 12)
        assert moved.published() == {}
        started = harness.clock.now
        harness.run_until_idle()
        assert moved.published() == {
            "phase": Published("packs", updated_at=started),
            "boxes": Published({"done": 12, "total": 12}, updated_at=started),
        }
        assert started == START + timedelta(seconds=3)
        harness.advance("2 hours")
        assert moved.has_ended
        assert moved.published()["phase"] == Published("unpacks", updated_at=started + timedelta(hours=2))


@pytest.mark.gate
def test_a_workflow_that_publishes_is_safe_wherever_its_runners_die() -> None:
    report = assert_crash_safe(packing, 3, schedules=60)
    assert report.crashes > report.checkpoints > 10
