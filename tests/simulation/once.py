"""Steps with ``on_lost="fail"``: no call follows one whose end is unknown, and each unknown end is reported once."""

from __future__ import annotations

import sqlite3
from collections import Counter
from typing import Any

from tests.simulation.programs import is_once
from tests.simulation.witnesses import IS_COPY

QUERIES = {
    "U1 an unknown end is reported once, and stays": """
        SELECT l.pk, l.run, l.step_key, count(*), s.status, s.error_name FROM author_lost l JOIN workflow_step s
          ON s.instance_pk = l.pk AND s.run_number = l.run AND s.step_key = l.step_key
        GROUP BY l.pk, l.run, l.step_key HAVING count(*) > 1 OR s.error_name IS NOT 'OutcomeUnknown'"""
}


def wrong(database: sqlite3.Connection, story: Any) -> list[str]:
    """Calls that should not have been, and steps whose end does not follow from their calls."""
    called = [body for body in story.bodies if is_once(body[2])]
    calls = Counter(body[:3] for body in called)
    # The code decides: a linear step that a deploy has taken from the list has the default.
    turns = Counter(called)
    turns.update(turn for turn in story.turns if is_once(turn[2]) and all(turn[2] in plan for plan in story.deployed))
    found = [f"U2 {call} was made {times} times" for call, times in turns.items() if times > 1]
    found += [
        f"U2 {step} was called {times} times, and {story.failures[step]} of them raised"
        for step, times in calls.items()
        if times > story.failures[step] + 1
    ]
    query = f"""
        SELECT i.instance_id, s.run_number, s.step_key, s.status, s.attempts, s.error_name FROM workflow_step s
        JOIN workflow_instance i ON i.id = s.instance_pk
        WHERE s.type = 'do' AND s.status IN ('completed', 'errored') AND NOT {IS_COPY.format("s")}"""
    for instance, run, step, status, attempts, error in database.execute(query):
        key = instance, run, step
        if is_once(step) and not _is_explained(calls[key], story.failures[key], attempts, error, story.faults[key[:2]]):
            found.append(f"U3 {key} is {status} ({error}) after {attempts} attempts, {calls[key]} calls")
    return found


def _is_explained(calls: int, raised: int, attempts: int, error: str | None, faults: int) -> bool:
    match error:
        case None:
            return calls == attempts == raised + 1
        case "ValueError":
            return calls == attempts == raised
        case "OutcomeUnknown":  # the worker may have died before the call, or after an exception
            return faults > 0 and {calls, raised} <= {attempts - 1, attempts}
    return False
