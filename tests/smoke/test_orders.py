"""A storm over orders that fail or are cancelled at any time: nobody pays for what was not shipped."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import sqlalchemy as sa

from celery_durable.errors import InstanceTerminal
from celery_durable.model import Status
from tests.smoke import orders
from tests.smoke.proc import Proc, until
from tests.smoke.site import PAIRS, Site
from tests.support.invariants import open_rows

pytestmark = [pytest.mark.smoke, pytest.mark.slow, pytest.mark.timeout(600)]

_ORDERS, _AT_ONCE, _SECONDS_BETWEEN, _SHARE = 200, 5, 0.08, 1 / 3
_SETTINGS: dict[str, Any] = {
    "durable_lease_seconds": 2.0,
    "durable_redispatch_max_seconds": 4.0,
    "durable_max_crashes": 1_000_000,  # what dies here dies of the storm
}


class OrdersSite(Site):
    project = "tests.smoke.orders"
    build = staticmethod(orders.build)

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        orders.metadata.drop_all(self.engine)
        orders.metadata.create_all(self.engine)

    def close(self) -> None:
        for proc in self.procs:
            proc.clean_up()
        orders.metadata.drop_all(self.engine)
        super().close()

    def balances(self) -> dict[str, set[int]]:
        """How often each thing was done of an order and not taken back."""
        with self.engine.connect() as connection:
            found = Counter(tuple(row) for row in connection.execute(sa.select(orders.books.c["order_id", "what"])))
        return {
            each.id: {found[each.id, what] - found[each.id, opposite] for what, opposite in orders.OPPOSITES.items()}
            for each in self.instances
        }


class Customers:
    """They order, and cancel some orders soon after; other orders fail."""

    def __init__(self, site: OrdersSite, dice: random.Random) -> None:
        self._site, self._dice, self._started_at = site, dice, time.monotonic()
        self._to_cancel: list[tuple[float, Any]] = []
        self.failing, self.cancelled = set[str](), set[str]()

    def act(self) -> bool:
        """Do what is due; return whether all orders have ended."""
        passed = time.monotonic() - self._started_at
        made = len(self._site.instances)
        while len(self._site.instances) < min(_ORDERS, passed / _SECONDS_BETWEEN, made + _AT_ONCE):
            self._order(f"o-{len(self._site.instances)}", passed)
        for due in [due for due in self._to_cancel if due[0] <= passed]:
            self._to_cancel.remove(due)
            with suppress(InstanceTerminal):
                due[1].cancel("sold twice")
                self.cancelled.add(due[1].id)
        return len(self._site.instances) == _ORDERS and not self._to_cancel and not self._site.open_instances()

    def _order(self, order_id: str, now: float) -> None:
        fails = {self._dice.choice(orders.STEPS): self._dice.choice(["before", "after"])}
        if self._dice.random() < _SHARE:
            self.failing.add(order_id)
        with self._site.engine.connect() as connection:
            connection.execute(sa.insert(orders.accounts).values(order_id=order_id, is_closed=False))
        instance = self._site.create("order", fails if order_id in self.failing else {}, order_id)
        if self._dice.random() < _SHARE:
            self._to_cancel.append((now + self._dice.expovariate(0.7), instance))

    def find_mistakes(self) -> Iterator[str]:
        """Find orders that ended as they may not, or of which something was kept or is missing."""
        balances = self._site.balances()
        for order in self._site.instances:
            status = order.status()
            may = {Status.ERRORED if order.id in self.failing else Status.COMPLETE}
            may |= {Status.TERMINATED} if order.id in self.cancelled else set()
            if status.status not in may or balances[order.id] != {int(status.status is Status.COMPLETE)}:
                steps = [(step.step_key, str(step.status)) for step in order.history().steps]
                yield f"{order.id}: {status}, should be {may}; {balances[order.id]}; {steps}"


class Killer:
    """Kills a pool process every second or so, and at times a whole worker."""

    def __init__(self, site: Site, dice: random.Random) -> None:
        self._site, self._dice = site, dice
        self._workers = [self._start() for _ in range(2)]
        for worker in self._workers:
            worker.wait_for_log(r"ready\.")
        self._next_at, self.kills = 0.0, Counter[str]()

    def _start(self) -> Proc:
        return self._site.worker(concurrency=3, wait=False)

    def act(self) -> None:
        if time.monotonic() < self._next_at:
            return
        self._next_at = time.monotonic() + self._dice.uniform(0.5, 1.5)
        index = self._dice.randrange(len(self._workers))
        worker = self._workers[index]
        if not worker.is_running:  # Celery gives up if a pool process dies while it starts
            self._workers[index] = self._start()
        elif self._dice.random() < 0.05:
            worker.clean_up()
            self.kills["workers"] += 1
        elif "ready." in worker.text() and (children := worker.children()):
            with suppress(ProcessLookupError):
                os.kill(self._dice.choice(children), signal.SIGKILL)
                self.kills["pool processes"] += 1


@PAIRS
def test_nobody_pays_for_what_was_not_shipped(site_with: Callable[..., OrdersSite]) -> None:
    dice = random.Random(seed := random.SystemRandom().randrange(2**32))
    site = site_with(kind=OrdersSite, **_SETTINGS)
    site.beat()
    killer = Killer(site, dice)
    customers, started_at = Customers(site, dice), time.monotonic()

    def act() -> bool:
        killer.act()
        return customers.act()

    try:
        until("the end of all orders", act, 400, pause=0.2)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{site.open_instances()} are open, seed {seed}\n{site.logs()}") from None
    statuses = Counter(str(instance.status().status) for instance in site.instances)
    print(
        f"\nseed {seed}: {time.monotonic() - started_at:.0f} s, killed {dict(killer.kills)}, {dict(statuses)}, "
        f"{len(customers.cancelled)} cancelled, {len(customers.failing)} fail"
    )
    assert list(customers.find_mistakes()) == []
    assert open_rows(site.durable.internals.store) == []
    site.check(reruns=None)
