"""Lanes write in less what is written without them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from celery import Celery

from celery_durable import Step, WorkflowEvent
from celery_durable.operations.create import CreateOptions
from celery_durable.testing.clock import Clock
from tests.support.answers import answer
from tests.support.world import World

DIFFERENT = {"id", "instance_pk", "instance_id", "commit_id", "event_id", "attempt_token", "wait_event_type", "version"}
"""Columns that are random, name an instance, or count what was written."""
app = Celery("mill", set_as_current=False)


@app.task(name="mill.grind", shared=False)
def grind(number: int) -> int:
    """Never run here."""


def order(event: WorkflowEvent, step: Step) -> Any:
    step.sleep("rest", 60)
    step.log.info("charging")
    step.do("charge", lambda: 1)
    step.do("repeat", lambda tx: 1 / (tx.attempt - 1))
    approval = step.wait_for_event("approval", "approved", timeout=60).payload
    return [approval, step.map("grind", grind.s(), range(2))]


def fail(event: WorkflowEvent, step: Step) -> None:
    step.do("charge", lambda: 1)
    raise ValueError("sold out")


def play(world: World, name: str) -> Iterator[dict[str, list[Any]]]:
    """Run instances of each kind; yields what the tables have of them again and again."""
    world.clock = Clock()
    instance = world.workflow(order).run(id=f"{name}-1")
    world.workflow(fail).run(id=f"{name}-2")
    world.operations.create.batch("fail", [CreateOptions(id=f"{name}-{number}") for number in (3, 2, 4)])
    yield read(world, name)
    instance.send("early", id="e-1")
    world.run_after(61)
    yield read(world, name)
    world.run_after(11)  # the retry
    yield read(world, name)
    instance.send("approved", {"by": "us"})
    world.run_until_idle()
    for message in world.sent[-2:]:
        assert answer(world, message, "ground")
    yield read(world, name)
    world.run_until_idle()
    assert instance.output == [{"by": "us"}, ["ground", "ground"]]
    yield read(world, name)


def read(world: World, name: str) -> dict[str, list[Any]]:
    i = world.store.tables.instance
    its = {row.id: row.instance_id.removeprefix(name) for row in world.rows(sa.select(i)) if name in row.instance_id}
    found = {}
    for table in i.metadata.sorted_tables:
        key = table.c.get("instance_pk", i.c.id if table is i else None)
        if key is not None:
            columns = [column for column in table.c if column.name not in DIFFERENT]
            rows = world.rows(sa.select(key, *columns).where(key.in_(its)))
            found[table.name] = sorted([its[row[0]], *map(str, row[1:])] for row in rows)
    return found


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_the_same_rows_are_written_without_statements_that_combine_several(world: World) -> None:
    combined = list(play(world, "combined"))
    world.store.combines_writes = world.worker.store.combines_writes = False
    assert list(play(world, "apart")) == combined
    assert {"workflow_step", "workflow_event", "workflow_log", "workflow_item"} <= {
        name for name, rows in combined[-1].items() if rows
    }
