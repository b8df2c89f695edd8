"""examples/order_approval.py, through real operations on real tables."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from celery_durable import InstanceTerminal, Status, WorkflowParamsInvalid
from examples import order_approval as shop
from examples import payments


@pytest.fixture
def order(world) -> Any:
    shop.Base.metadata.create_all(world.durable.store.engine)
    payments.open_books()
    return world.workflow("order")


def start(order: Any, *, card: str = "4242") -> Any:
    number = str(uuid.uuid4())  # the provider's books outlive a test
    return order.create(shop.OrderIn(order_id=number, cents=12500, card=card), id=number)


def row(world: Any, handle: Any) -> shop.Order:
    with Session(world.durable.store.engine) as session:
        return session.get_one(shop.Order, handle.id)


def books(handle: Any) -> list[tuple[int, bool]]:
    """What the provider has charged for this order, and whether it gave it back."""
    with payments._engine.connect() as connection:
        found = sa.select(payments.payment.c.cents, payments.payment.c.refunded)
        return [tuple(each) for each in connection.execute(found.where(payments.payment.c.order_id == handle.id))]


def test_an_approved_order_is_charged_once_and_shipped(world, order) -> None:
    handle = start(order)
    assert handle.status().status is Status.WAITING
    assert row(world, handle).state == "charged"

    assert handle.send_event("approval", {"approved": True, "by": "eve"}) is True
    assert handle.result(timeout=0) == "shipped"
    assert world.completed(handle) == [
        "record order", "charge card", "ask for approval", "wait for approval", "mark shipped", "tell customer",
    ]  # fmt: skip
    shipped = row(world, handle)
    assert (shipped.state, shipped.changes, shipped.cents) == ("shipped", 3, 12500)
    assert shipped.payment == next(step.result for step in handle.history().steps if step.name == "charge card")
    assert books(handle) == [(12500, False)]


def test_a_refused_order_is_refunded(world, order) -> None:
    handle = start(order)
    handle.send_event("approval", {"approved": False, "by": "eve"})
    assert handle.result(timeout=0) == "refused"
    assert row(world, handle).state == "refused"
    assert books(handle) == [(12500, True)]


def test_an_order_that_nobody_decides_on_expires_after_a_day(world, order) -> None:
    handle = start(order)
    world.advance(hours=23, minutes=59)
    assert handle.status().status is Status.WAITING
    world.advance(minutes=1)
    assert handle.result(timeout=0) == "expired"
    assert books(handle) == [(12500, True)]
    with pytest.raises(InstanceTerminal):
        handle.send_event("approval", {"approved": True, "by": "eve"})


def test_a_declined_card_is_not_tried_again(world, order) -> None:
    handle = start(order, card=payments.DECLINED)
    assert handle.result(timeout=0) == "declined"
    charge = next(step for step in handle.history().steps if step.name == "charge card")
    assert (charge.attempts, charge.error.name) == (1, "CardDeclined")
    assert row(world, handle).state == "declined"
    assert books(handle) == []
    [line] = handle.logs(category="payments")
    assert (line.message, line.data) == ("not charged", {"reason": "CardDeclined"})


def test_a_busy_provider_is_asked_again_after_2_and_4_seconds(world, order) -> None:
    handle = start(order, card=payments.BUSY)
    assert world.completed(handle) == ["record order"]
    world.advance(seconds=2)
    assert world.completed(handle) == ["record order"]
    world.advance(seconds=4)
    charge = next(step for step in handle.history().steps if step.name == "charge card")
    assert (charge.status, charge.attempts) == ("completed", 3)
    assert books(handle) == [(12500, False)]


def test_an_order_without_a_price_is_refused_before_anything_is_written(order) -> None:
    with pytest.raises(WorkflowParamsInvalid, match=r"\$\.cents: Input should be greater than 0"):
        order.create({"order_id": "1", "cents": 0}, id="free")
    assert order.list().items == ()


def test_an_order_can_be_restarted(world, order) -> None:
    handle = start(order)
    handle.send_event("approval", {"approved": False, "by": "eve"})
    assert handle.restart() == 2
    handle.send_event("approval", {"approved": True, "by": "bob"})
    assert handle.result(timeout=0) == "shipped"
    assert books(handle) == [(12500, True), (12500, False)]  # another run has another idempotency key
