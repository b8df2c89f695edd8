"""An order is charged, waits for a person's approval, and is shipped or refunded.

Shown here: a payment with retries and an idempotency key, an event with a timeout, a table of the shop's own
that is written in the transactions that record the steps, and a hook that shows card numbers to nobody.

From the folder above this one, once, and then in one terminal:

    celery -A examples.order_approval durable migrate
    celery -A examples.order_approval worker

In another:

    python -m examples.order_approval start order-1 --cents 12500
    python -m examples.order_approval show order-1
    python -m examples.order_approval approve order-1 --by eve

Broker and database are yours with CELERY_BROKER_URL and DURABLE_DATABASE_URL; without them no server is needed.
"""

from __future__ import annotations

import argparse
import logging
import os
from typing import Any, Literal

from celery import Celery, signals
from pydantic import BaseModel, Field
from sqlalchemy import String
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from celery_durable import (
    Durable,
    EventTimeout,
    NonRetryableError,
    RedactionContext,
    Retries,
    Step,
    StepFailed,
    StepTx,
    WorkflowEvent,
    durable_step,
    durable_workflow,
)
from examples import embedded, payments

logger = logging.getLogger(__name__)

app = Celery("shop")
app.conf.update(embedded.settings())
app.conf.durable_lease_seconds = float(os.environ.get("DURABLE_LEASE_SECONDS", "30"))
app.conf.durable_dispatcher = "both"  # a worker alone is enough; with beat there are two, which does no harm


def redact(value: Any, shown: RedactionContext) -> Any:
    """Cards are stored, and shown to nobody, over HTTP or by the commands."""
    if shown.kind == "params" and isinstance(value, dict) and "card" in value:
        return value | {"card": "****"}
    return value


durable = Durable(app, redact=redact)


# --- the shop's own table -----------------------------------------------------------------------


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    cents: Mapped[int]
    state: Mapped[str] = mapped_column(String(16))
    payment: Mapped[str | None] = mapped_column(String(64))
    changes: Mapped[int]


def change(session: Session, order_id: str, state: str) -> Order:
    order = session.get_one(Order, order_id)
    order.state, order.changes = state, order.changes + 1
    return order


# --- the steps ----------------------------------------------------------------------------------


class OrderIn(BaseModel):
    order_id: str
    cents: int = Field(gt=0)
    customer: str = "ada@example.com"
    card: str = "4242"


class Approval(BaseModel):
    approved: bool
    by: str


def record_order(tx: StepTx, order: OrderIn) -> None:
    # In the transaction that records the step: there is never one without the other.
    tx.session.merge(Order(id=order.order_id, cents=order.cents, state="new", changes=1))


@durable_step(retries=Retries(limit=5, delay="2 seconds"), timeout="30 seconds")
def charge_card(tx: StepTx, order: OrderIn) -> str:
    try:
        # A body may begin twice. The key is the same each time, so the money moves once.
        payment = payments.charge(order.order_id, order.cents, order.card, idempotency_key=tx.idempotency_key)
    except payments.CardDeclined as exc:
        raise NonRetryableError(str(exc), name="CardDeclined") from exc

    def note_payment(session: Session) -> None:
        change(session, order.order_id, "charged").payment = payment

    tx.mutate(note_payment)
    return payment


def refund_card(payment: str) -> None:
    payments.refund(payment)


def set_state(tx: StepTx, order_id: str, state: str) -> None:
    tx.mutate(lambda session: change(session, order_id, state))


def send_mail(to: str, subject: str) -> None:
    logger.info("Mail to %s: %s", to, subject)


# --- the workflow -------------------------------------------------------------------------------

Outcome = Literal["shipped", "refused", "expired", "declined"]


@durable_workflow(name="order")
def order(event: WorkflowEvent[OrderIn], step: Step) -> Outcome:
    this = event.payload
    step.do("record order", record_order, this)
    try:
        payment = step.do("charge card", charge_card, this)
    except StepFailed as failure:
        step.log.warning("not charged", category="payments", reason=failure.error_name)
        step.do("mark declined", set_state, this.order_id, "declined")
        return "declined"

    step.do("ask for approval", send_mail, "boss@example.com", f"approve order {this.order_id}?")
    outcome: Outcome
    try:
        answer = step.wait_for_event("wait for approval", "approval", timeout="24 hours", schema=Approval)
        outcome = "shipped" if answer.payload.approved else "refused"
    except EventTimeout:
        outcome = "expired"
    if outcome != "shipped":
        step.do("refund", refund_card, payment)
    step.do(f"mark {outcome}", set_state, this.order_id, outcome)
    step.do("tell customer", send_mail, this.customer, f"order {this.order_id}: {outcome}")
    return outcome


# --- by hand ------------------------------------------------------------------------------------


@signals.worker_init.connect
def create_tables(**_: object) -> None:
    """Make the tables that are not celery_durable's. An application has migrations for this."""
    Base.metadata.create_all(durable.engine)
    payments.open_books()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.order_approval")
    parser.add_argument("command", choices=["start", "show", "approve", "refuse"])
    parser.add_argument("id")
    parser.add_argument("--cents", type=int, default=12500)
    parser.add_argument("--card", default="4242", help="4000 is declined, 4100 needs three attempts")
    parser.add_argument("--by", default="eve")
    args = parser.parse_args()
    create_tables()
    match args.command:
        case "start":
            order.create(OrderIn(order_id=args.id, cents=args.cents, card=args.card), id=args.id)
        case "approve" | "refuse":
            approval = Approval(approved=args.command == "approve", by=args.by)
            order.get(args.id).send_event("approval", approval)
    history = order.get(args.id).history()
    print(f"{args.id}: {history.status.status} {history.status.output or ''}")
    for record in history.steps:
        print(f"  {record.name:<20} {record.status:<10} attempts {record.attempts}")


if __name__ == "__main__":
    main()
