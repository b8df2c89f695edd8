"""Passes with many short steps: what their commits write to the row of the instance (LAW 2)."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from celery_durable import Step, WorkflowEvent
from celery_durable.model import from_us
from tests.store.world import LEASE
from tests.support.world import World


def test_the_commits_of_a_pass_renew_its_lease_where_the_renewer_finds_the_row_locked(world: World) -> None:
    left: list[timedelta] = []

    @world.workflow
    def order(event: WorkflowEvent, step: Step) -> None:
        for number in range(12):
            step.do(f"step {number}", world.clock.advance, 4)
            left.append(from_us(instance.row.lease_until) - world.now)

    instance = order.create()
    assert instance.advance() == "complete"
    assert min(left) > LEASE / 2


def test_a_step_that_succeeds_at_once_changes_nothing_in_its_instance(world: World) -> None:
    rows: list[Any] = []

    @world.workflow
    def order(event: WorkflowEvent, step: Step) -> None:
        rows.append(instance.row)
        for number in range(3):
            step.do(f"step {number}", world.clock.advance, 1)
            rows.append(instance.row)

    instance = order.create()
    assert instance.advance() == "complete"
    assert rows == [rows[0]] * 4
