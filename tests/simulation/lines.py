"""What must hold of linear instances, besides what holds of all: their steps go along the arrows, in order."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from typing import Any

from tests.simulation.programs import is_once
from tests.simulation.witnesses import IS_COPY

_ARROWS = """
    'PENDING READY 0', 'READY RUNNING 0', 'WAITING READY 0', 'WAITING RUNNING 0', 'RUNNING WAITING 0', 'RUNNING DONE 0',
    'RUNNING READY 0', 'RUNNING READY 1', 'RUNNING DEAD 1', 'READY DEAD 1', 'WAITING DEAD 1'"""
_TAKES = "a.new_event IS NOT NULL AND a.new_event IS NOT a.old_event"

QUERIES = {
    "L4 a linear step goes along the arrows, each failure one attempt": f"""
        SELECT pk, step_key, old, new, attempts FROM author_arrow
        WHERE old || ' ' || new || ' ' || attempts NOT IN ({_ARROWS})
          -- what it begins to wait for has come before
          AND NOT (old = 'RUNNING' AND new = 'READY' AND new_event IS NOT NULL AND new_event IS NOT old_event)
           OR old <> 'RUNNING' AND new = 'DEAD' AND error <> 'WorkerCrashLoop'""",
    "L5 an event is taken by one arrow of the step that consumed it": f"""
        SELECT e.instance_pk, e.seq, e.consumed_by_step_key FROM workflow_event e JOIN workflow_step s
          ON s.instance_pk = e.instance_pk AND s.run_number = e.run_number AND s.step_key = e.consumed_by_step_key
        JOIN workflow_run r ON r.instance_pk = e.instance_pk AND r.run_number = e.run_number
        WHERE s.type = 'linear' AND e.delivered_at > r.created_at  -- what came along was taken in the run before
          AND 1 <> (
          SELECT count(*) FROM author_arrow a WHERE a.pk = e.instance_pk AND a.run = e.run_number
            AND a.step_key = s.step_key AND a.new_event = e.seq AND {_TAKES})
        UNION ALL
        SELECT a.pk, a.new_event, a.step_key FROM author_arrow a
        WHERE {_TAKES} AND NOT EXISTS (
          SELECT 1 FROM workflow_event e WHERE e.instance_pk = a.pk AND e.run_number = a.run AND e.seq = a.new_event
            AND e.consumed_by_step_key = a.step_key AND e.type = coalesce(a.wait_type, e.type))""",
    "L6 a linear wait times out at its deadline, without an event that came by then": """
        SELECT a.pk, a.step_key, a.at, a.deadline FROM author_arrow a
        WHERE a.old = 'WAITING' AND a.new = 'RUNNING' AND (a.at < a.deadline OR EXISTS (
          SELECT 1 FROM workflow_event e WHERE e.instance_pk = a.pk AND e.run_number = a.run AND e.type = a.wait_type
            AND e.created_at <= a.deadline AND e.created_at < a.at
            AND (e.delivered_at IS NULL OR e.delivered_at > a.at)))""",
    "L7 linear steps consume the events of a type in their order": """
        SELECT e.instance_pk, e.seq, o.seq FROM workflow_event e JOIN workflow_step s
          ON s.instance_pk = e.instance_pk AND s.run_number = e.run_number AND s.step_key = e.consumed_by_step_key
        JOIN workflow_event o ON o.instance_pk = e.instance_pk AND o.run_number = e.run_number AND o.type = e.type
          AND o.seq < e.seq AND (o.delivered_at IS NULL OR o.delivered_at > e.delivered_at)
        WHERE s.type = 'linear'""",
    "L8 no step of a linear instance runs while it sleeps": """
        SELECT i.instance_id, s.step_key FROM workflow_instance i JOIN workflow_step s
          ON s.instance_pk = i.id AND s.run_number = i.run_number
        WHERE i.status = 'waiting' AND s.status = 'RUNNING'""",
    "L9 a linear step begins when the one before it is done": """
        SELECT a.instance_pk, a.step_key, b.step_key FROM workflow_step a JOIN workflow_step b
          ON b.instance_pk = a.instance_pk AND b.run_number = a.run_number AND b.seq > a.seq
        WHERE a.type = 'linear' AND b.started_at < a.finished_at""",
}


def wrong(database: sqlite3.Connection, story: Any) -> list[str]:
    """Linear runs that do not follow from their list, their parameters or what was done to them."""
    query = """
        SELECT i.id, i.instance_id, r.run_number, i.run_number, i.status, r.params, r.output, r.error_name
        FROM workflow_instance i JOIN workflow_run r ON r.instance_pk = i.id WHERE i.kind = 'linear'"""
    found = []
    for pk, instance, run, current, status, params, output, error in database.execute(query).fetchall():
        steps = _steps(database, pk, run)
        names = [step["name"] for step in steps]
        plans = [story.plans[instance, run]] if (instance, run) in story.plans else story.deployed
        if names not in plans:
            found.append(f"L10 {instance}#{run} has the steps {names}, it began with {plans}")
        for step in steps:
            if step["is_copy"]:
                continue
            found += [
                f"L11 {instance}#{run} {step['name']}: {each}" for each in _unexplained(story, instance, run, step)
            ]
            found += _wrong_result(instance, step, json.loads(params)[step["name"]])
        if run == current and status == "complete" and output != steps[-1]["result"]:
            found.append(f"I8 the output of {instance} is {output}, its last step's is {steps[-1]['result']}")
        if run == current and status == "errored":
            found += _wrong_death(story, instance, run, json.loads(params), steps, error)
    for (instance, run, *turn), times in Counter(story.turns).items():
        if times > 1 + story.cuts[instance, run]:
            found.append(f"I9 {turn} of {instance}#{run} ran {times} times")
    return found


def _steps(database: sqlite3.Connection, pk: int, run: int) -> list[dict[str, Any]]:
    columns = ("name", "status", "attempts", "max_attempts", "result", "error_name", "payload", "lost", "failed")
    columns += ("is_copy",)
    query = f"""
        SELECT s.name, s.status, s.attempts, s.max_attempts, s.result, s.error_name, e.payload,
          (SELECT count(*) FROM author_arrow a WHERE a.pk = s.instance_pk AND a.run = s.run_number
             AND a.step_key = s.step_key AND a.attempts = 1
             AND a.error IN ('LEASE_EXPIRED', 'OutcomeUnknown', 'WorkerCrashLoop', 'StepTransactionLost')),
          (SELECT count(*) FROM author_arrow a WHERE a.pk = s.instance_pk AND a.run = s.run_number
             AND a.step_key = s.step_key AND a.attempts = 1 AND a.error IN ('Retry', 'ValueError', 'Dead')),
          {IS_COPY.format("s")}
        FROM workflow_step s LEFT JOIN workflow_event e
          ON e.instance_pk = s.instance_pk AND e.run_number = s.run_number AND e.seq = s.event_seq
        WHERE s.instance_pk = ? AND s.run_number = ? ORDER BY s.seq"""
    return [dict(zip(columns, row, strict=True)) for row in database.execute(query, (pk, run))]


def _unexplained(story: Any, instance: str, run: int, step: dict[str, Any]) -> list[str]:
    """Attempts that are counted and nobody made, or were made and nobody counted."""
    found, told, faults = [], story.failures[instance, run, step["name"]], story.faults[instance, run]
    if step["attempts"] != step["lost"] + step["failed"]:
        found.append(f"{step['attempts']} attempts, {step['lost']} lost and {step['failed']} failed")
    if step["lost"] > faults:
        found.append(f"{step['lost']} attempts ended with their workers, after {faults} faults")
    if not step["failed"] <= told <= step["failed"] + faults:
        found.append(f"the handler failed {told} times, and {step['failed']} of them are on record")
    return found


def _wrong_result(instance: str, step: dict[str, Any], does: dict[str, Any]) -> list[str]:
    if step["status"] != "DONE" or does["writes"]:  # the ledger tells what these must have returned
        return []
    said = json.loads(step["result"]).partition(" ")[2]
    should = "nothing" if step["payload"] is None else json.loads(step["payload"])
    return [] if said == should else [f"L12 {step['name']} of {instance} was given {said!r}, its event is {should!r}"]


def _wrong_death(
    story: Any, instance: str, run: int, params: dict[str, Any], steps: list[dict[str, Any]], error: str
) -> list[str]:
    step = next(step for step in steps if step["status"] == "DEAD")
    faults, is_last = story.faults[instance, run], step["attempts"] == step["max_attempts"]
    match error:
        case "Dead":
            is_right = params[step["name"]]["dies"]
        case "WorkerCrashLoop":
            is_right = faults >= 5
        case "OutcomeUnknown":
            is_right = (is_once(step["name"]) or step["max_attempts"] == 1) and faults > 0
        case "LEASE_EXPIRED" | "StepTransactionLost":
            is_right = is_last and faults > 0
        case _:
            is_right = is_last and error in ("Retry", "ValueError")
    return [] if is_right else [f"I8d {instance} has failed with {error} after {faults} faults: {step}"]
