"""The workflow of the third act: instances that publish values, write into their log, and have limits of time.

A program is a list of operations. The function of a step named "work" publishes its execution under the step's name,
first as a negative number, writes it into the log, and returns it. So the published value, the line and the result
show whether they come from the same execution.
"""

from __future__ import annotations

import random
from datetime import timedelta
from typing import Any, Protocol

from celery_durable import EventTimeout, Retries, Step, StepConfig, StepFailed, WorkflowEvent
from celery_durable.definitions import WorkflowDefinition, define
from tests.simulation.programs import EVENTS, RETRY_SECONDS

REPORTED = "reported"
LINE = "work"
"""The category of the lines that steps write."""

Op = dict[str, Any]


class Host(Protocol):
    """What the bodies tell the simulation."""

    def execution(self) -> int:
        """The number of the body that begins to run."""

    def attempt(self) -> int:
        """The attempt of this body."""

    def fails(self, step: str) -> None:
        """The body raises, as the program wants it to."""


def make_ops(dice: random.Random) -> list[Op]:
    """A few steps; some fail for good, and some return what has no JSON form."""
    return [_make_op(dice, str(number)) for number in range(dice.randint(2, 5))]


def _make_op(dice: random.Random, name: str) -> Op:
    match dice.choices(["work", "sleep", "wait"], [6, 2, 2])[0]:
        case "sleep":
            return {"key": f"sleep{name}", "seconds": dice.choice([1, 20, 600])}
        case "wait":
            return {"key": f"wait{name}", "type": dice.choice(EVENTS), "seconds": dice.choice([5, 60, 2000])}
        case _:
            return {
                "key": f"work{name}",
                "fails": dice.choice([0, 0, 0, 1, 3]),
                "limit": dice.choice([0, 1, 5]),
                "is_json": dice.random() < 0.9,
            }


def make_reported(host: Host, max_run: timedelta | None, max_suspend: timedelta | None) -> WorkflowDefinition:
    """The workflow, with these limits."""

    def reported(event: WorkflowEvent, step: Step) -> dict[str, Any]:
        def work(op: Op) -> Any:
            number, key = host.execution(), op["key"]
            step.publish(key, -number)
            step.log.info(f"{key} {number}", category=LINE)  # noqa: G004  # a line of the run, not of logging
            if host.attempt() <= op["fails"]:
                host.fails(key)
                raise ValueError("as the program wants it")
            step.publish(key, number)  # within a second: it is written with the step
            return number if op["is_json"] else object()

        def do(op: Op) -> Any:
            key = op["key"]
            step.log.debug(f"at {key}")  # noqa: G004
            if key.startswith("sleep"):
                return step.sleep(key, op["seconds"])
            if key.startswith("wait"):
                try:
                    return step.wait_for_event(key, op["type"], timeout=op["seconds"]).payload
                except EventTimeout:
                    return "too late"
            retries = Retries(limit=op["limit"], delay=lambda attempt, error: RETRY_SECONDS + attempt)
            try:
                return step.do(key, StepConfig(retries=retries), work, op)
            except StepFailed as failed:
                return failed.error_name

        return {op["key"]: do(op) for op in event.payload}

    return define(reported, max_run_duration=max_run, max_suspend_duration=max_suspend)
