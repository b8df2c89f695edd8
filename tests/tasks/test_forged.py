"""Somebody can write to the broker and forges each of our tasks: nothing changes but what a hint may."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from celery import Celery
from prometheus_client import CollectorRegistry

from celery_durable import Durable, Step, WorkflowEvent
from celery_durable.contrib import prometheus
from celery_durable.model import RunRef, task_event_type
from celery_durable.store.engine.server_info import ensure_database_id
from celery_durable.tasks import ADVANCE, DELIVER, SWEEP, TASK_DONE, TASK_FAILED
from celery_durable.tasks.start import START
from tests.support.embedded import messages, until, worker
from tests.support.references import reference_of

DONE = {"forged": True}
ERROR = {"name": "Forged", "message": "no", "final": True}
HINTS = frozenset({"next_check_at", "dispatch_count", "wake_reason", "priority", "updated_at"})
"""Of an instance: when a worker looks at it."""
MALFORMED: list[tuple[Any, ...]] = [
    (), (None,), (1,), ("x",), ({},), ([],), (None, None), ("x", "y"), (1, 2, 3), ("waits", "w-1", "1"),
    ("waits", 7, 1), (["waits"], "w-1", 1), ("\x00", "\x00", 1), ("waits", "w-1", 2**70), ("x" * 10_000, "w-1", 1),
    ("waits", "w-1", -1), ("waits", "w-1", None), (True, True, True), ("'; DROP TABLE workflow_item; --", "w-1", 1),
]  # fmt: skip


@pytest.fixture
def waits(app: Celery, durable: Durable) -> Any:
    """Instance w-1, which waits for a task, for the items of a map, and for an event."""

    @durable.workflow
    def waits(event: WorkflowEvent, step: Step) -> Any:
        task = step.submit_task("task", "nobody.knows.it", timeout="1 day")
        many = step.submit_map("map", "nobody.knows.it", [1, 2], timeout="1 day")
        return step.gather(task, many, step.submit_wait_for_event("ok", "ok", timeout="1 day"))

    with worker(app, queues=[app.conf.durable_queue]):
        instance = waits.create(id="w-1")
        until(lambda: instance.status().status == "waiting")
    messages(app)
    return instance


@pytest.fixture
def registry() -> Iterator[CollectorRegistry]:
    """What Prometheus would scrape."""
    registry = CollectorRegistry()
    metrics = prometheus.instrument(registry=registry)
    yield registry
    metrics.disconnect()


def dump(durable: Durable) -> dict[str, Any]:
    """All that is in the database, but for what a hint may change, and for heartbeats."""
    t, found = durable.internals.store.tables, {}
    for table in t.metadata.sorted_tables:
        if table is not t.heartbeat:
            columns = [column for column in table.c if table is not t.instance or column.name not in HINTS]
            query = sa.select(*columns).order_by(*table.primary_key)
            found[table.name] = durable.internals.store.read(
                lambda tx, query=query: [tuple(row) for row in tx.execute(query)]
            )
    return found


def guesses(durable: Durable) -> list[list[Any]]:
    """References that somebody makes who knows everything but the tokens."""
    pk = durable.internals.operations.queries.get("waits", "w-1").instance.pk
    types = [
        task_event_type("nobody.knows.it", pk, 1, 1),
        f"item:{pk}:0:1:map",
        f"item:{pk}:1:1:map",
        "ok",
        "task",
        "map",
    ]
    tokens = ["", "0" * 32, "f" * 32, "\N{SNOWMAN}", "x" * 100_000]
    stores = [durable.internals.store.transact(ensure_database_id), "other", ""]
    runs = ((1, None, 0), (1, "celery", 1), (1, "", -1), (2, None, 0), (0, None, 2**70))
    named = [(store, type_, "0" * 32, runs[0]) for store, type_ in itertools.product(stores, types)]
    answered = [(stores[0], types[0], token, run) for token, run in itertools.product(tokens, runs)]
    return [
        [store, "waits", "w-1", run, type_, token, queue, delivery]
        for store, type_, token, (run, queue, delivery) in (*named, *answered)
    ]


def call(app: Celery, name: str, *args: Any) -> None:
    """As a worker would run the message; what is refused by its arguments alone is no concern."""
    app.tasks[name].apply(args, throw=False)


def test_whatever_is_forged_changes_nothing_but_what_a_hint_may(app: Celery, durable: Durable, waits: Any) -> None:
    # Another test of this process may have imported an integration, which adds a task that is run as any other.
    ours = {name for name in app.tasks if name.startswith("celery_durable.") and "django" not in name}
    # A new one needs its forgery here. A message of START that is in order starts an instance, as any task is run.
    assert ours == {ADVANCE, SWEEP, DELIVER, START, TASK_DONE, TASK_FAILED}
    before = dump(durable)
    assert len(before["workflow_item"]) == 3
    for name, args in itertools.product(ours, MALFORMED):
        call(app, name, *args)
    call(app, ADVANCE, "waits", "w-1", 1)
    call(app, SWEEP)
    for id_ in ("x", "", "w-1", waits.history().steps[0].task_id):
        call(app, DELIVER, id_)
    for guess in guesses(durable):
        call(app, TASK_DONE, DONE, guess)
        call(app, TASK_FAILED, ERROR, guess)
        call(app, TASK_FAILED, "a task's id", guess)
    assert dump(durable) == before
    assert waits.status().status == "waiting"


def test_a_hint_that_names_no_possible_run_is_malformed(
    app: Celery, durable: Durable, caplog: pytest.LogCaptureFixture
) -> None:
    for args in (
        ("waits", "w-1", 2**31), ("waits", "w-1", 10**30), ("waits", "w-1", 0), ("waits", "w-1", True),
        ("waits", "w\x00", 1), ("waits\x00", "w-1", 1), ("waits", "\ud800", 1), ("waits", "w" * 256, 1),
    ):  # fmt: skip
        assert app.tasks[ADVANCE].apply(args).get() == "noop: malformed message", args
    assert not caplog.records


def test_a_reference_that_is_longer_than_any_valid_one_is_malformed(
    app: Celery, durable: Durable, waits: Any, caplog: pytest.LogCaptureFixture
) -> None:
    pk = durable.internals.operations.queries.get("waits", "w-1").instance.pk
    event_type = task_event_type("nobody.knows.it", pk, 1, 1)
    true = reference_of(durable.internals.store, RunRef("waits", "w-1", 1), event_type).to_json()
    for position in range(len(true)):
        forged = list(true)
        forged[position] = 10**5000 if position in (3, 7) else "x" * 10_000
        for name, what in ((TASK_DONE, DONE), (TASK_FAILED, ERROR)):
            assert app.tasks[name].apply((what, forged)).get() == "noop: malformed message", position
    assert not caplog.records
    assert waits.status().status == "waiting"


def test_a_forged_answer_is_counted_and_logged(
    app: Celery, durable: Durable, waits: Any, caplog: pytest.LogCaptureFixture, registry: CollectorRegistry
) -> None:
    pk = durable.internals.operations.queries.get("waits", "w-1").instance.pk
    ref = RunRef("waits", "w-1", 1)
    true = reference_of(durable.internals.store, ref, task_event_type("nobody.knows.it", pk, 1, 1))
    assert len(true.token) == 32
    forged = dataclasses.replace(true, token="0" * 32)
    with caplog.at_level(logging.WARNING):
        call(app, TASK_DONE, DONE, forged.to_json())
    assert registry.get_sample_value("celery_durable_answers_refused_total") == 1
    assert f"An answer to {ref} ({true.event_type}) is refused: it does not have the task's token" in caplog.messages
    assert true.token not in caplog.text + repr(true)
    call(app, TASK_DONE, DONE, true.to_json())
    assert registry.get_sample_value("celery_durable_answers_refused_total") == 1
    assert waits.history().events[0].payload == {"output": DONE}
