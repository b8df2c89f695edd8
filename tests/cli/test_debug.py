"""debug: a recorded run, step by step with pdb, forward and back; nothing is run, nothing is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from celery_durable import NonRetryableError, Step, StepFailed, WorkflowEvent
from tests.cli.conftest import Said, Shop
from tests.cli.test_replay import deploy, everything, forbidden


def journey(event: WorkflowEvent[Any], step: Step) -> str:
    booked = step.do("book", lambda: {"seat": 7})
    nights = booked["seat"] * 2
    step.sleep("cool off", "1 hour")
    try:
        step.do("pay", decline)
    except StepFailed as failure:
        reason = failure.error_name
    answer = step.wait_for_event("await approval", "approval", timeout="1 day")
    return f"{nights} {reason} {answer.payload}"


def decline() -> None:
    raise NonRetryableError("no money", name="CardDeclined")


@pytest.fixture
def waiting(shop: Shop) -> Shop:
    deploy(shop, journey)
    shop.pipe("start", "trip", "--id", "t-1")
    shop.work("trip", "t-1")
    shop.clock.advance(hours=2)
    shop.work("trip", "t-1")
    return shop


def debug(shop: Shop, *commands: str) -> Said:
    return shop.pipe("debug", "trip", "t-1", stdin="".join(f"{each}\n" for each in commands))


def told(said: Said) -> list[str]:
    """What it says of steps and what the commands print, without the places in the code."""
    lines = [line.replace("(durable) ", "") for line in said.out.splitlines()]
    return [line for line in lines if line and not line.startswith(("> ", "-> "))]


BOOK = "Call 1: step 'book' (do) returns what was recorded at 2030-01-01 00:00:00 UTC."
COOL_OFF = "Call 2: step 'cool off' (sleep) returns what was recorded at 2030-01-01 02:00:00 UTC."
PAY = "Call 3: step 'pay' (do) raises the recorded CardDeclined: no money"
APPROVAL = "Call 4: step 'await approval' (waitForEvent) is waiting."


@pytest.mark.parametrize("database", ["sqlite", "postgresql", "mariadb"], indirect=True)
def test_it_stops_at_each_step_up_to_the_end_of_the_record(waiting: Shop) -> None:
    before = everything(waiting)
    said = debug(waiting, "forward", "p nights", "forward", "forward", "p reason", "forward")
    assert told(said) == [BOOK, COOL_OFF, "14", PAY, APPROVAL, "'CardDeclined'"]
    assert (said.err, said.code) == ("The record is open at step 'await approval'.\n", 0)
    assert everything(waiting) == before


def test_it_shows_the_line_of_the_code_that_calls_the_step(waiting: Shop) -> None:
    said = debug(waiting, "forward")
    assert "test_debug.py" in said.out
    assert '-> step.sleep("cool off", "1 hour")' in said.out


def test_it_goes_back_and_the_code_is_there_as_it_was(waiting: Shop) -> None:
    said = debug(waiting, "forward 3", "back", "back 1", "p nights", "back 9", "p 'nights' in dir()", "quit")
    assert told(said) == [BOOK, APPROVAL, PAY, COOL_OFF, "14", BOOK, "False"]
    assert (said.err, said.code) == ("", 0)


def test_it_goes_to_a_step_by_number_and_by_name(waiting: Shop) -> None:
    said = debug(waiting, "goto pay", "goto 2", "goto nap", "run", "quit")
    assert told(said) == [BOOK, PAY, COOL_OFF, "*** No step 'nap' is recorded. Type steps.", BOOK]


def test_it_lists_steps_and_prints_results(waiting: Shop) -> None:
    said = debug(waiting, "result", "forward 2", "result", "steps", "quit")
    lines = [line.replace("(durable) ", "") for line in said.out.splitlines()]
    assert '{"seat":7}' in [line.replace(" ", "") for line in lines]
    assert "*** The code stands at no completed step." in lines
    assert [line for line in lines if line[3:6].strip().isdigit()] == [
        "     1 book (do), completed",
        "     2 cool off (sleep), completed",
        "->   3 pay (do), errored",
        "     4 await approval (waitForEvent), waiting",
    ]


def test_the_commands_of_pdb_move_in_the_code_of_the_workflow(waiting: Shop) -> None:
    said = debug(waiting, "next", "p booked", "step", "next", "p nights", "back", "p nights", "quit")
    assert told(said) == [BOOK, "{'seat': 7}", COOL_OFF, "14", COOL_OFF, "14"]
    places = [line for line in said.out.splitlines() if line.startswith("-> ")]
    assert places == [
        '-> booked = step.do("book", lambda: {"seat": 7})',
        '-> nights = booked["seat"] * 2',
        '-> step.sleep("cool off", "1 hour")',
        "-> try:",
        '-> step.sleep("cool off", "1 hour")',
    ]


def test_forward_after_a_line_goes_on_to_the_next_step(waiting: Shop) -> None:
    said = debug(waiting, "next", "forward", "continue")
    assert told(said) == [BOOK, COOL_OFF]
    assert said.err == "The record is open at step 'await approval'.\n"


def test_continue_stops_at_a_breakpoint(waiting: Shop) -> None:
    line = journey.__code__.co_firstlineno + 7
    said = debug(waiting, f"tbreak {__file__}:{line}", "continue", "p reason if 'reason' in dir() else failure", "q")
    assert "-> reason = failure.error_name" in said.out


def test_input_that_ends_leaves(waiting: Shop) -> None:
    said = debug(waiting)
    assert (told(said), said.err, said.code) == ([BOOK], "", 0)


def test_a_file_needs_no_database(waiting: Shop, tmp_path: Path) -> None:
    path = tmp_path / "t-1.json"
    path.write_text(waiting.pipe("export", "trip", "t-1").out)
    said = waiting.pipe("debug", "--file", str(path), stdin="continue\n")
    assert (told(said), said.err) == ([BOOK], "The record is open at step 'await approval'.\n")
    path.write_text(path.read_text() * 2)
    assert waiting.pipe("debug", "--file", str(path)).err == (
        f"error: {path} has 2 runs.\nhint: Export the run alone, into a file of its own.\n"
    )


def test_code_that_differs_is_debugged_to_where_it_does(waiting: Shop) -> None:
    def today(event: WorkflowEvent[Any], step: Step) -> None:
        step.do("charge", forbidden)

    deploy(waiting, today)
    said = debug(waiting, "forward")
    assert told(said) == ["Call 1: step 'charge' is not recorded. A worker would run it now."]
    assert said.err.startswith("The code calls step 'charge', which is not recorded, where the record has step 'book'")


def test_it_wants_one_run(shop: Shop) -> None:
    for words in ((), ("trip",), ("trip", "t-1", "--file", "a.json"), ("--file", "a.json", "--run", "1")):
        said = shop.pipe("debug", *words)
        assert said.err.endswith("Error: Name an instance, WORKFLOW ID, or a file, --file FILE.\n")
        assert said.code == 2
