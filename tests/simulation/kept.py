"""The workflow of the second act: instances that are kept for a while, labelled, and reported when they end.

A program is a list of operations. Steps named "book" write one row into the ledger, those named "label" change the
label behind the dot: to the number of the execution, which is their result; each third one takes the label away.
"""

from __future__ import annotations

import random
from datetime import timedelta
from typing import Any, Protocol

import sqlalchemy as sa

from celery_durable import EventTimeout, Retries, Step, StepConfig, StepTx, WorkflowEvent
from celery_durable.definitions import WorkflowDefinition, define
from tests.simulation.programs import EVENTS, RETRY_SECONDS, ledger

KEPT = "kept"
ORIGIN = "origin"
"""The label that every instance gets when it is created, and that no step changes."""
_COLOURS = ("red", "blue")

Op = dict[str, Any]


class Host(Protocol):
    """What the bodies tell the simulation."""

    def execution(self) -> int:
        """The number of the body that begins to run."""

    def opens_session(self) -> None:
        """The body holds the write lock of the database from here on."""

    def fails(self, step: str) -> None:
        """The body raises, as the program wants it to."""


def make_ops(dice: random.Random) -> list[Op]:
    """A few steps; some fail for good."""
    return [_make_op(dice, str(number)) for number in range(dice.randint(1, 4))]


def _make_op(dice: random.Random, name: str) -> Op:
    match dice.choices(["book", "label", "sleep", "wait"], [4, 4, 1, 3])[0]:
        case "sleep":
            return {"key": f"sleep{name}", "seconds": dice.choice([1, 20, 600])}
        case "wait":
            return {"key": f"wait{name}", "type": dice.choice(EVENTS), "seconds": dice.choice([5, 60, 600])}
        case kind:
            key = f"label{name}.{dice.choice(_COLOURS)}" if kind == "label" else f"book{name}"
            return {"key": key, "fails": dice.choice([0, 0, 0, 1, 3]), "limit": dice.choice([0, 1, 5])}


def make_kept(host: Host, retention: timedelta) -> WorkflowDefinition:
    """The workflow, with this retention."""

    def work(tx: StepTx, op: Op, instance: str, run: int) -> int:
        number, key = host.execution(), op["key"]
        if key.startswith("label"):
            tx.set_labels({key.partition(".")[2]: str(number) if number % 3 else None})
        else:
            host.opens_session()
            row = {"instance": instance, "run": run, "step": key, "attempt": tx.attempt, "execution": number}
            tx.session.execute(sa.insert(ledger).values(row))
        if tx.attempt <= op["fails"]:
            host.fails(key)
            raise ValueError("as the program wants it")
        return number

    def kept(event: WorkflowEvent, step: Step) -> dict[str, Any]:
        def do(op: Op) -> Any:
            if op["key"].startswith("sleep"):
                return step.sleep(op["key"], op["seconds"])
            if op["key"].startswith("wait"):
                try:
                    return step.wait_for_event(op["key"], op["type"], timeout=op["seconds"]).payload
                except EventTimeout:
                    return "too late"
            retries = Retries(limit=op["limit"], delay=RETRY_SECONDS, backoff="constant")
            return step.do(op["key"], StepConfig(retries=retries), work, op, event.instance_id, event.run_number)

        return {op["key"]: do(op) for op in event.payload}

    return define(kept, retention=retention, on_complete="tell.complete", on_failure="tell.errored")
