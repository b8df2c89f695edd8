"""What must hold of steps that others do: each attempt is asked for once, and ends with its own answer or its time."""

from __future__ import annotations

import json
import sqlite3
from typing import Any

_ENDS = "old = 'waiting' AND old_asks IS NOT NULL"
_WAITS_FOR_LIMITS = "old = 'waiting' AND old_asks IS NULL"
_IS_DUE = "at >= coalesce(due, 0)"
_FAILED = """(json_extract(payload, '$.error.name') = error
    OR payload IS NULL AND error = 'StepTimeout' AND at >= deadline AND in_time = 0)"""
_IS_LAST = "(type = 'child' OR attempts = most OR error = 'NonRetryableError')"

QUERIES = {
    "D2 an answer is for one step, which waits for it": """
        SELECT pk, run, type, asking FROM author_answer WHERE asking <> 1""",
    "D3 a step gets one answer of a kind": """
        SELECT instance_pk, run_number, type FROM workflow_event WHERE type LIKE 'task:%' OR type LIKE 'child:%'
        GROUP BY instance_pk, run_number, type HAVING count(*) > 1""",
    "D4 an attempt of others ends with its own answer, or when its time is over": f"""
        SELECT pk, run, step_key, old, new, old_asks, asks, attempts, error, result, payload, at - deadline, in_time
        FROM author_attempt WHERE old <> 'new' AND NOT coalesce(
              {_ENDS} AND new = 'completed' AND more = 0 AND json(payload) = json('{{"output":' || result || '}}')
           OR {_ENDS} AND new = 'errored' AND more = 0 AND {_FAILED} AND {_IS_LAST}
           OR {_ENDS} AND new = 'waiting' AND asks IS NULL AND more = 0 AND {_FAILED} AND NOT {_IS_LAST}
           OR old = 'waiting' AND old_asks IS NULL AND new = 'waiting' AND asks IS NOT NULL AND more = 1 AND {_IS_DUE}
           OR {_WAITS_FOR_LIMITS} AND new = 'waiting' AND asks IS NULL AND more = 0 AND {_IS_DUE}
           OR old = 'waiting' AND new = 'cancelled', FALSE)""",
    "D5 an attempt of a task has a type and a deadline of its own": """
        SELECT pk, run, step_key, seq, attempts, asks, next_deadline - at, timeout FROM author_attempt
        WHERE type = 'task' AND new = 'waiting' AND asks IS NOT NULL
          AND (asks <> 'task:' || pk || ':' || seq || ':' || attempts || ':work' OR next_deadline <> at + timeout)
        UNION ALL
        SELECT pk, run, step_key, seq, count(*), asks, NULL, NULL FROM author_attempt
        WHERE new = 'waiting' AND asks IS NOT NULL GROUP BY pk, run, asks HAVING count(*) > 1""",
    "D6 a message goes with each attempt of a task": """
        SELECT a.pk, a.run, a.asks FROM author_attempt a
        WHERE a.type = 'task' AND a.new = 'waiting' AND a.asks IS NOT NULL AND 1 <> (
          SELECT count(*) FROM author_message l
          WHERE l.pk = a.pk AND l.run = a.run AND l.step_key = a.step_key AND l.asks = a.asks)
        UNION ALL
        SELECT l.pk, l.run, l.asks FROM author_message l
        WHERE l.asks NOT LIKE 'item:%' AND NOT EXISTS (
          SELECT 1 FROM author_attempt a WHERE a.pk = l.pk AND a.run = l.run AND a.asks = l.asks)""",
    "D7 a child is there for each step that asks for one": """
        SELECT a.pk, a.run, a.asks FROM author_attempt a
        WHERE a.type = 'child' AND a.old = 'new' AND 1 <> (
          SELECT count(*) FROM workflow_instance c
          WHERE c.parent_pk = a.pk AND c.parent_run_number = a.run AND c.parent_step_key = a.step_key
            AND a.asks = 'child:' || a.seq || ':' || c.workflow || '/' || c.instance_id)
        UNION ALL
        SELECT c.parent_pk, c.parent_run_number, c.instance_id FROM workflow_instance c
        WHERE c.parent_step_key LIKE 'child%' AND NOT EXISTS (
          SELECT 1 FROM author_attempt a WHERE a.pk = c.parent_pk AND a.run = c.parent_run_number
            AND a.step_key = c.parent_step_key)""",
    "D8 the end of a child is answered as it ended, where a step waits for it": """
        SELECT a.parent_pk, a.parent_run, a.type, a.status, e.payload, r.output, r.error_name FROM author_end a
        JOIN workflow_run r ON r.instance_pk = a.pk AND r.run_number = a.run
        LEFT JOIN author_answer e ON e.pk = a.parent_pk AND e.run = a.parent_run AND e.type = a.type
        WHERE NOT coalesce(CASE a.status
            WHEN 'complete' THEN json(e.payload) = json('{"output":' || r.output || '}')
            WHEN 'errored' THEN json_extract(e.payload, '$.error.name') = r.error_name
            ELSE json_extract(e.payload, '$.error.name') = 'ChildTerminated' END, FALSE)
        UNION ALL
        SELECT e.pk, e.run, e.type, 'has not ended', e.payload, NULL, NULL FROM author_answer e
        WHERE e.type LIKE 'child:%' AND NOT EXISTS (
          SELECT 1 FROM author_end a WHERE a.parent_pk = e.pk AND a.parent_run = e.run AND a.type = e.type)""",
    "D9 nobody waits for a child that has ended": """
        SELECT s.instance_pk, s.run_number, s.step_key, c.instance_id, c.status FROM workflow_step s
        JOIN workflow_instance i ON i.id = s.instance_pk AND i.run_number = s.run_number
        JOIN workflow_instance c ON c.parent_pk = i.id AND c.parent_run_number = s.run_number
          AND c.parent_step_key = s.step_key AND c.status IN ('complete', 'errored', 'terminated')
        WHERE s.type = 'child' AND s.status = 'waiting' AND i.status NOT IN ('complete', 'errored', 'terminated')
          AND NOT EXISTS (SELECT 1 FROM workflow_event e WHERE e.instance_pk = s.instance_pk
            AND e.run_number = s.run_number AND e.type = s.wait_event_type)""",
}


def wrong(database: sqlite3.Connection, story: Any) -> list[str]:
    """Answers that no task gave to that very attempt."""
    query = """
        SELECT i.instance_id, a.run, a.type, a.payload FROM author_answer a JOIN workflow_instance i ON i.id = a.pk
        WHERE a.type LIKE 'task:%' ORDER BY a.rowid"""
    return [
        f"D10 {instance}#{run} has the answer {payload} to {type_}, and no task gave it"
        for instance, run, type_, payload in database.execute(query)
        if json.loads(payload) not in story.given.get((instance, run, type_), [])
    ]
