"""Pages of a run's history, in both orders, and where a run stands."""

from __future__ import annotations

from typing import Any

import pytest

from celery_durable.model import StepStatus, StepType
from celery_durable.store.instances import lists
from celery_durable.store.runs import history
from tests.store.world import World, seconds, step


@pytest.mark.parametrize("newest_first", [False, True])
def test_steps_come_page_by_page_in_both_orders(world: World, newest_first: bool) -> None:
    claim = world.claim(world.create())
    for seq in range(1, 6):
        world.commit(claim, step(f"s-{seq}", seq=seq))
    world.commit(claim, step("also", seq=3))  # rows of one seq have an order too

    def page(after: tuple[int, str] | None) -> list[tuple[int, str]]:
        found = world.store.read(
            lambda tx: history.read_step_page(tx, claim.pk, 1, after=after, newest_first=newest_first, limit=2)
        )
        return [(seq, record.step_key) for seq, record in found]

    pages: list[Any] = [page(None)]
    while len(pages[-1]) == 2:
        pages.append(page(pages[-1][-1]))
    wanted = [(1, "s-1"), (2, "s-2"), (3, "also"), (3, "s-3"), (4, "s-4"), (5, "s-5")]
    assert [item for page in pages for item in page] == (wanted[::-1] if newest_first else wanted)


def test_events_come_page_by_page_in_both_orders(world: World) -> None:
    ref = world.create()
    for number in range(3):
        world.send(ref, "approval", str(number), id=f"e-{number}")
    pk = world.row(ref).pk

    def ids(**given: Any) -> list[str]:
        return [event.event_id for event in world.store.read(lambda tx: history.read_events(tx, pk, 1, **given))]

    first, second, third = world.store.read(lambda tx: history.read_events(tx, pk, 1))
    assert ids(limit=2) == ["e-0", "e-1"]
    assert ids(limit=2, after=second.seq) == ["e-2"]
    assert ids(limit=2, newest_first=True) == ["e-2", "e-1"]
    assert ids(limit=2, newest_first=True, after=second.seq) == ["e-0"]
    assert ids(after=third.seq) == ids(newest_first=True, after=first.seq) == []


def test_the_current_step_is_the_open_step_that_is_due_first(world: World) -> None:
    claim = world.claim(world.create())

    def current() -> str | None:
        found = world.store.read(lambda tx: lists.find_current_step(tx, claim.pk, 1))
        assert found is None or found.result is None
        return None if found is None else found.step_key

    assert current() is None
    world.commit(claim, step("one", seq=1, result='{"large": 1}'))
    world.commit(claim, step("two", seq=2))
    assert current() == "two"
    for key, wait in (("late", 60), ("soon", 5)):
        sleep = step(key, StepStatus.WAITING, seq=3, type=StepType.SLEEP, wake_in=seconds(wait))
        world.commit(claim, sleep)
    assert current() == "soon"
    world.commit(claim, step("runs", StepStatus.PENDING, seq=1, attempts=1))
    assert current() == "runs"
