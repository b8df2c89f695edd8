"""examples/order_approval.py, tested as an author would: with the fixture `durable_harness`."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import select

from celery_durable import InstanceTerminal, Status, WorkflowParamsInvalid
from celery_durable.testing import DurableHarness, HarnessInstance
from examples import order_approval as shop
from examples import payments

pytestmark = pytest.mark.durable(workflows=[shop.order])
Start = Callable[..., HarnessInstance[Any]]


@pytest.fixture
def start(durable_harness: DurableHarness) -> Start:
    durable_harness.create_tables(shop.Base.metadata)
    payments.open_books()

    def start(*, card: str = "4242") -> HarnessInstance[Any]:
        number = str(uuid.uuid4())  # the provider's books outlive a test
        handle = shop.order.create(shop.OrderIn(order_id=number, cents=12500, card=card), id=number)
        durable_harness.run_until_idle()
        return durable_harness.instance(shop.order, handle.id)

    return start


def row(harness: DurableHarness, handle: Any) -> shop.Order:
    with harness.session() as session:
        return session.get_one(shop.Order, handle.id)


def books(handle: Any) -> list[tuple[int, bool]]:
    """What the provider has charged for this order, and whether it gave it back."""
    with payments._engine.connect() as connection:
        found = select(payments.payment.c.cents, payments.payment.c.refunded)
        return [tuple(each) for each in connection.execute(found.where(payments.payment.c.order_id == handle.id))]


def completed(handle: HarnessInstance[Any]) -> list[str]:
    return [name for name, status in handle.statuses().items() if status == "completed"]


def test_an_approved_order_is_charged_once_and_shipped(durable_harness, start: Start) -> None:
    handle = start()
    assert handle.is_waiting
    assert row(durable_harness, handle).state == "charged"

    assert handle.send_event("approval", {"approved": True, "by": "eve"}) is True
    durable_harness.run_until_idle()
    assert handle.result() == "shipped"
    assert completed(handle) == [
        "record order", "charge card", "ask for approval", "wait for approval", "mark shipped", "tell customer",
    ]  # fmt: skip
    shipped = row(durable_harness, handle)
    assert (shipped.state, shipped.changes, shipped.cents) == ("shipped", 3, 12500)
    assert shipped.payment == handle.step("charge card").result
    assert books(handle) == [(12500, False)]


def test_a_refused_order_is_refunded(durable_harness, start: Start) -> None:
    durable_harness.mocks.mock_event("approval", {"approved": False, "by": "eve"})
    handle = start()
    assert handle.result() == "refused"
    assert row(durable_harness, handle).state == "refused"
    assert books(handle) == [(12500, True)]


def test_an_order_that_nobody_decides_on_expires_after_a_day(durable_harness, start: Start) -> None:
    handle = start()
    durable_harness.advance("23 hours 59 minutes")
    assert handle.status().status is Status.WAITING
    durable_harness.advance("1 minute")
    assert handle.result() == "expired"
    assert books(handle) == [(12500, True)]
    with pytest.raises(InstanceTerminal):
        handle.send_event("approval", {"approved": True, "by": "eve"})


def test_a_declined_card_is_not_tried_again(durable_harness, start: Start) -> None:
    handle = start(card=payments.DECLINED)
    assert handle.result() == "declined"
    charge = handle.step("charge card")
    assert (charge.attempts, charge.error.name) == (1, "CardDeclined")
    assert row(durable_harness, handle).state == "declined"
    assert books(handle) == []
    [line] = handle.logs(category="payments")
    assert (line.message, line.data) == ("not charged", {"reason": "CardDeclined"})


def test_a_busy_provider_is_asked_again_after_2_and_4_seconds(durable_harness, start: Start) -> None:
    handle = start(card=payments.BUSY)
    assert completed(handle) == ["record order"]
    durable_harness.advance(2)
    assert completed(handle) == ["record order"]
    durable_harness.advance(4)
    charge = handle.step("charge card")
    assert (charge.status, charge.attempts) == ("completed", 3)
    assert books(handle) == [(12500, False)]


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_worker_that_dies_in_the_payment_charges_once(durable_harness, start: Start, when) -> None:
    durable_harness.faults.crash_in_step("charge card", when=when)
    durable_harness.mocks.mock_event("approval", {"approved": True, "by": "eve"})
    handle = start()
    assert completed(handle) == ["record order"]
    assert books(handle) == [(12500, False)] * (when == "after")
    durable_harness.advance("2 minutes")
    assert handle.result() == "shipped"
    assert books(handle) == [(12500, False)]  # the bank knew the key
    assert row(durable_harness, handle).changes == 3


def test_an_order_without_a_price_is_refused_before_anything_is_written(durable_harness) -> None:
    with pytest.raises(WorkflowParamsInvalid, match=r"\$\.cents: Input should be greater than 0"):
        shop.order.create({"order_id": "1", "cents": 0}, id="free")
    assert durable_harness.workflow(shop.order).list().items == ()


def test_an_order_can_be_restarted(durable_harness, start: Start) -> None:
    durable_harness.mocks.mock_event("approval", {"approved": False, "by": "eve"}, times=1)
    durable_harness.mocks.mock_event("approval", {"approved": True, "by": "bob"})
    handle = start()
    assert handle.restart() == 2
    durable_harness.run_until_idle()
    assert handle.result() == "shipped"
    assert books(handle) == [(12500, True), (12500, False)]  # another run has another idempotency key
