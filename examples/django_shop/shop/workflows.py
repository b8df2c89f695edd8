"""The life of an order. The app ``celery_durable.contrib.django`` imports this module."""

from __future__ import annotations

from celery_durable import EventTimeout, Step, StepTx, WorkflowEvent, durable_workflow
from shop.models import Email, Order, Payment

NEEDS_APPROVAL = 10_000  # cents


@durable_workflow(name="order")
def order(event: WorkflowEvent[int], step: Step) -> str:
    pk = event.payload
    amount = step.do("read amount", read_amount, pk)
    if amount >= NEEDS_APPROVAL:
        step.do("ask", ask_for_approval, pk)
        try:
            decision = step.wait_for_event("approval", "approval", timeout="7 days").payload
        except EventTimeout:
            decision = "refuse"
        if decision != "approve":
            step.do("refuse", set_state, pk, "refused")
            return "refused"
    step.do("charge", charge, pk)
    step.gather(
        step.submit("confirm", send_email, pk, "We have received your payment."),
        step.submit("ship", set_state, pk, "shipped"),
    )
    return "shipped"


def read_amount(pk: int) -> int:
    return Order.objects.get(pk=pk).amount


def ask_for_approval(tx: StepTx, pk: int) -> None:
    placed = Order.objects.get(pk=pk)
    link = f"/orders/{pk}/approve/{placed.token}/"
    Email.objects.create(to="boss@example.com", text=f"{placed} needs your approval: {link}")
    placed.state = "waiting for approval"
    placed.save()


def charge(tx: StepTx, pk: int) -> str:
    """Charge the customer. The payment is stored with the step's record, or not at all."""
    payment = Payment.objects.create(order_id=pk, reference=tx.idempotency_key)
    Order.objects.filter(pk=pk).update(state="paid")
    return payment.reference


def send_email(tx: StepTx, pk: int, text: str) -> None:
    Email.objects.create(to=Order.objects.get(pk=pk).customer, text=text)


def set_state(tx: StepTx, pk: int, state: str) -> None:
    Order.objects.filter(pk=pk).update(state=state)
