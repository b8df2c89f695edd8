"""``celery -A tests.smoke.early_ends``: a workflow and a linear one that are ended at each place where they may be."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from celery import Celery

from celery_durable import (
    Completed,
    Durable,
    LinearContext,
    LinearStep,
    LinearWorkflow,
    NonRetryableError,
    Retries,
    Retry,
    Step,
    StepConfig,
    Waiting,
    Workflow,
    WorkflowEvent,
    WorkflowInstance,
)
from tests.smoke import flows
from tests.smoke.config import Config

HOUR, SOON = "1 hour", "0.3 seconds"
ENDS: dict[str, Callable[[WorkflowInstance[Any]], object]] = {
    "cancel": lambda instance: instance.cancel("typo"),
    "cancel twice": lambda instance: (instance.cancel("typo"), instance.cancel("at once")),
    "terminate": lambda instance: instance.terminate("typo"),
}


def build(config: Config) -> Celery:
    """The application. No worker takes the tasks that its workflow sends."""
    app = flows.build(config)
    durable: Durable = vars(app)["durable"]
    nobody = app.signature("shop.pack").set(queue=f"nobody-{config.name}")

    @durable.workflow(name="bill")
    def bill(event: WorkflowEvent[str], step: Step) -> object:
        return step.wait_for_event("paid", "paid", timeout=event.payload)

    def act(event: WorkflowEvent[dict[str, str]]) -> None:
        """End this run from within, once, or fail."""
        if event.payload["how"] == "error":
            raise NonRetryableError("no")
        _end_once(config, durable.workflows["order"], event.instance_id, event.payload["how"])

    def stop_at_place(event: WorkflowEvent[dict[str, str]], step: Step) -> None:
        timeout = SOON if event.payload["how"] == "error" else HOUR
        approval = step.submit_wait_for_event("b", "approval", timeout=timeout)
        match event.payload["place"]:
            case "in a function":
                step.do("open", act, event)
            case "between steps":
                act(event)
            case "asleep":
                step.sleep("open", "3 days")
            case "for an event" | "paused":
                step.wait_for_event("open", "approval", timeout=timeout)
            case "for a topic":
                step.wait_for_topic("open", f"prices.{config.name}", timeout=timeout)
            case "for a task":
                step.task("open", nobody, timeout=timeout)
            case "for a map":
                step.map("open", nobody, [1, 2, 3], max_concurrency=2, timeout=timeout)
            case "for a child":
                step.child("open", bill, timeout, id=f"{event.instance_id}-bill")
            case "for a retry":
                step.do("open", StepConfig(retries=Retries(limit=1, delay=timeout)), _give_up)
            case "for branches":
                step.gather(step.submit("quick", int), step.submit_sleep("open", timeout), approval)
            case "for a race":
                step.first("race", step.submit_sleep("open", "3 days"), approval)
            case _:  # new, and cleaning up
                raise NonRetryableError("no")

    @durable.workflow(name="order")
    def order(event: WorkflowEvent[dict[str, str]], step: Step) -> None:
        step.do("charge", int)
        try:
            stop_at_place(event, step)
            step.do("ship", int)
            step.do("bill", int)
        finally:
            step.do("refund", int)
            how, place = event.payload["how"], event.payload["place"]
            is_ended_here = how == "cancel twice" or (place == "cleaning up" and how != "error")
            step.sleep("rest", HOUR if is_ended_here else SOON)
            step.do("mail", int)

    _add_line(durable, config)
    return app


def _end_once(config: Config, workflow: Workflow[Any, Any], instance_id: str, how: str) -> None:
    sign = config.path(f"ended-{instance_id}")
    if not sign.exists():
        sign.touch()
        ENDS[how](workflow.get(instance_id))


def _give_up() -> None:
    raise ValueError("not yet")


def _add_line(durable: Durable, config: Config) -> None:
    line: LinearWorkflow[Any, Any] = LinearWorkflow(
        "line", version=1, steps=[LinearStep("VALIDATE"), LinearStep("PAY"), LinearStep("SHIP")]
    )
    durable.register({"LINE": line})

    @line.handler("VALIDATE")
    def validate(ctx: LinearContext) -> Completed:
        return Completed()

    @line.handler("PAY")
    def pay(ctx: LinearContext) -> Completed | Waiting | Retry:
        match ctx.params["place"]:
            case "in a function":
                _end_once(config, durable.workflows["line"], ctx.instance_id, ctx.params["how"])
                return Completed()
            case "for a retry":
                return Retry("not yet", delay=HOUR)
        return Waiting("paid", HOUR)

    @line.handler("SHIP")
    def ship(ctx: LinearContext) -> Completed:
        return Completed()


if "DURABLE_SMOKE" in os.environ:
    app = build(Config.read(os.environ))
    app.set_current()
