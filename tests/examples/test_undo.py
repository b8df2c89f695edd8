"""examples/undo.py: what was done is taken back, wherever the trip ends and the worker dies."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from sqlalchemy import select

from celery_durable import Status
from celery_durable.testing import DurableHarness, assert_crash_safe
from examples import payments, undo

pytestmark = pytest.mark.durable(workflows=[undo.holiday])


@pytest.fixture(autouse=True)
def others() -> None:
    payments.open_books()
    undo.hotels.clear()


def book(harness: DurableHarness, card: str = "4242") -> Any:
    number = str(uuid.uuid4())
    handle = undo.holiday.create(undo.Trip(trip_id=number, cents=64000, card=card), id=number)
    harness.run_until_idle()
    return harness.instance(undo.holiday, handle.id)


def is_refunded(handle: Any) -> list[bool]:
    found = select(payments.payment.c.refunded).where(payments.payment.c.order_id == handle.id)
    with payments._engine.connect() as connection:
        return list(connection.execute(found).scalars())


def test_a_trip_is_booked(durable_harness: DurableHarness) -> None:
    handle = book(durable_harness)
    handle.send_event("ticket")
    durable_harness.run_until_idle()
    assert (handle.result(), is_refunded(handle), undo.hotels) == ("booked", [False], {handle.id})


def test_a_failed_step_takes_back_what_was_done_before(durable_harness: DurableHarness) -> None:
    handle = book(durable_harness, card=payments.DECLINED)
    assert (handle.status().status, is_refunded(handle), undo.hotels) == (Status.ERRORED, [], set())


def test_a_cancelled_trip_takes_back_everything(durable_harness: DurableHarness) -> None:
    handle = book(durable_harness)
    handle.cancel("too far")
    durable_harness.run_until_idle()
    assert (handle.status().status, is_refunded(handle), undo.hotels) == (Status.TERMINATED, [True], set())
    assert list(handle.statuses()) == [
        "reserve a room", "charge", "wait for the airline",
        "give the money back (cancelled)", "release the room (cancelled)",
    ]  # fmt: skip


def test_a_cancel_while_a_failure_is_taken_back_leaves_nothing_behind(
    durable_harness: DurableHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = book(durable_harness)
    closed, refund_order = [True], payments.refund_order

    def refund(trip_id: str) -> None:
        if closed:
            raise ConnectionError(closed.pop())
        refund_order(trip_id)

    monkeypatch.setattr(payments, "refund_order", refund)
    durable_harness.advance("3 days")
    handle.cancel()
    durable_harness.run_until_idle()
    assert (handle.status().status, is_refunded(handle), undo.hotels) == (Status.TERMINATED, [True], set())


def test_a_payment_whose_answer_was_lost_is_given_back(durable_harness: DurableHarness) -> None:
    durable_harness.faults.crash_in_step("charge", when="after")
    handle = book(durable_harness)
    handle.cancel()
    durable_harness.advance("5 minutes")
    assert (handle.status().status, is_refunded(handle), undo.hotels) == (Status.TERMINATED, [True], set())


def test_taking_back_is_crash_safe() -> None:
    trip = undo.Trip(trip_id="t-1", cents=64000, card=payments.DECLINED)
    assert_crash_safe(
        undo.holiday, trip, expect_error="NonRetryableError", side_effects=lambda _: undo.hotels, schedules=25
    )


def test_taking_back_a_cancelled_trip_is_crash_safe() -> None:
    trip = undo.Trip(trip_id="t-2", cents=64000, card="4242")
    assert_crash_safe(
        undo.holiday, trip, cancel_at="wait for the airline", side_effects=lambda _: undo.hotels, schedules=25
    )
