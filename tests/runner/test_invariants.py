"""The invariants that every engine test ends with: a broken one is named, with the row that breaks it."""

from __future__ import annotations

import pytest
import sqlalchemy as sa

from celery_durable import Step, WorkflowEvent
from tests.support import invariants
from tests.support.world import World


@pytest.mark.parametrize("database", ["sqlite", "postgresql", "mariadb"], indirect=True)
def test_broken_invariants_are_named_with_their_rows(world: World) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step) -> None:
        step.do("charge", lambda: "paid")

    instance = order.run()
    invariants.check(world)
    with world.store.engine.begin() as connection:
        connection.execute(sa.update(world.store.tables.step).values(finished_at=None))
        connection.execute(sa.update(world.store.tables.instance).values(crash_count=2))
    with pytest.raises(AssertionError) as caught:
        invariants.check(world)
    pk = instance.row.id
    assert [line for line in str(caught.value).splitlines() if line.startswith(("I8b", "F4"))] == [
        "F4 each death of a worker is recorded: ('i-1', 2)",
        f"I8b a step that ended has its time, result or error, and only then: ({pk}, 'charge', 'completed')",
    ]
    world.exempt |= {"I8b": "broken by this test", "F4": "broken by this test"}
