"""A KeyError three frames deep, found by file and line with show, logs, history, explain and export."""

from __future__ import annotations

import json
from typing import Any

import pytest
import sqlalchemy as sa

from celery_durable import Completed, LinearStep, Retries, Step, StepConfig, WorkflowEvent
from celery_durable.definitions import define_linear
from tests.cli.conftest import Shop
from tests.support.three_frames import LINE, PLACE, charge

kinds = pytest.mark.parametrize("kind", ["function", "linear"])


@pytest.fixture
def failing(shop: Shop) -> Shop:
    """Workflows of both kinds whose step "charge card" fails three frames deep, in each of two attempts."""
    return define_failing(shop, attempts=2)


def define_failing(shop: Shop, *, attempts: int) -> Shop:
    retries = Retries(limit=attempts - 1, delay=60, backoff="constant")

    @shop.durable.workflow(name="function")
    def order(event: WorkflowEvent[None], step: Step) -> None:
        step.log.info("it begins")
        step.do("charge card", StepConfig(retries=retries), charge, {})

    steps = [LinearStep("charge card", max_attempts=attempts, delay=60, backoff="constant")]
    definition = define_linear("linear", module=__name__, version=1, steps=steps)
    definition.handlers["charge card"] = lambda ctx: Completed(charge({}))
    shop.durable.internals.registry.add(definition)
    return shop


def fail(shop: Shop, kind: str, times: int = 2) -> None:
    shop.pipe("start", kind, "--id", "i-1")
    for number in range(times):
        shop.clock.advance(seconds=60 * number)
        shop.work(kind, "i-1")


@kinds
def test_show_has_the_place_the_worker_and_in_full_the_traceback(failing: Shop, kind: str) -> None:
    fail(failing, kind)
    rows = [row for row in failing.pipe("show", kind, "i-1").rows if row[0] == "attempt"]
    assert [row[1:4] for row in rows] == [["charge card", str(number), "failed"] for number in (1, 2)]
    assert all(row[6] == PLACE and row[7].startswith("celery@tests, pid ") for row in rows)
    assert [row[8] for row in rows] == ["KeyError: 'total'"] * 2
    full = [row for row in failing.pipe("show", kind, "i-1", "--full").rows if row[0] == "attempt"]
    text = json.loads(full[0][-1])
    assert f'", line {LINE}, in look_up' in text
    assert text.splitlines()[-1] == "KeyError: 'total'"


@kinds
def test_a_person_reads_the_traceback_line_by_line(failing: Shop, kind: str) -> None:
    fail(failing, kind, times=1)
    shown = failing.terminal("show", kind, "i-1", "--full", columns=250)
    assert "FAILED ATTEMPT" in shown
    assert "TRACEBACK   charge card, attempt 1" in shown
    assert f'    File "{PLACE.rpartition(":")[0]}", line {LINE}, in look_up\n      return order["total"]' in shown
    assert "TRACEBACK" not in failing.terminal("show", kind, "i-1", columns=250)


@kinds
def test_logs_and_history_have_the_attempts_in_order_of_time(failing: Shop, kind: str) -> None:
    fail(failing, kind)
    text = f"step charge card, attempt 1, failed: KeyError: 'total', at {PLACE}, on celery@tests, pid "
    logs = failing.pipe("logs", kind, "i-1").rows
    assert [row[1:3] for row in logs if row[2] != "workflow"] == [["warn", "attempt"]] * 2
    assert next(row[3] for row in logs if row[2] == "attempt").startswith(text)
    assert [row[0] for row in logs] == sorted(row[0] for row in logs)
    assert failing.pipe("logs", kind, "i-1", "--level", "error").rows == []
    assert len(failing.pipe("logs", kind, "i-1", "--category", "attempt").rows) == 2
    found = json.loads(failing.pipe("logs", kind, "i-1", "-o", "json").out)
    assert [each["attempt"] for each in found["attempts"]] == [1, 2]
    history = [row for row in failing.pipe("history", kind, "i-1").rows if row[1] == "attempt"]
    assert [row[2] for row in history] == ["failed", "failed"]
    assert history[0][3].startswith(text)


def test_a_follower_prints_each_attempt_once(failing: Shop) -> None:
    fail(failing, "function")
    shown = failing.terminal("logs", "function", "i-1", "--follow", columns=250)
    assert shown.count("Traceback (most recent call last):") == 2


@kinds
def test_a_run_that_is_followed_from_its_start_shows_the_attempts_of_its_logs(failing: Shop, kind: str) -> None:
    def work() -> None:
        failing.clock.advance(seconds=60)
        failing.work(kind, "i-1")

    failing.clock.meanwhile = work
    followed = failing.pipe("start", kind, "--id", "i-1", "--follow").rows
    attempts = [row for row in followed if "attempt" in row]
    logged = [row for row in failing.pipe("logs", kind, "i-1").rows if "attempt" in row]
    assert [row[-1] for row in attempts] == [row[-1] for row in logged]
    assert len(attempts) >= 2
    documents = [json.loads(line) for line in failing.pipe("watch", kind, "i-1", "-o", "json").out.splitlines()]
    assert [each["attempt"]["step"] for each in documents if "attempt" in each] == ["charge card"] * len(attempts)


@kinds
def test_a_follower_reads_only_new_attempts(shop: Shop, kind: str) -> None:
    """The steps are read once, however often the run fails, and each attempt is read once."""
    failing = define_failing(shop, attempts=8)
    fail(failing, kind, times=1)
    statements: list[str] = []
    is_watching = True

    def record(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        if is_watching:
            statements.append(statement)

    def fail_again() -> None:
        nonlocal is_watching
        is_watching = False
        failing.clock.advance(seconds=60)
        failing.work(kind, "i-1")
        is_watching = True

    failing.clock.meanwhile = fail_again
    engine = failing.durable.internals.store.engine
    sa.event.listen(engine, "before_cursor_execute", record)
    try:
        shown = failing.terminal("logs", kind, "i-1", "--follow", columns=250)
    finally:
        sa.event.remove(engine, "before_cursor_execute", record)
    assert shown.count("Traceback (most recent call last):") == 8
    reads = [each for each in statements if "workflow_attempt" in each]
    assert len(reads) >= 8
    assert all("workflow_attempt.id > " in each for each in reads)
    assert not any("workflow_step.result" in each for each in statements)  # the query has the names of the steps


@kinds
def test_export_has_the_attempts(failing: Shop, kind: str) -> None:
    fail(failing, kind)
    found = json.loads(failing.pipe("export", kind, "i-1").out)["attempts"]
    assert [(each["attempt"], f"{each['file']}:{each['line']}") for each in found] == [(1, PLACE), (2, PLACE)]
    assert found[0]["error"] == {"name": "KeyError", "message": "'total'"}
    assert "in look_up" in found[0]["traceback"]
