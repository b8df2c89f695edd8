"""One event for each failed run, with the real Sentry SDK in a real worker, also if the setting makes tasks fail."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from celery_durable.contrib.sentry import before_send
from tests.docs.blocks import ROOT
from tests.support.three_frames import FILE, LINE


@pytest.mark.gate
@pytest.mark.timeout(300)
@pytest.mark.parametrize("mode", ["succeeding", "failing"])
def test_a_failed_run_is_one_event_grouped_and_tagged(tmp_path: Path, mode: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.contrib.sentry_worker", str(tmp_path / "shop.sqlite"), mode],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["states"] == ["errored", "errored"]
    events = {event["tags"]["durable.workflow"]: event for event in found["events"]}
    assert sorted(events) == ["function", "linear"]
    assert len(found["events"]) == 2
    for kind, event in events.items():
        assert event["fingerprint"] == ["celery_durable", kind, "charge", "KeyError"]
        attempt = "2" if kind == "function" else "1"
        assert event["tags"] == {
            "durable.workflow": kind,
            "durable.instance_id": f"{kind}-1",
            "durable.run_number": "1",
            "durable.step": "charge",
            "durable.attempt": attempt,
        }
        breadcrumbs = [each.get("message", "") for each in event["breadcrumbs"]["values"]]
        last = f"Attempt {attempt} of step 'charge' of {kind}/{kind}-1#1 failed: KeyError: 'total'"
        assert last in breadcrumbs
        frames = [frame for each in event["exception"]["values"] for frame in each["stacktrace"]["frames"]]
        assert (FILE, LINE) in [(frame["abs_path"], frame["lineno"]) for frame in frames]
    # Celery says in one line that a task failed as expected, without a traceback of its own.
    failed_tasks = done.stderr.count("raised expected: ")
    assert failed_tasks == (2 if mode == "failing" else 0)
    assert done.stderr.count("Traceback (most recent call last):") <= 7


def test_other_events_are_left_as_they_are() -> None:
    event: dict[str, Any] = {"message": "something else"}
    assert before_send(event, {}) == {"message": "something else"}
