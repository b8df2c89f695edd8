"""docs/design.md says how many statements and transactions each thing costs on each database."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from celery import Celery

from celery_durable import Durable, Step, WorkflowEvent
from celery_durable.handles import Workflow

pytestmark = pytest.mark.parametrize("database", ["sqlite", "postgresql", "mariadb"], indirect=True)
DESIGN = Path(__file__).parents[2] / "docs" / "design.md"
Cost = tuple[int, int]
"""Statements, and transactions around them. A statement in autocommit is in none."""


def read_table() -> dict[str, dict[str, Cost]]:
    """The costs by what happens and database."""
    section = DESIGN.read_text(encoding="utf-8").partition("### What each costs\n")[2].partition("\n## ")[0]
    (_, *databases), _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line.startswith("|")
    ]
    return {
        what: {
            database.lower(): (int(found[1]), int(found[2]))
            for database, cell in zip(databases, cells, strict=True)
            if (found := re.fullmatch(r"(\d+) in (\d+)", cell))
        }
        for what, *cells in rows
    }


class Shop:
    """A project on one database, which counts what its store sends."""

    def __init__(self, url: str) -> None:
        app = Celery("shop", broker="memory://", set_as_current=False)
        app.conf.update(durable_database_url=url)
        self.durable = Durable(app)
        self.statements = self.transactions = 0
        self._is_watermark = False
        engine = self.durable.internals.store.engine
        sa.event.listen(engine, "before_cursor_execute", self._count_statement)
        sa.event.listen(engine, "commit", self._count_transaction)

    def _count_statement(self, *args: Any) -> None:
        self._is_watermark = "workflow_queue" in args[2]  # written every few seconds, in a transaction of its own
        self.statements += args[2] != "BEGIN IMMEDIATE" and not self._is_watermark

    def _count_transaction(self, connection: sa.Connection) -> None:
        # PostgreSQL's reads and single statements are in autocommit; those of the others end with a rollback.
        driver: Any = connection.connection.dbapi_connection
        is_autocommit = connection.dialect.name == "postgresql" and driver.autocommit
        self.transactions += not is_autocommit and not self._is_watermark

    def cost_of(self, work: Callable[[], object]) -> Cost:
        self.statements = self.transactions = 0
        work()
        return self.statements, self.transactions

    def cost_of_pass(self, workflow: Workflow[None, None]) -> Cost:
        """The cost of the first pass of a new instance."""
        ref = self.durable.internals.operations.queries.get(workflow.name, workflow.create().id).instance.ref
        return self.cost_of(lambda: self.durable.internals.runner.advance(ref, task_id="task", node="node"))


@contextmanager
def open_shop(url: str) -> Iterator[Shop]:
    shop = Shop(url)
    yield shop
    shop.durable.close()


def minus(cost: Cost, other: Cost) -> Cost:
    return cost[0] - other[0], cost[1] - other[1]


def test_the_design_says_what_each_costs(store_url: str, database: str) -> None:
    with open_shop(store_url) as shop:
        durable = shop.durable

        @durable.workflow(name="empty")
        def empty(event: WorkflowEvent[None], step: Step) -> None: ...

        @durable.workflow(name="stepping")
        def stepping(event: WorkflowEvent[None], step: Step) -> None:
            step.do("charge", int)

        @durable.workflow(name="logging")
        def logging(event: WorkflowEvent[None], step: Step) -> None:
            step.log.info("charging")
            step.do("charge", int)

        @durable.workflow(name="sleeping")
        def sleeping(event: WorkflowEvent[None], step: Step) -> None:
            step.sleep("cool down", 60)

        @durable.workflow(name="waiting")
        def waiting(event: WorkflowEvent[None], step: Step) -> None:
            step.wait_for_event("approval", "approved")

        shop.cost_of_pass(empty)  # the server is checked
        a_pass = shop.cost_of_pass(empty)
        ended = empty.create()
        shop.durable.internals.runner.advance(
            ref := durable.internals.operations.queries.get("empty", ended.id).instance.ref, task_id="task", node="node"
        )
        for _ in range(2):
            shop.cost_of_pass(waiting)
        waits, other = (waiting.get(each.id) for each in waiting.list().items)
        measured = {
            "a message for a run that is not due": shop.cost_of(
                lambda: durable.internals.runner.advance(ref, task_id="task", node="node")
            ),
            "the pass of a run without steps": a_pass,
            "each step": minus(shop.cost_of_pass(stepping), a_pass),
            "each step with a log line": minus(shop.cost_of_pass(logging), a_pass),
            "the pass of a run that sleeps": shop.cost_of_pass(sleeping),
            "`create()`": shop.cost_of(empty.create),
            "`send_event()` to a run that waits": shop.cost_of(lambda: waits.send_event("approved")),
            "the same with an id of the sender": shop.cost_of(lambda: other.send_event("approved", id="e-1")),
        }
        table = read_table()
        assert {what: table[what][database] for what in measured} == measured
        assert set(table) == set(measured)
