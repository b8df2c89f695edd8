"""replay: a recorded run against changed code; nothing is run, nothing is written."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from celery_durable import LinearStep, NonRetryableError, Retries, Step, StepConfig, StepFailed, WorkflowEvent
from celery_durable.definitions import define_linear
from tests.cli.conftest import Said, Shop

Code = Callable[[WorkflowEvent[Any], Step], Any]
KEEP = (
    "Keep the recorded steps and their names until no run with them is left, or give the changed workflow a new name."
)


def forbidden() -> Any:
    pytest.fail("a body was run")


def deploy(shop: Shop, code: Code, **options: Any) -> None:
    """The code of today."""
    code.__module__, code.__qualname__ = __name__, "trip"
    shop.durable.workflow(name="trip", **options)(code)


def trip(event: WorkflowEvent[Any], step: Step) -> str:
    booked = step.do("book", lambda: "F1")
    step.sleep("cool off", "1 hour")
    step.do("pay", lambda: 7)
    answer = step.wait_for_event("await approval", "approval", timeout="1 day")
    return f"{booked} {answer.payload}"


@pytest.fixture
def waiting(shop: Shop) -> Shop:
    """A trip t-1 that waits for its approval."""
    deploy(shop, trip)
    shop.pipe("start", "trip", "--id", "t-1")
    shop.work("trip", "t-1")
    shop.clock.advance(hours=2)
    shop.work("trip", "t-1")
    return shop


def call_replay(shop: Shop, path: Path | None, *words: str) -> Said:
    if path is None:
        return shop.pipe("replay", "trip", "t-1", *words)
    path.write_text(shop.pipe("export", "trip", "t-1", *words).out)
    return shop.pipe("replay", "--file", str(path))


@pytest.fixture
def replay(shop: Shop) -> Callable[..., Said]:
    """`replay trip t-1`, from the database."""
    return partial(call_replay, shop, None)


@pytest.fixture(params=["store", "file"])
def replay_both(request: pytest.FixtureRequest, shop: Shop, tmp_path: Path) -> Callable[..., Said]:
    """`replay trip t-1`, from the database, or from what `export` prints of it."""
    return partial(call_replay, shop, tmp_path / "t-1.json" if request.param == "file" else None)


def everything(shop: Shop) -> list[Any]:
    """All rows of all tables."""
    with shop.durable.internals.store.engine.connect() as connection:
        tables = shop.durable.internals.store.tables.metadata.sorted_tables
        return [row for table in tables for row in connection.execute(sa.select(table)).all()]


@pytest.mark.parametrize("database", ["sqlite", "postgresql", "mariadb"], indirect=True)
def test_a_run_that_the_code_follows_is_replayed_to_where_it_waits(waiting: Shop, replay_both: Any) -> None:
    before = everything(waiting)
    said = replay_both()
    assert said.rows == [
        ["run", "trip", "t-1", "1", "waiting"],
        ["step", "book", "do", "replayed"],
        ["step", "cool off", "sleep", "replayed"],
        ["step", "pay", "do", "replayed"],
        ["end", "The record is open at step 'await approval'."],
    ]
    assert (said.code, said.err) == (0, "")
    assert everything(waiting) == before


def test_no_body_is_run_where_the_record_ends(shop: Shop, replay: Any) -> None:
    deploy(shop, lambda event, step: step.do("book", forbidden))
    shop.pipe("start", "trip", "--id", "t-1")
    said = replay()
    assert said.rows == [["run", "trip", "t-1", "1", "active"], ["end", "The record ends before step 'book'."]]
    assert said.code == 0


def test_a_step_of_another_kind_is_named_with_both_kinds(waiting: Shop, replay: Any) -> None:
    def today(event: WorkflowEvent[Any], step: Step) -> None:
        step.sleep("book", "1 hour")

    deploy(waiting, today)
    said = replay()
    assert [row for row in said.rows if row[0] == "differs"] == [
        [
            "differs",
            "Step 'book' is recorded as 'do', but the code now calls it as 'sleep'.",
            "Give the new step another name; a recorded name keeps its kind.",
        ]
    ]
    assert said.code == 1


def test_a_renamed_step_is_named_with_the_one_that_is_recorded(waiting: Shop, replay: Any) -> None:
    def today(event: WorkflowEvent[Any], step: Step) -> None:
        step.do("book", forbidden)
        step.do("charge", forbidden)

    deploy(waiting, today)
    said = replay()
    assert said.rows[1:] == [
        ["step", "book", "do", "replayed"],
        ["step", "cool off", "sleep", "not called"],
        ["step", "pay", "do", "not called"],
        ["step", "await approval", "event", "not called"],
        [
            "differs",
            "The code calls step 'charge', which is not recorded, where the record has step 'cool off' (sleep), and 2 "
            "more.",
            KEEP,
        ],
        ["end", "The record ends before step 'charge'."],
    ]
    assert said.code == 1


def test_recorded_steps_that_are_never_called_are_named(waiting: Shop, replay: Any) -> None:
    def today(event: WorkflowEvent[Any], step: Step) -> str:
        step.do("book", forbidden)
        return "done"

    deploy(waiting, today)
    said = replay()
    assert ["differs", "The code returns, where the record has step 'cool off' (sleep), and 2 more.", KEEP] in said.rows
    assert said.code == 1


def test_a_result_that_no_longer_fits_is_named(waiting: Shop, replay: Any) -> None:
    def ticket() -> dict[str, int]:
        pytest.fail("a body was run")

    def today(event: WorkflowEvent[Any], step: Step) -> None:
        step.do("book", ticket)

    deploy(waiting, today)
    said = replay()
    [difference] = [row for row in said.rows if row[0] == "differs"]
    assert difference[1].startswith("The result of step 'book' does not fit the function's return annotation: ")
    assert said.code == 1


def test_code_that_fails_where_the_record_goes_on_is_told(waiting: Shop, replay: Any) -> None:
    def today(event: WorkflowEvent[Any], step: Step) -> None:
        step.do("book", forbidden)
        raise KeyError("seat")

    deploy(waiting, today)
    said = replay()
    assert "The code ends errored with KeyError: 'seat', where the record has step 'cool off' (sleep)" in said.out
    assert said.code == 1


def test_code_that_swallows_the_suspension_is_told(waiting: Shop, replay: Any) -> None:
    def today(event: WorkflowEvent[Any], step: Step) -> None:
        try:
            trip(event, step)
        except BaseException:  # the mistake
            pass

    deploy(waiting, today)
    said = replay()
    assert "ends errored with SuspensionSwallowed" in said.out
    assert said.code == 1


@pytest.fixture
def complete(waiting: Shop) -> Shop:
    waiting.pipe("send-event", "trip", "t-1", "approval", "--payload", '"yes"')
    assert waiting.work("trip", "t-1") == "complete"
    return waiting


def test_a_complete_run_is_replayed_to_its_end(complete: Shop, replay_both: Any) -> None:
    said = replay_both()
    assert [row[3] for row in said.rows if row[0] == "step"] == ["replayed"] * 4
    assert (said.rows[-1], said.code) == (["end", "The code returns."], 0)


def test_a_complete_run_has_no_room_for_a_new_step(complete: Shop, replay: Any) -> None:
    def today(event: WorkflowEvent[Any], step: Step) -> str:
        said = trip(event, step)
        step.do("thank", forbidden)
        return said

    deploy(complete, today)
    said = replay()
    assert ["differs", "The code calls step 'thank', which is not recorded, where the record is complete.", KEEP] in (
        said.rows
    )
    assert said.code == 1


def test_a_recorded_failure_is_raised_again_and_fixed_code_may_continue(shop: Shop, replay_both: Any) -> None:
    def declined() -> None:
        raise NonRetryableError("no money", name="CardDeclined")

    def yesterday(event: WorkflowEvent[Any], step: Step) -> None:
        step.do("pay", declined)

    deploy(shop, yesterday)
    shop.pipe("start", "trip", "--id", "t-1")
    shop.work("trip", "t-1")
    said = replay_both()
    assert said.rows[1:] == [
        ["step", "pay", "do", "replayed"],
        ["end", "The code ends errored with CardDeclined: no money."],
    ]
    assert said.code == 0

    def today(event: WorkflowEvent[Any], step: Step) -> None:
        try:
            step.do("pay", forbidden)
        except StepFailed as failure:
            assert failure.error_name == "CardDeclined"
            step.do("ask for another card", forbidden)

    deploy(shop, today)
    said = replay_both()
    assert (said.rows[-1], said.code) == (["end", "The record ends before step 'ask for another card'."], 0)


def test_a_step_that_waits_for_another_attempt_is_where_the_record_is_open(shop: Shop, replay_both: Any) -> None:
    def today(event: WorkflowEvent[Any], step: Step) -> None:
        step.do("pay", StepConfig(retries=Retries(limit=3)), lambda: 1 / 0)

    deploy(shop, today)
    shop.pipe("start", "trip", "--id", "t-1")
    shop.work("trip", "t-1")
    assert replay_both().rows[1:] == [["end", "The record is open at step 'pay'."]]
    shop.pipe("terminate", "trip", "t-1")
    said = replay_both()
    assert said.rows == [["run", "trip", "t-1", "1", "terminated"], ["end", "The record is open at step 'pay'."]]
    assert said.code == 0


def test_branches_and_races_are_followed(shop: Shop, replay_both: Any) -> None:
    def today(event: WorkflowEvent[Any], step: Step) -> Any:
        both = step.gather(step.submit("a", lambda: 1), step.submit("b", lambda: 2))
        winner = step.first("race", step.submit("quick", lambda: "q"), step.submit_sleep("slow", "1 hour"))
        step.gather(step.submit_sleep("nap", "1 hour"), step.submit_wait_for_event("ask", "answer"))
        return both, winner

    deploy(shop, today)
    shop.pipe("start", "trip", "--id", "t-1")
    shop.work("trip", "t-1")
    said = replay_both()
    assert said.rows[1:] == [
        *(["step", name, kind, "replayed"] for name, kind in [("a", "do"), ("b", "do"), ("quick", "do")]),
        ["step", "slow", "sleep", "replayed"],
        ["step", "race", "do", "replayed"],
        ["end", "The record is open at steps 'nap', 'ask'."],
    ]
    assert said.code == 0


def test_time_and_chance_are_those_of_the_record(shop: Shop, replay_both: Any) -> None:
    def today(event: WorkflowEvent[Any], step: Step) -> None:
        step.do(f"at {event.timestamp}", lambda: 1)
        step.do(f"then {step.now()}", lambda: 2)
        step.do(f"dice {step.random()}", lambda: 3)
        step.sleep("nap", "1 hour")

    deploy(shop, today)
    shop.pipe("start", "trip", "--id", "t-1")
    shop.clock.advance(microseconds=7)
    shop.work("trip", "t-1")
    shop.clock.advance(hours=2)
    said = replay_both()
    assert [row[3] for row in said.rows if row[0] == "step"] == ["replayed"] * 3
    assert (said.rows[-1], said.code) == (["end", "The record is open at step 'nap'."], 0)


def test_a_run_before_the_current_one_is_replayed(complete: Shop, replay_both: Any) -> None:
    complete.pipe("restart", "trip", "t-1")
    assert replay_both().rows == [["run", "trip", "t-1", "2", "active"], ["end", "The record ends before step 'book'."]]
    said = replay_both("--run", "1")
    assert (said.rows[0], said.rows[-1]) == (["run", "trip", "t-1", "1", "complete"], ["end", "The code returns."])


def test_a_run_that_continues_another_has_its_time_and_chance_in_the_database(shop: Shop, tmp_path: Path) -> None:
    def today(event: WorkflowEvent[Any], step: Step) -> None:
        step.do(f"dice {step.random()}", lambda: 3)
        step.sleep("nap", "1 hour")

    deploy(shop, today)
    shop.pipe("start", "trip", "--id", "t-1")
    shop.work("trip", "t-1")
    shop.pipe("rewind", "trip", "t-1", "nap")
    assert shop.pipe("replay", "trip", "t-1").code == 0
    path = tmp_path / "t-1.json"
    path.write_text(shop.pipe("export", "trip", "t-1").out)
    said = shop.pipe("replay", "--file", str(path))
    assert said.err.startswith("trip/t-1#2 continues another run. An export does not contain the values")


def test_a_file_may_hold_many_runs_and_needs_no_database(complete: Shop, tmp_path: Path) -> None:
    path = tmp_path / "runs.json"
    exported = complete.pipe("export", "trip", "t-1").out
    path.write_text(exported + json.dumps(json.loads(exported)) + "\n")
    complete.durable.close()
    for part in ("settings", "store", "runner", "operations", "outbox"):
        vars(complete.durable.internals).pop(part, None)  # as in another process
    complete.app.conf.durable_database_url = "postgresql+psycopg://nobody@127.0.0.1:1/none"
    said = complete.pipe("replay", "--file", str(path), "--file", str(path))
    assert [row[0] for row in said.rows].count("run") == 4
    assert said.code == 0, said.err


def test_a_file_that_holds_no_run_is_refused(shop: Shop, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    for text in ("{", "[]", "{}", '{"version": 2, "steps": []}', '{"version": 1, "steps": []}'):
        path.write_text(text)
        said = shop.pipe("replay", "--file", str(path))
        assert said.err.startswith(f"error: {path} cannot be read: ")
        assert said.err.endswith("durable export order order-42\n")
        assert (said.out, said.code) == ("", 1)


def test_what_cannot_be_replayed_is_refused(shop: Shop) -> None:
    assert shop.pipe("replay", "trip", "none").code == 3
    assert shop.pipe("replay", "trip").code == 2
    assert shop.pipe("replay", "trip", "t-1", "--file", __file__).code == 2


def test_a_linear_workflow_has_no_code_to_replay_both(shop: Shop, replay_both: Any) -> None:
    shop.durable.internals.registry.add(define_linear("trip", module="trips", version=1, steps=[LinearStep("one")]))
    shop.pipe("start", "trip", "--id", "t-1")
    said = replay_both()
    assert said.err == (
        "error: Workflow 'trip' is linear and has no code to replay: a run follows the rows that it began with.\n"
    )
    assert said.code == 1


def test_it_is_shown_to_people(waiting: Shop) -> None:
    deploy(waiting, lambda event, step: step.do("book", forbidden))
    waiting.no_color = True
    shown = waiting.terminal("replay", "trip", "t-1")
    assert shown.splitlines()[0] == "trip/t-1#1   waiting"
    assert "differs   The code returns, where the record has step 'cool off' (sleep), and 2 more." in shown
    assert shown.splitlines()[-1] == "The code returns."
