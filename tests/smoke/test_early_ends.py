"""Each way to end a run early, at each place where it may be, as in tests/runner/test_early_ends.py, in real workers.

One worker of each pool takes all cells at once, so that the matrix is affordable.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from celery_durable import Status, WorkflowInstance
from celery_durable.errors import InstanceTerminal
from tests.runner.test_early_ends import CELLS, LINES, NEW, PAUSED, REASONS, RUNNING, what_was_done
from tests.smoke import early_ends
from tests.smoke.proc import until
from tests.smoke.site import REDIS_AND_POSTGRESQL, Site
from tests.support.invariants import open_rows

pytestmark = [pytest.mark.smoke, pytest.mark.slow, pytest.mark.timeout(300)]

ALL = [("order", *cell) for cell in CELLS] + [
    ("line", how, place) for place in LINES for how in REASONS if how != "error"
]


class EarlyEndsSite(Site):
    project = "tests.smoke.early_ends"
    build = staticmethod(early_ends.build)


@REDIS_AND_POSTGRESQL
@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_runs_end_wherever_they_are(make_site: Callable[..., Site], broker_url: str, store_url: str, pool: str) -> None:
    site = make_site(broker_url, store_url, kind=EarlyEndsSite, durable_dispatcher="worker")
    site.worker("--pool", pool, concurrency=4)
    made = {cell: create(site, *cell) for cell in ALL}
    for (_, how, place), instance in made.items():
        if how != "error" and place not in RUNNING:
            end(instance, how, place)
    until("the ends", lambda: all(each.status().status.is_terminal for each in made.values()))
    until("nothing is open", lambda: not open_rows(site.durable.internals.store))
    shown = {cell: show(instance) for cell, instance in made.items()}
    assert {cell: shown[cell] for cell in ALL if shown[cell] not in what_was_promised(*cell)} == {}
    site.check()


def create(site: Site, workflow: str, how: str, place: str) -> WorkflowInstance[Any]:
    run_at = datetime.now(UTC) + timedelta(hours=1) if place == NEW else None
    return site.workflow(workflow).create({"how": how, "place": place}, run_at=run_at)


def end(instance: WorkflowInstance[Any], how: str, place: str) -> None:
    """End it from outside, as soon as it is at its place."""
    until(f"{instance.id} is {place}", lambda: instance.status().status is Status.WAITING)
    if place == PAUSED:
        instance.pause()
    with suppress(InstanceTerminal):  # raised by the second cancel of a new run
        early_ends.ENDS[how](instance)


def show(instance: WorkflowInstance[Any]) -> tuple[str, str | None, list[str]]:
    """How it has ended, why, and what was done; of a linear run, the statuses of its steps."""
    history = instance.history()
    if instance.workflow.name == "line":
        done = [each.status.value for each in history.steps]
    else:
        named = ("charge", "ship", "bill", "refund", "mail")
        done = [each.name for each in history.steps if each.name in named and each.status == "completed"]
    return str(history.status.status), history.reason, done


def what_was_promised(workflow: str, how: str, place: str) -> list[tuple[str, str | None, list[str]]]:
    """What `show` may return. The worker may have noticed the first of two cancels before the second one comes."""
    is_superseded = place in RUNNING and how in ("cancel twice", "terminate")
    is_late = how == "cancel twice" and not is_superseded
    if workflow == "line":
        left = ["DONE", "RUNNING", "PENDING"] if is_superseded else LINES[place][1]
        return [("terminated", REASONS[each], left) for each in ([how, "cancel"] if is_late else [how])]
    is_first_cancel = how == "cancel twice" and place == NEW
    # The step that a superseded worker has called is not recorded.
    done = ["charge"] if is_superseded else what_was_done(how, place)
    status, reason = "errored" if how == "error" else "terminated", REASONS["cancel" if is_first_cancel else how]
    return [(status, reason, each) for each in ([done, [*done, "refund"]] if is_late else [done])]
