"""Random linear workflows: lists of steps, what each of them answers as data, and the handler of them all.

Steps of a name that begins with "book" write one row into the ledger, those of "emit" emit to the topic behind the
dot. What a step waits for, and how often it fails, is in the parameters; how often it may is in the list.
"""

from __future__ import annotations

import random
from typing import Any, Protocol

import sqlalchemy as sa

from celery_durable import Completed, Dead, LinearContext, LinearStep, Retry, TaskType, Waiting
from celery_durable.definitions import LinearDefinition, define_linear
from tests.simulation.programs import EVENTS, RETRY_SECONDS, ledger, on_lost

LINEAR = "linear"
_STEPS = ("book0", "book1", "plain2", "plain3", "emit4.news")

Plan = list[tuple[str, int | None]]
"""Steps and how many attempts they have."""


class Host(Protocol):
    """What the handler tells the simulation, and asks of it."""

    def turns(self, context: LinearContext) -> int:
        """The number of the handler's call that begins."""

    def opens_session(self) -> None:
        """The handler holds the write lock of the database from here on."""

    def fails(self, step: str) -> None:
        """The handler does not get through, as the parameters want it."""


def is_linear(instance: str) -> bool:
    """Whether an instance of the simulation is linear: its id says so."""
    return instance.startswith("l")


def make_plan(dice: random.Random) -> Plan:
    """A list of a few steps."""
    return [(name, dice.choice([1, 2, 3, 5, None])) for name in dice.sample(_STEPS, dice.randint(2, 4))]


def make_params(dice: random.Random) -> dict[str, Any]:
    """How each step behaves, also those that only a list deployed later has."""
    return {name: _behaviour(dice, name) for name in _STEPS}


def _behaviour(dice: random.Random, name: str) -> dict[str, Any]:
    types = dice.sample(EVENTS, dice.choice([0, 0, 1, 1, 2]))
    return {
        "waits": [[type_, dice.choice([5, 600, 3600])] for type_ in types],
        "notes": dice.random() < 0.3,
        "writes": dice.choice(["session", "mutate"]) if name.startswith("book") else None,
        "fails": dice.choice([0, 0, 0, 1, 2]),
        "raises": dice.random() < 0.5,
        "dies": dice.random() < 0.03,
    }


def make_linear(host: Host, plan: Plan) -> LinearDefinition:
    """The workflow with these steps; a handler for every step that any list has."""
    steps = [
        LinearStep(
            name, max_attempts=most, delay=RETRY_SECONDS, backoff="constant", timeout=None, on_lost=on_lost(name)
        )
        for name, most in plan
    ]

    def handle(ctx: LinearContext) -> Any:
        number, does = host.turns(ctx), ctx.params[ctx.step]
        wait = _next_wait(ctx, does["waits"])
        if wait is not None:
            type_, seconds = wait
            notes = [("note", f"{ctx.instance_id} {number}")] if does["notes"] else []
            return Waiting(type_, seconds, notes)
        _write(host, ctx, does["writes"], number)
        if ctx.step.startswith("emit"):
            ctx.tx.emit(ctx.step.partition(".")[2], f"{ctx.instance_id} {ctx.run_number} {ctx.step}")
        if ctx.attempt <= does["fails"]:
            host.fails(ctx.step)
            if does["raises"]:
                raise ValueError("as the parameters want it")
            return Retry(RETRY_SECONDS, "as the parameters want it")
        if does["dies"]:
            host.fails(ctx.step)
            return Dead("as the parameters want it")
        return Completed(number if does["writes"] else f"{number} {got(ctx.event)}")

    definition = define_linear(LINEAR, module=__name__, version=1, steps=steps)
    definition.handlers.update(dict.fromkeys(_STEPS, handle))
    return definition


def _next_wait(ctx: LinearContext, waits: list[list[Any]]) -> list[Any] | None:
    """What the step waits for now: one event after the other, until it has them all or is out of time."""
    if ctx.task_type is TaskType.WAITING_TIMEOUT:
        return None
    types = [type_ for type_, _ in waits]
    following = 0 if ctx.event is None else types.index(ctx.event.type) + 1
    return waits[following] if following < len(waits) else None


def _write(host: Host, ctx: LinearContext, how: str | None, number: int) -> None:
    row = {"instance": ctx.instance_id, "run": ctx.run_number, "step": ctx.step, "attempt": ctx.attempt}
    row["execution"] = number
    if how == "session":
        host.opens_session()
        ctx.tx.session.execute(sa.insert(ledger).values(row))
    elif how == "mutate":
        ctx.tx.mutate(lambda session: session.execute(sa.insert(ledger).values(row)))


def got(event: Any) -> str:
    """What a step without writes says of the event that it ended with."""
    return "nothing" if event is None else str(event.payload)
