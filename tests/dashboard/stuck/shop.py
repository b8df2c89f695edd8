"""A shop whose workflows can get stuck. ``celery -A tests.dashboard.stuck.project`` is its worker."""

from __future__ import annotations

import os
import signal
import time

from celery import Celery

from celery_durable import Durable, Limit, NonRetryableError, Retries, Step, StepConfig, WorkflowEvent

GOOD, HANGS, KILLS, EXPIRED = "card-17", "card-18", "card-19", "card-20"
"""Cards, and what becomes of the process that charges them. Their names tell a reader of the pages nothing."""
acquirer = Limit("acquirer", at_once=1)


def build(broker_url: str, database_url: str, *, is_new: bool = True, is_off: bool = False) -> Celery:
    """Make the shop. ``is_new``: whether this code knows refunds; ``is_off``: whether execution is switched off."""
    app = Celery("shop", broker=broker_url, set_as_current=False)
    timeouts = {"socket_timeout": 5, "socket_connect_timeout": 5, "health_check_interval": 5}
    app.conf.update(
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,
        broker_transport_options=timeouts,
        worker_prefetch_multiplier=1,
        task_routes={"images.*": {"queue": "images"}},
        durable_database_url=database_url,
        durable_execution_enabled=not is_off,
    )
    durable = Durable(app)
    _add_sales(durable)
    _add_pictures(durable)
    if is_new:
        durable.workflow(name="refund")(pay)
    return app


def charge(card: str) -> str:
    if card == HANGS:
        time.sleep(3600)
    if card == KILLS:
        os.kill(os.getpid(), signal.SIGKILL)
    if card == EXPIRED:
        raise NonRetryableError("The card ending in 4242 expired in 10/26.", name="CardDeclined")
    return f"payment by {card}"


def pay(event: WorkflowEvent[str], step: Step) -> str:
    return step.do("charge", charge, event.payload)


def compute_tax(number: int) -> str:
    raise ConnectionRefusedError("tax.internal:8443 refuses connections")


def resize(picture: str) -> str:
    if picture == "torn.jpg":
        raise ValueError(f"{picture} is no JPEG: it ends after 1024 bytes")
    return f"{picture}, small"


def _add_sales(durable: Durable) -> None:
    payment = durable.workflow(name="payment")(pay)

    @durable.workflow(name="order")
    def order(event: WorkflowEvent[str], step: Step) -> str:
        step.do("charge", charge, event.payload)
        step.wait_for_event("wait for approval", "approval", timeout="3 days")
        step.do("ship", str, "shipped")
        return "shipped"

    @durable.workflow(name="reminder")
    def reminder(event: WorkflowEvent[float], step: Step) -> str:
        step.sleep("until it is time", event.payload)
        return step.do("send", str, "sent")

    @durable.workflow(name="invoice")
    def invoice(event: WorkflowEvent[int], step: Step) -> str:
        return step.do("compute tax", StepConfig(retries=Retries(limit=1, delay=0)), compute_tax, event.payload)

    @durable.workflow(name="card_payment")
    def card_payment(event: WorkflowEvent[str], step: Step) -> str:
        return step.do("charge", StepConfig(limits=[acquirer]), charge, event.payload)

    @durable.workflow(name="bank_transfer")
    def bank_transfer(event: WorkflowEvent[str], step: Step) -> str:
        return step.do("transfer", StepConfig(on_lost="fail"), charge, event.payload)

    @durable.workflow(name="booking")
    def booking(event: WorkflowEvent[str], step: Step) -> str:
        return step.child("pay", payment, event.payload)


def _add_pictures(durable: Durable) -> None:
    app = durable.app
    resize_here = app.task(name="resize", shared=False)(resize)
    resize_elsewhere = app.task(name="images.resize", shared=False)(resize)

    @durable.workflow(name="album")
    def album(event: WorkflowEvent[list[str]], step: Step) -> list[str]:
        return step.map("resize", resize_elsewhere, event.payload)

    @durable.workflow(name="archive")
    def archive(event: WorkflowEvent[list[str]], step: Step) -> list[str]:
        return step.map("resize", resize_here, event.payload)
