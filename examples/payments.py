"""A payment provider, as far as an order needs one: somebody else's system, which knows nothing of workflows.

It keeps the two promises that real ones make: a request carries an idempotency key, and a key that it has seen
gets the same answer again, without a second charge. It keeps its own books in its own transactions.
"""

from __future__ import annotations

import os
import time

import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError
from sqlalchemy.pool import NullPool

from examples import embedded

DECLINED = "4000"
"""A card without money."""
BUSY = "4100"
"""A card for which the first two requests fail, as providers do at times."""

_metadata = sa.MetaData()
request = sa.Table(
    "payment_request",
    _metadata,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("idempotency_key", sa.String(64), nullable=False),
)
payment = sa.Table(
    "payment",
    _metadata,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("idempotency_key", sa.String(64), nullable=False, unique=True),
    sa.Column("order_id", sa.String(64), nullable=False),
    sa.Column("cents", sa.Integer, nullable=False),
    sa.Column("refunded", sa.Boolean, nullable=False),
)

# No pool: nothing is open when Celery forks its workers.
_engine = sa.create_engine(
    os.environ.get("PAYMENTS_DATABASE_URL") or embedded.settings()["durable_database_url"], poolclass=NullPool
)


class CardDeclined(Exception):
    """The bank says no, and will say so again."""


class ProviderBusy(Exception):
    """Try again in a moment."""


def open_books() -> None:
    """Create the provider's tables."""
    _metadata.create_all(_engine)


def charge(order_id: str, cents: int, card: str, *, idempotency_key: str) -> str:
    """Take the money once for each idempotency key; answers with the payment's id."""
    with _engine.begin() as tx:
        tx.execute(sa.insert(request).values(idempotency_key=idempotency_key))
        asked = sa.select(sa.func.count()).where(request.c.idempotency_key == idempotency_key)
        attempts = tx.execute(asked).scalar_one()
    if card == DECLINED:
        raise CardDeclined(f"card {card} has no money")
    if card == BUSY and attempts <= 2:
        raise ProviderBusy("503 please try again")
    is_new = _take(order_id, cents, idempotency_key)
    if is_new:
        # The money has moved, and the answer is still on its way.
        time.sleep(float(os.environ.get("PAYMENTS_ANSWER_SECONDS", "0")))
    with _engine.begin() as tx:
        number = tx.execute(sa.select(payment.c.id).where(payment.c.idempotency_key == idempotency_key)).scalar_one()
    return f"pay_{number}"


def refund(payment_id: str) -> None:
    """Give the money back; any number of times."""
    with _engine.begin() as tx:
        number = int(payment_id.removeprefix("pay_"))
        tx.execute(sa.update(payment).where(payment.c.id == number).values(refunded=True))


def refund_order(order_id: str) -> None:
    """Give the money of an order back, if any was taken."""
    with _engine.begin() as tx:
        tx.execute(sa.update(payment).where(payment.c.order_id == order_id).values(refunded=True))


def _take(order_id: str, cents: int, idempotency_key: str) -> bool:
    values = {"idempotency_key": idempotency_key, "order_id": order_id, "cents": cents, "refunded": False}
    try:
        with _engine.begin() as tx:
            tx.execute(sa.insert(payment).values(values))
    except IntegrityError:
        return False
    return True
