"""What must hold of the database at any moment of a schedule, and what must hold when all is over.

The queries are those of the engine's tests, and more: here every step says which execution of its body it records.
"""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Mapping
from typing import Any

from tests.simulation import delegates, limited, lines, maps, messages, once, topics
from tests.simulation.linear import is_linear
from tests.simulation.programs import FAILS, expected, find_cleanup
from tests.support import invariants

_ROWS_OF_RUN = "s.instance_pk = i.id AND s.run_number = i.run_number"

_TYPE = "CASE WHEN e.type LIKE 'topic:%' THEN substr(e.type, 7 + instr(substr(e.type, 7), ':')) ELSE e.type END"
"""What the wait that consumed an event calls its type."""

QUERIES = {
    **{name: query for name, query in invariants.QUERIES.items() if name.split()[0] not in ("I4", "Q1")},
    **limited.QUERIES,
    "I3b step and ledger come from the same execution of the body": """
        SELECT i.instance_id, s.step_key, s.result, l.execution
        FROM workflow_step s JOIN workflow_instance i ON i.id = s.instance_pk
        JOIN author_ledger l ON l.instance = i.instance_id AND l.run = s.run_number AND l.step = s.name
        WHERE s.result <> CAST(l.execution AS TEXT)""",
    "I3c no two steps record the same execution": """
        SELECT result, count(DISTINCT commit_id) FROM workflow_step
        WHERE type = 'do' AND result IS NOT NULL AND step_key NOT LIKE 'race%'
        GROUP BY result HAVING count(DISTINCT commit_id) > 1""",
    "I4 no step ended before an earlier one that is still open": """
        SELECT s.instance_pk, s.step_key, o.step_key FROM workflow_step s JOIN workflow_step o
          ON o.instance_pk = s.instance_pk AND o.run_number = s.run_number AND o.seq < s.seq
        WHERE s.status IN ('completed', 'errored') AND o.status IN ('pending', 'waiting')
          AND NOT (s.step_key LIKE '%~%' AND o.step_key LIKE '%~%')""",
    "I4c a race is decided together with its losers": f"""
        SELECT i.instance_id, s.step_key, o.step_key FROM workflow_instance i
        JOIN workflow_step s ON {_ROWS_OF_RUN} AND s.step_key LIKE 'race%' AND s.status = 'completed'
        JOIN workflow_step o ON o.instance_pk = i.id AND o.run_number = i.run_number AND o.seq < s.seq
          AND o.step_key LIKE '%' || substr(s.step_key, 5) || '~%' AND o.status IN ('pending', 'waiting')""",
    "I5d a wait records the event that it consumed": """
        SELECT s.instance_pk, s.step_key, s.result, e.payload FROM workflow_step s JOIN workflow_event e
          ON e.instance_pk = s.instance_pk AND e.run_number = s.run_number AND e.consumed_by_step_key = s.step_key
        WHERE s.type = 'waitForEvent'
          AND s.result <> '{"type":"' || {type}
            || '","at":' || e.created_at || ',"payload":' || e.payload || '}'""".replace("{type}", _TYPE),
    "I5e events are consumed in their order": """
        SELECT e.instance_pk, e.seq, o.seq FROM workflow_event e
        JOIN workflow_step s ON s.instance_pk = e.instance_pk AND s.run_number = e.run_number
          AND s.step_key = e.consumed_by_step_key
        JOIN workflow_event o ON o.instance_pk = e.instance_pk AND o.run_number = e.run_number AND o.type = e.type
          AND o.seq < e.seq AND o.delivered_at IS NULL AND o.created_at <= s.wake_at""",
    "I5f a wait times out at its deadline, without an event that came by then": """
        SELECT s.instance_pk, s.step_key, s.finished_at, s.wake_at FROM workflow_step s
        WHERE s.type = 'waitForEvent' AND s.error_name = 'EventTimeout' AND (s.finished_at < s.wake_at OR EXISTS (
          SELECT 1 FROM workflow_event e WHERE e.instance_pk = s.instance_pk AND e.run_number = s.run_number
            AND e.type = s.wait_event_type AND e.created_at <= s.wake_at AND e.created_at < s.finished_at
            AND (e.delivered_at IS NULL OR e.delivered_at > s.finished_at)))""",
    "I16b a run that was rewound keeps nothing of what was called from its step on": """
        SELECT s.instance_pk, s.run_number, s.step_key FROM workflow_step s
        JOIN workflow_run r ON r.instance_pk = s.instance_pk AND r.run_number = s.run_number
        JOIN workflow_instance i ON i.id = s.instance_pk
        JOIN workflow_instance j ON j.instance_id = r.forked_from_instance_id
        JOIN workflow_run p
          ON p.instance_pk = j.id AND p.run_number = r.forked_from_run_number AND p.failed_steps IS NULL
        JOIN workflow_step o ON o.instance_pk = j.id AND o.run_number = p.run_number AND o.step_key = s.step_key
          AND o.commit_id = s.commit_id
        JOIN workflow_step t ON t.instance_pk = j.id AND t.run_number = p.run_number
          AND t.step_key = r.forked_from_step_key
        WHERE s.seq >= t.seq""",
    "I6c what is due is picked up in reasonable time": """
        SELECT instance_id, run_at, next_check_at FROM workflow_instance
        WHERE claim_token IS NULL AND status IN ('active', 'waiting')
          AND next_check_at > CASE WHEN sent_at IS NULL THEN max(run_at, :now) + 60 * 1000000
            ELSE sent_at + 1800 * 1000000 END""",
    "I6g only what waits for a worker has a hint under way": """
        SELECT instance_id, status, sent_at FROM workflow_instance
        WHERE sent_at IS NOT NULL AND (status NOT IN ('active', 'waiting') OR next_check_at IS NULL
          OR (claim_token IS NULL AND run_at > sent_at))""",
    "I6d a claim is looked at when its lease ends": """
        SELECT instance_id, lease_until, next_check_at FROM workflow_instance
        WHERE claim_token IS NOT NULL
          AND (next_check_at IS NULL OR next_check_at > max(lease_until, :now) + 30 * 1000000)""",
    # After a rewind to one of its branches, the others of a call end in a commit of their own.
    "C2 a run raises Cancelled at one call": """
        SELECT instance_pk, run_number FROM workflow_step WHERE status = 'cancelled' AND error_name = 'Cancelled'
        GROUP BY instance_pk, run_number HAVING count(DISTINCT CASE instr(step_key, '~') WHEN 0 THEN step_key
          ELSE substr(step_key, instr(step_key, '~') - 1, 1) END) > 1""",
    "I8c a sleep does not end early": """
        SELECT s.instance_pk, s.step_key FROM workflow_step s
        WHERE s.type = 'sleep' AND s.status = 'completed' AND s.finished_at < s.wake_at""",
    **lines.QUERIES,
    **once.QUERIES,
    **topics.QUERIES,
    **messages.QUERIES,
    **delegates.QUERIES,
    **maps.QUERIES,
}

_TABLES = ("instance", "run", "step", "event", "log")
_OTHERS = (
    "workflow_topic_wait",
    "workflow_emission",
    "workflow_outbox",
    "workflow_item",
    "author_ledger",
    "author_arrow",
)


def broken(database: sqlite3.Connection, now_us: int, queries: Mapping[str, str] = QUERIES) -> list[str]:
    """The invariants that do not hold now, with a row that shows it."""
    found = []
    for name, query in queries.items():
        row = database.execute(query, {"now": now_us} if ":now" in query else {}).fetchone()
        if row is not None:
            found.append(f"{name}: {row}")
    return found


def dump(database: sqlite3.Connection) -> dict[str, list[tuple[Any, ...]]]:
    """Every row of every table."""
    tables = [*(f"workflow_{name}" for name in _TABLES), *_OTHERS]
    return {table: database.execute(f"SELECT * FROM {table} ORDER BY 1, 2, 3").fetchall() for table in tables}


def of_run(database: sqlite3.Connection, instance: str, run: int) -> list[list[tuple[Any, ...]]]:
    """Everything that is recorded of one run."""
    pk = "(SELECT id FROM workflow_instance WHERE instance_id = ?)"
    return [
        database.execute(
            f"SELECT * FROM workflow_{table} WHERE instance_pk = {pk} AND run_number = ? ORDER BY 1, 2, 3",
            (instance, run),
        ).fetchall()
        for table in _TABLES[1:]
    ]


def wrong_endings(database: sqlite3.Connection, story: Any) -> list[str]:
    """Endings that do not follow from what is recorded, or from what was done to the instance."""
    found = []
    query = """
        SELECT i.id, i.instance_id, i.run_number, i.status, r.params, r.output, r.error_name, r.error_message
        FROM workflow_instance i JOIN workflow_run r ON r.instance_pk = i.id AND r.run_number = i.run_number"""
    for pk, instance, run, status, params, output, error, message in database.execute(query).fetchall():
        faults = story.faults[instance, run]
        match status:
            case "complete" | "errored" if is_linear(instance):
                continue  # see lines.wrong
            case "complete":
                rows = database.execute(
                    "SELECT step_key, status, result, error_name FROM workflow_step WHERE instance_pk = ? "
                    "AND run_number = ?",
                    (pk, run),
                )
                steps = {key: (state, None if it is None else json.loads(it), name) for key, state, it, name in rows}
                steps |= maps.results(database, pk, run)
                should = expected(json.loads(params), steps)
                if json.loads(output) != should:
                    found.append(f"I8 the output of {instance} is {output}, its steps say {should}")
            case "errored":
                should_fail = any(op["key"] == FAILS for op in json.loads(params))
                if not (should_fail if error == "ValueError" else error == "WorkerCrashLoop" and faults >= 5):
                    found.append(f"I8d {instance} is errored after {faults} faults: {error}: {message}")
            case "terminated":
                if instance not in story.terminated:
                    found.append(f"I8e {instance} is terminated, and nobody asked for it")
                elif (instance, run) not in story.ended and not is_linear(instance):
                    found += _unfinished_cleanup(database, pk, run, json.loads(params))
            case _:
                found.append(f"I6e {instance} has not ended: {status}")
    return found


def _unfinished_cleanup(database: sqlite3.Connection, pk: int, run: int, ops: Any) -> list[str]:
    """What is missing of the cleanup of a run that has ended by itself."""
    query = """
        SELECT step_key, status = 'cancelled' AND error_name = 'Cancelled' FROM workflow_step
        WHERE instance_pk = ? AND run_number = ? AND finished_at IS NOT NULL"""
    finished = dict(database.execute(query, (pk, run)).fetchall())
    if not any(finished.values()):
        return [f"C6 run {run} of {pk} is terminated, and none of its calls has raised Cancelled"]
    missing = [op["key"] for op in find_cleanup(ops) if finished.get(op["key"], True)]
    return [f"C7 run {run} of {pk} has not finished its cleanup: {missing}"] if missing else []


def missed_events(database: sqlite3.Connection, story: Any) -> list[str]:
    """Waits that timed out although an event had come by their deadline, that very moment included.

    Unless another wait for the type took it, which was opened beside them when it had come.
    """
    timed_out = """
        SELECT i.instance_id, s.run_number, s.step_key FROM workflow_step s
        JOIN workflow_instance i ON i.id = s.instance_pk WHERE s.error_name = 'EventTimeout'"""
    taken = """
        SELECT i.instance_id, e.run_number, e.event_id FROM workflow_event e
        JOIN workflow_instance i ON i.id = e.instance_pk WHERE e.consumed_by_step_key IS NOT NULL"""
    late, consumed = set(database.execute(timed_out)), set(database.execute(taken))
    return [
        f"I5g {wait} timed out, and its event {event} had come"
        for wait, event in sorted(story.promised.items())
        if wait in late and (*wait[:2], event) not in consumed
    ]


def wrong_counts(database: sqlite3.Connection, story: Any) -> list[str]:
    """Bodies that ran too often, or attempts that nobody made."""
    found = []
    ran = Counter((instance, run, step) for instance, run, step, _ in story.bodies)
    for (instance, run, step, attempt), times in Counter(story.bodies).items():
        if times > 1 + story.cuts[instance, run]:
            found.append(f"I9 attempt {attempt} of {step} of {instance}#{run} ran {times} times")
    for (instance, run, step), times in ran.items():
        most = 1 + story.failures[instance, run, step] + story.faults[instance, run]
        if times > most:
            found.append(f"I9b the body of {step} of {instance}#{run} ran {times} times, at most {most} are explained")
    query = """
        SELECT i.instance_id, s.run_number, s.name, s.attempts FROM workflow_step s
        JOIN workflow_instance i ON i.id = s.instance_pk
        WHERE s.type = 'do' AND s.status <> 'cancelled' AND s.step_key NOT LIKE 'race%'
          AND NOT EXISTS (
            SELECT 1 FROM workflow_step c WHERE c.step_key = s.step_key AND c.commit_id = s.commit_id
              AND (c.instance_pk < s.instance_pk OR c.instance_pk = s.instance_pk AND c.run_number < s.run_number))"""
    excess: dict[tuple[str, int], dict[str, int]] = {}
    for instance, run, step, attempts in database.execute(query):
        # One fault may cost each branch of a group an attempt.
        group = "".join(filter(str.isdigit, step)) + "~" if "~" in step else step
        most = excess.setdefault((instance, run), {})
        most[group] = max(most.get(group, 0), attempts - ran[instance, run, step])
    found += [
        f"I10b {more} attempts of {instance}#{run} are counted that no body and no fault explains: {groups}"
        for (instance, run), groups in excess.items()
        if (more := sum(groups.values())) > story.faults[instance, run]
    ]
    events = set(database.execute("SELECT event_id, run_number FROM workflow_event WHERE event_id LIKE '%-event-%'"))
    ids = {instance for (instance,) in database.execute("SELECT instance_id FROM workflow_instance")}
    found += [f"I12 event {each} was accepted, and is not there" for each in sorted(story.accepted_events - events)]
    found += [f"I12d event {each} is there, and nobody sent it" for each in sorted(events - story.accepted_events)]
    found += [f"I12 instance {each} was accepted, and is gone" for each in story.accepted if each not in ids]
    return found
