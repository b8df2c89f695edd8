"""A trip is booked in three steps. If one of them fails, or the trip is cancelled, what was done is taken back.

The list ``undo`` says how, in the order of the steps, and is followed in reverse. Each entry is made before its step:
a step that timed out, or whose worker died, may have done its work. So each function that takes something back accepts
that there is nothing.

From the folder above this one, once, and then in one terminal:

    celery -A examples.undo durable migrate
    celery -A examples.undo worker

In another:

    celery -A examples.undo durable start holiday -P trip_id=t-1 -P cents:=64000 --id t-1
    celery -A examples.undo durable cancel holiday t-1 --reason 'too far'
    celery -A examples.undo durable show holiday t-1
"""

from __future__ import annotations

from collections.abc import Callable

from celery import Celery, signals
from pydantic import BaseModel

from celery_durable import (
    Cancelled,
    Durable,
    NonRetryableError,
    Retries,
    Step,
    StepConfig,
    StepFailed,
    StepTx,
    WorkflowEvent,
    durable_step,
    durable_workflow,
)
from examples import embedded, payments

app = Celery("trips")
app.conf.update(embedded.settings())
app.conf.durable_dispatcher = "both"  # a worker alone is enough; with beat there are two, which does no harm
durable = Durable(app)


class Trip(BaseModel):
    trip_id: str
    cents: int
    card: str = "4242"


hotels: set[str] = set()
"""The rooms of a hotel, which stands for somebody else's system."""


def reserve(trip_id: str) -> None:
    hotels.add(trip_id)


def release(trip_id: str) -> None:
    hotels.discard(trip_id)


@durable_step(retries=Retries(limit=5, delay="2 seconds"), timeout="30 seconds")
def charge(tx: StepTx, trip: Trip) -> str:
    try:
        return payments.charge(trip.trip_id, trip.cents, trip.card, idempotency_key=tx.idempotency_key)
    except payments.CardDeclined as declined:
        raise NonRetryableError(str(declined)) from declined


UNTIL_IT_WORKS = StepConfig(retries=Retries(limit=None, delay="1 minute", max_delay="1 hour"))
Undo = tuple[str, Callable[[str], None], str]


def take_back(step: Step, undo: list[Undo], why: str) -> None:
    for name, function, argument in reversed(undo):
        step.do(f"{name} ({why})", UNTIL_IT_WORKS, function, argument)


@durable_workflow(name="holiday")
def holiday(event: WorkflowEvent[Trip], step: Step) -> str:
    this = event.payload
    undo: list[Undo] = []
    try:
        try:
            undo.append(("release the room", release, this.trip_id))
            step.do("reserve a room", reserve, this.trip_id)
            undo.append(("give the money back", payments.refund_order, this.trip_id))
            step.do("charge", charge, this)
            step.wait_for_event("wait for the airline", "ticket", timeout="3 days")
        except StepFailed:
            take_back(step, undo, "failed")
            raise
    except Cancelled:  # it may come while a failure is taken back
        take_back(step, undo, "cancelled")
        raise
    return "booked"


@signals.worker_init.connect
def create_tables(**_: object) -> None:
    """Make the payment provider's tables."""
    payments.open_books()
