"""preflight: all open runs against changed code; nothing is run, nothing is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import pytest
import sqlalchemy as sa

from celery_durable import Completed, LinearContext, LinearStep, Step, WorkflowEvent
from celery_durable.definitions import define_linear
from celery_durable.insight import preflight
from tests.cli.conftest import Shop
from tests.cli.test_replay import KEEP, deploy, everything, forbidden, trip


def start(shop: Shop, *ids: str) -> None:
    """Trips that sleep after their first step."""
    for each in ids:
        shop.pipe("start", "trip", "--id", each)
        shop.work("trip", each)


@pytest.fixture
def trips(shop: Shop) -> Shop:
    """Six trips: t-1, t-2 and t-3 wait for approval, t-4 and t-5 sleep, t-5 is paused; t-6 is complete."""
    deploy(shop, trip)
    start(shop, "t-1", "t-2", "t-3", "t-6")
    shop.clock.advance(hours=2)
    for each in ("t-1", "t-2", "t-3", "t-6"):
        shop.work("trip", each)
    start(shop, "t-4", "t-5")
    shop.pipe("pause", "trip", "t-5")
    shop.pipe("send-event", "trip", "t-6", "approval", "--payload", '"yes"')
    shop.work("trip", "t-6")
    return shop


@pytest.mark.parametrize("database", ["sqlite", "postgresql", "mariadb"], indirect=True)
def test_runs_that_the_code_follows_go_on_and_nothing_is_written(trips: Shop) -> None:
    before = everything(trips)
    said = trips.pipe("preflight")
    assert said.rows == [["workflow", "trip", "5", "0", "0"]]
    assert (said.code, said.err) == (0, "")
    assert everything(trips) == before


@pytest.mark.parametrize("database", ["sqlite", "postgresql", "mariadb"], indirect=True)
def test_runs_that_diverge_are_counted_where_they_diverge(trips: Shop) -> None:
    def today(event: WorkflowEvent[Any], step: Step) -> None:
        step.do("book", forbidden)
        step.sleep("cool off", "1 hour")
        step.do("charge", forbidden)

    deploy(trips, today)
    said = trips.pipe("preflight")
    sentence = "The code calls step 'charge', which is not recorded, where the record has step 'pay' (do), and 1 more."
    assert said.rows == [
        ["workflow", "trip", "2", "0", "3"],
        ["differs", "trip", "3", sentence, KEEP, "t-1, t-2, t-3"],
    ]
    assert said.code == 1


def test_open_steps_that_the_code_changes_are_a_warning(trips: Shop) -> None:
    def today(event: WorkflowEvent[Any], step: Step) -> None:
        step.do("book", forbidden)
        step.sleep("cool off", "2 hours")
        step.do("pay", forbidden)
        step.wait_for_event("await approval", "decision", timeout="1 day")

    deploy(trips, today)
    said = trips.pipe("preflight")
    assert said.rows == [
        ["workflow", "trip", "5", "5", "0"],
        [
            "changed", "trip", "3",
            "Open step 'await approval' (waitForEvent) was recorded with event 'approval', and the code has event "
            "'decision'.",
            "The wait keeps its deadline. The next pass changes what it waits for.", "t-1, t-2, t-3",
        ],
        [
            "changed", "trip", "2",
            "Open step 'cool off' (sleep) was recorded with length 1:00:00, and the code has length 2:00:00.",
            "The open step keeps its deadline.", "t-4, t-5",
        ],
    ]  # fmt: skip
    assert said.code == 0


@pytest.mark.parametrize(("reads_clock", "changed"), [(True, 3), (False, 0)])
def test_another_order_matters_if_the_code_asks_for_the_time_in_between(
    trips: Shop, reads_clock: bool, changed: int
) -> None:
    def today(event: WorkflowEvent[Any], step: Step) -> None:
        step.sleep("cool off", "1 hour")
        if reads_clock:
            step.now()
        step.do("book", forbidden)
        step.now()
        step.do("pay", forbidden)
        step.wait_for_event("await approval", "approval", timeout="1 day")

    deploy(trips, today)
    for each in ("t-4", "t-5"):
        assert trips.pipe("terminate", "trip", each).code == 0  # "book" is behind the step at which they are open
    said = trips.pipe("preflight")
    assert said.rows[0] == ["workflow", "trip", "3", str(changed), "0"]
    if changed:
        assert said.rows[1] == [
            "changed", "trip", "3",
            "The code calls step 'cool off' and step.now() before step 'book'; the record, after.",
            "step.now() returns another time there than in earlier passes. Recorded results are kept.",
            "t-1, t-2, t-3",
        ]  # fmt: skip


def test_a_step_called_twice_is_no_other_order(shop: Shop) -> None:
    def code(event: WorkflowEvent[Any], step: Step) -> None:
        step.do("a", int)
        step.do("b", int)
        step.now()
        step.do("a", int)
        step.sleep("nap", "1 hour")

    deploy(shop, code)
    start(shop, "t-1")
    assert shop.pipe("preflight").rows == [["workflow", "trip", "1", "0", "0"]]


def test_a_workflow_that_the_code_lost_diverges(trips: Shop) -> None:
    del trips.durable.internals.registry._definitions["trip"]
    said = trips.pipe("preflight")
    assert said.rows == [
        ["workflow", "trip", "0", "0", "5"],
        [
            "differs", "trip", "5", "The code has no workflow of this name.",
            "Keep the workflow, or import its module, until no run of it is left.", "t-1, t-2, t-3, ...",
        ],
    ]  # fmt: skip
    assert said.code == 1


def test_a_linear_workflow_needs_the_handlers_of_its_open_steps(shop: Shop) -> None:
    steps = [LinearStep("first"), LinearStep("second")]
    definition = define_linear("line", module=__name__, version=1, steps=steps)

    def handle(ctx: LinearContext) -> Completed:
        return Completed()

    definition.handlers.update(first=handle, second=handle)
    shop.durable.internals.registry.add(definition)
    shop.pipe("start", "line", "--id", "l-1")
    assert shop.pipe("preflight").rows == [["workflow", "line", "1", "0", "0"]]
    del definition.handlers["second"]
    said = shop.pipe("preflight")
    assert said.rows == [
        ["workflow", "line", "0", "0", "1"],
        [
            "differs", "line", "1", "The code has no handler for step 'second'.",
            "Keep the handlers of all steps of unfinished runs.", "l-1",
        ],
    ]  # fmt: skip
    assert said.code == 1


def test_batches_and_samples_cover_the_oldest_and_the_newest(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "_BATCH", 2)
    deploy(shop, trip)
    start(shop, *(f"t-{number}" for number in range(1, 8)))
    deploy(shop, lambda event, step: step.do("other", forbidden))
    said = shop.pipe("preflight", "-o", "json")
    [found] = json.loads(said.out)["workflows"]
    assert (found["name"], found["continuing"], found["diverging"]) == ("trip", 0, 7)
    said = shop.pipe("preflight", "--sample", "3", "-o", "json")
    [found] = json.loads(said.out)["workflows"]
    assert found["differences"] == [
        {
            "sentence": "The code calls step 'other', which is not recorded, where the record has step 'book' (do), "
            "and 1 more.",
            "advice": KEEP,
            "count": 3,
            "instanceIds": ["t-1", "t-4", "t-7"],
        }
    ]
    assert said.code == 1


def test_a_run_that_ends_while_it_is_read_does_not_diverge(trips: Shop) -> None:
    """The rows of runs and of their steps come from two statements: the second may see more."""
    statements: list[str] = []

    def end_a_run(_conn: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if "workflow_run" in statement and "log_count" in statement and not statements:
            statements.append(statement)
            trips.clock.advance(days=2)
            assert trips.work("trip", "t-2") == "errored: EventTimeout"  # its wait has timed out

    engine = trips.durable.internals.store.engine
    sa.event.listen(engine, "after_cursor_execute", end_a_run)
    said = trips.pipe("preflight")
    sa.event.remove(engine, "after_cursor_execute", end_a_run)
    assert len(statements) == 1
    assert said.rows == [["workflow", "trip", "4", "0", "0"]]


def test_progress_is_printed(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    from celery_durable.cli.commands import replay as command

    monkeypatch.setattr(command, "_RUNS_PER_NOTE", 2)
    deploy(shop, trip)
    start(shop, "t-1", "t-2", "t-3", "t-4", "t-5")
    assert shop.pipe("preflight", "-w", "trip").err == "2 of 5 open runs checked\n4 of 5 open runs checked\n"


def test_exported_runs_need_no_database(trips: Shop, tmp_path: Path) -> None:
    path = tmp_path / "runs.json"
    path.write_text("".join(trips.pipe("export", "trip", f"t-{number}").out for number in range(1, 7)))
    deploy(trips, lambda event, step: step.do("book", forbidden))
    said = trips.pipe("preflight", "--file", str(path))
    assert said.rows[0] == ["workflow", "trip", "0", "0", "5"]
    assert said.code == 1
    assert trips.pipe("preflight", "--file", str(path), "-w", "order").err == "There are no open runs.\n"
    said = trips.pipe("preflight", "--file", str(path), "--sample", "2")
    assert said.err.endswith("Error: --sample chooses from the database, not from files.\n")
    assert said.code == 2


def test_a_misspelt_workflow_does_not_pass(trips: Shop, tmp_path: Path) -> None:
    path = tmp_path / "runs.json"
    path.write_text(trips.pipe("export", "trip", "t-1").out)
    for arguments in ([], ["--file", str(path)], ["-o", "json"]):
        said = trips.pipe("preflight", "-w", "trp", *arguments)
        assert (said.code, said.out) == (3, "")
        assert said.err == (
            "error: The app knows no workflow 'trp'.\n"
            "hint: Did you mean 'trip'? To list them: celery -A <your app> durable workflows\n"
        )


def test_people_see_a_table_and_then_where_runs_diverge(trips: Shop) -> None:
    deploy(trips, lambda event, step: step.do("book", forbidden))
    shown = [line.rstrip() for line in click.unstyle(trips.terminal("preflight")).splitlines()]
    assert shown[:5] == [
        "WORKFLOW   GO ON   CHANGED   DIVERGE",
        "trip       0       0         5",
        "differs   3 runs: trip/t-1, trip/t-2, trip/t-3",
        "  The code returns, where the record has step 'cool off' (sleep), and 2 more.",
        f"  {KEEP}",
    ]
