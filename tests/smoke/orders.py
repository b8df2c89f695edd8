"""``celery -A tests.smoke.orders``: orders that take back what was done, as in docs/how-to/undo.md.

`books` is somebody else's: it commits by itself, and knows each request by its key. Once something of an order was
taken back it refuses more: a worker that has lost its lease may still ask.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Iterator

import sqlalchemy as sa
from celery import Celery

from celery_durable import (
    Cancelled,
    NonRetryableError,
    Retries,
    Step,
    StepConfig,
    StepFailed,
    StepTx,
    WorkflowEvent,
)
from tests.smoke import dying, flows
from tests.smoke.config import Config

metadata = sa.MetaData()
accounts = sa.Table(
    "author_accounts",
    metadata,
    sa.Column("order_id", sa.String(64), primary_key=True),
    sa.Column("is_closed", sa.Boolean, nullable=False),
)
books = sa.Table(
    "author_books",
    metadata,
    sa.Column("what", sa.String(16), primary_key=True),
    sa.Column("request_key", sa.String(64), primary_key=True),
    sa.Column("order_id", sa.String(64), nullable=False),
)
OPPOSITES = {"reserve": "release", "charge": "refund", "ship": "return"}
STEPS = (*OPPOSITES, "mail")
AGAIN = StepConfig(retries=Retries(limit=None, delay=0.1, backoff="constant"))


def build(config: Config) -> Celery:
    """The application of the smoke tests, and `order`."""
    app = flows.build(config)
    others = Others(config.bodies_url)

    @vars(app)["durable"].workflow(name="order")
    def order(event: WorkflowEvent[dict[str, str]], step: Step) -> str:
        return _order(step, event.instance_id, event.payload, others)

    return app


def _order(step: Step, order_id: str, fails: dict[str, str], others: Others) -> str:
    """Do all `STEPS`. ``fails``: the step that fails, and whether it does so "before" or "after" its work."""
    undo: list[str] = []

    def take_back(why: str) -> None:
        for what in reversed(undo):
            step.do(f"{OPPOSITES[what]} ({why})", AGAIN, others.take_back, what, order_id)

    try:
        try:
            for what in OPPOSITES:
                undo.append(what)
                step.do(what, AGAIN, others.do, what, order_id, fails.get(what))
                step.sleep(f"after {what}", 0.3)
            step.do("mail", AGAIN, others.do, "mail", order_id, fails.get("mail"))
        except StepFailed:
            take_back("failed")
            raise
    except Cancelled:
        take_back("cancelled")
        raise
    return "shipped"


class Others:
    """The bodies of the steps: requests to another system."""

    def __init__(self, url: str) -> None:
        self._engine = sa.create_engine(url)  # used by pool processes alone

    def do(self, tx: StepTx, what: str, order_id: str, fails: str | None) -> None:
        _be_slow_or_busy()
        if fails == "before":
            raise NonRetryableError("no")
        with self._open(order_id) as (connection, is_closed):
            if is_closed:
                raise NonRetryableError("the order was taken back")
            _book(connection, what, tx.idempotency_key, order_id)
        _be_slow_or_busy()
        if fails == "after":
            raise NonRetryableError("no answer")

    def take_back(self, what: str, order_id: str) -> None:
        _be_slow_or_busy()
        with self._open(order_id) as (connection, _):
            connection.execute(sa.update(accounts).where(accounts.c.order_id == order_id).values(is_closed=True))
            b = books.c
            mine = sa.select(b.request_key).where(b.what == what, b.order_id == order_id)
            for key in connection.execute(mine).scalars().all():
                _book(connection, OPPOSITES[what], key, order_id)
        _be_slow_or_busy()

    @contextlib.contextmanager
    def _open(self, order_id: str) -> Iterator[tuple[sa.Connection, bool]]:
        a = accounts.c
        with self._engine.begin() as connection:
            locked = sa.select(a.is_closed).where(a.order_id == order_id).with_for_update()
            yield connection, connection.execute(locked).scalar_one()


def _book(connection: sa.Connection, what: str, key: str, order_id: str) -> None:
    """The account is locked: no other request of this order comes between."""
    b = books.c
    if connection.execute(sa.select(b.what).where(b.what == what, b.request_key == key)).first() is None:
        connection.execute(sa.insert(books).values(what=what, request_key=key, order_id=order_id))


def _be_slow_or_busy() -> None:
    time.sleep(random.uniform(0, 0.04))
    if random.random() < 0.1:
        raise OSError("busy")


if "DURABLE_SMOKE" in os.environ:
    app = dying.make_app(build)
