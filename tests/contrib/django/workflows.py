"""The workflows of these tests. Their steps write with the models of ``booking``, on the alias in their parameters."""

from __future__ import annotations

from celery_durable import Step, StepTx, WorkflowEvent, durable_workflow
from tests.contrib.django.booking.models import Booking


def book(alias: str, instance: str, step: str) -> None:
    Booking.objects.using(alias).create(instance=instance, step=step)


def booked(alias: str) -> list[str]:
    return sorted(Booking.objects.using(alias).values_list("step", flat=True))


@durable_workflow(name="wait")
def wait(event: WorkflowEvent[str], step: Step) -> str:
    return step.wait_for_event("answer", "answer", timeout="1 day").payload


@durable_workflow(name="trip")
def trip(event: WorkflowEvent[str], step: Step) -> None:
    """Four steps that write two rows each, two of them at the same time."""

    def write(tx: StepTx, name: str) -> str:
        for part in ("a", "b"):
            book(event.payload, event.instance_id, f"{name}/{part}")
        return name

    step.do("flight", write, "flight")
    step.gather(step.submit("hotel", write, "hotel"), step.submit("car", write, "car"))
    step.do("invoice", write, "invoice")


ALL = [wait, trip]
