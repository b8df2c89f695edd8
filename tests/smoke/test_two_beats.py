"""Two beats with the same schedule, as after a failover: each scheduled time starts one instance."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from celery_durable.tasks.start import START
from tests.smoke.proc import until
from tests.smoke.site import REDIS_AND_POSTGRESQL, Site

pytestmark = [pytest.mark.smoke, pytest.mark.timeout(180)]


@pytest.mark.gate
@REDIS_AND_POSTGRESQL
def test_two_beats_start_one_instance_for_each_scheduled_time(site_with: Callable[..., Site]) -> None:
    entry = {"task": START, "schedule": 1.0, "args": [1], "kwargs": {"workflow": "sprint", "id": "s-{scheduled}"}}
    site = site_with(beat_schedule={"sprint": entry})
    worker = site.worker()
    beats = [site.beat(wait=False), site.beat(wait=False)]

    def sent() -> int:
        return sum(beat.text().count("Sending due task sprint") for beat in beats)

    until("four messages of each beat", lambda: all(b.text().count("Sending due task sprint") >= 4 for b in beats))
    for beat in beats:
        beat.terminate()
    surely_sent = sent() - len(beats)  # A beat logs before it sends, so its end may cut off the last message.
    until("the end of all starts", lambda: worker.text().count(f"Task {START}[") >= 2 * surely_sent)
    started = site.workflow("sprint").list(limit=1000).items
    assert 3 <= len(started) < surely_sent
    for each in started:
        site.instances.append(site.workflow("sprint").get(each.id))
    site.finish()
