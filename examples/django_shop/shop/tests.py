"""The tests of the shop: ``python manage.py test``. They need no worker and no broker."""

from __future__ import annotations

import asyncio

from asgiref.sync import async_to_sync, sync_to_async
from django.db import transaction
from django.test import TestCase, TransactionTestCase

from celery_durable.contrib.django.testing import assert_crash_safe, make_harness
from shop.models import Email, Order, Payment
from shop.workflows import order


class Views(TestCase):
    def test_an_order_and_its_workflow_are_created_together(self) -> None:
        with make_harness([order]) as harness, self.captureOnCommitCallbacks(execute=True) as callbacks:
            self.client.post("/", {"customer": "ada@example.com", "amount": 500})
        placed = Order.objects.get()
        self.assertEqual(len(callbacks), 1)
        self.assertEqual([due.ref.instance_id for due in harness.messages], [f"order-{placed.pk}"])

    def test_an_order_that_is_rolled_back_has_no_workflow(self) -> None:
        with make_harness([order]):
            with self.assertRaises(RuntimeError), transaction.atomic():
                order.create(Order.objects.create(customer="ada@example.com", amount=500).pk)
                raise RuntimeError
            self.assertEqual(order.list().items, ())


class Workflows(TestCase):
    """In a TestCase, everything that the harness does is part of the test's transaction."""

    def setUp(self) -> None:
        self.harness = self.enterContext(make_harness([order]))

    def place(self, amount: int) -> Order:
        placed = Order.objects.create(customer="ada@example.com", amount=amount)
        self.instance = self.harness.create(order, placed.pk, id=f"order-{placed.pk}")
        self.harness.run_until_idle()
        return placed

    def test_a_small_order_is_shipped(self) -> None:
        placed = self.place(500)
        placed.refresh_from_db()
        self.assertEqual(placed.state, "shipped")
        self.assertEqual(Payment.objects.count(), 1)

    def test_a_large_order_waits_for_the_link(self) -> None:
        placed = self.place(20_000)
        self.assertEqual(Payment.objects.count(), 0)
        self.client.get(f"/orders/{placed.pk}/approve/{placed.token}/")
        self.harness.run_until_idle()
        self.assertEqual(self.instance.result(), "shipped")

    def test_a_large_order_is_refused_after_a_week(self) -> None:
        placed = self.place(20_000)
        self.harness.advance("8 days")
        placed.refresh_from_db()
        self.assertEqual((placed.state, Payment.objects.count()), ("refused", 0))


class AsyncCode(TestCase):
    """The async calls use the connection of Django's own async methods."""

    async def test_what_async_code_creates_is_part_of_the_test(self) -> None:
        with await sync_to_async(make_harness)([order]):
            placed = await Order.objects.acreate(customer="ada@example.com", amount=500)
            await order.acreate(placed.pk, id=f"order-{placed.pk}")
            self.assertEqual(len((await order.alist()).items), 1)
            self.assertEqual(await asyncio.to_thread(lambda: order.list().items), ())  # another connection


class AsyncBlocks(TransactionTestCase):
    async def test_what_async_code_creates_is_rolled_back_with_its_block(self) -> None:
        def place() -> None:
            with transaction.atomic():
                placed = Order.objects.create(customer="ada@example.com", amount=500)
                async_to_sync(order.acreate)(placed.pk)
                raise RuntimeError

        with await sync_to_async(make_harness)([order]):
            with self.assertRaises(RuntimeError):
                await sync_to_async(place)()
            self.assertEqual((await order.alist()).items, ())


class Crashes(TransactionTestCase):
    def test_no_crash_charges_twice_or_loses_an_email(self) -> None:
        def place(_: object) -> None:
            Order.objects.create(pk=1, customer="ada@example.com", amount=500, token="t")

        assert_crash_safe(order, 1, side_effects=[Order, Payment, Email], setup=place, schedules=20)

    def test_a_test_starts_without_the_instances_of_the_one_before(self) -> None:
        for _ in range(2):
            placed = Order.objects.create(customer="ada@example.com", amount=500)
            with make_harness([order]) as harness:
                harness.create(order, placed.pk, id="order-1")
                harness.run_until_idle()
