"""Instances that are created in a caller's transaction."""

from __future__ import annotations

import pydantic
import pytest

from celery_durable import CreateOptions, Step, WorkflowEvent
from tests.support.world import World


class OrderIn(pydantic.BaseModel):
    order_id: str
    cents: int = 5


@pytest.fixture
def order(world: World):
    @world.workflow
    def order(event: WorkflowEvent[OrderIn], step: Step):
        return f"{event.payload.order_id}: {event.payload.cents}"

    return order


GOOD = {"order_id": "42"}


def ids(world: World) -> list[str]:
    return sorted(item.id for item in world.operations.queries.list("order").items)


def test_nobody_is_told_before_the_outer_transaction_commits(world: World, order) -> None:
    with world.session() as session:
        session.begin()
        with session.begin_nested():
            order.create(GOOD, id="o-1", session=session)
        assert world.messages == []
        session.commit()
        assert len(world.messages) == 1


def test_a_batch_in_a_callers_transaction_is_there_when_that_commits(world: World, order) -> None:
    batch = [CreateOptions("o-1", OrderIn(order_id="1")), CreateOptions("o-2", OrderIn(order_id="2"))]
    with world.session() as session:
        assert world.operations.create.batch("order", batch, session=session) == ["o-1", "o-2"]
        session.rollback()
        assert world.operations.create.batch("order", batch[:1], session=session) == ["o-1"]
        assert (ids(world), world.messages) == ([], [])
        session.commit()
    assert ids(world) == ["o-1"]
    assert [due.ref.instance_id for due in world.messages] == ["o-1"]


def test_a_savepoint_that_rolls_back_takes_its_instance_with_it(world: World, order) -> None:
    with world.session() as session:
        order.create(GOOD, id="kept", session=session)
        savepoint = session.begin_nested()
        world.operations.create.instance("order", GOOD, id="gone", session=session)
        savepoint.rollback()
        session.commit()
    assert ids(world) == ["kept"]
    assert sorted(world.tick()) == ["complete", "noop: not due, or claimed by another worker"]  # a message too many
