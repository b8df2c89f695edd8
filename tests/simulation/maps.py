"""What must hold of maps: each attempt at an item is asked for once, and ends with its own answer or its time.

The key of a map says how many of its items may be out at a time ("map3x2": two, "x0": all), and ends with "w" where
failures are wanted as results. ``author_item``: each change of an item, how many were out after it, and how the
instance stood; ``is_over``: the run or the step had ended.
"""

from __future__ import annotations

import json
import sqlite3
from typing import Any

_MOST = "CAST(substr(step_key, instr(step_key, 'x') + 1) AS INTEGER)"
_TYPE = "'item:' || {0}.pk || ':' || {0}.position || ':' || {0}.attempts || ':' || {0}.step_key"
_IS_LATE = "json_extract(answer, '$.error.name') = 'StepTimeout' AND at >= due"

SCRIPT = """
    CREATE TABLE author_item (
        pk, run, step_key, position, old, new, old_attempts, attempts, due, answer, at, sent, status, is_over);
    CREATE TRIGGER author_items AFTER UPDATE ON workflow_item WHEN NEW.step_key LIKE 'map%'
    BEGIN
        INSERT INTO author_item
        SELECT NEW.instance_pk, NEW.run_number, NEW.step_key, NEW.position, OLD.status, NEW.status, OLD.attempts,
            NEW.attempts, OLD.due_at, NEW.answer, author_now(),
            (SELECT count(*) FROM workflow_item o WHERE o.instance_pk = NEW.instance_pk
               AND o.run_number = NEW.run_number AND o.step_key = NEW.step_key AND o.status = 'sent'),
            i.status, i.run_number <> NEW.run_number OR i.status IN ('complete', 'errored', 'terminated')
              OR s.status <> 'waiting'
        FROM workflow_instance i
        LEFT JOIN workflow_step s
          ON s.instance_pk = i.id AND s.run_number = NEW.run_number AND s.step_key = NEW.step_key
        WHERE i.id = NEW.instance_pk;
    END;
    CREATE TRIGGER author_first_items AFTER INSERT ON workflow_item
    WHEN NEW.step_key LIKE 'map%' AND NEW.status = 'sent'
    BEGIN
        INSERT INTO author_item
        SELECT NEW.instance_pk, NEW.run_number, NEW.step_key, NEW.position, 'pending', NEW.status, 0, NEW.attempts,
            NULL, NEW.answer, author_now(),
            (SELECT count(*) FROM workflow_item o WHERE o.instance_pk = NEW.instance_pk
               AND o.run_number = NEW.run_number AND o.step_key = NEW.step_key AND o.status = 'sent'),
            i.status, i.run_number <> NEW.run_number OR i.status IN ('complete', 'errored', 'terminated')
        FROM workflow_instance i WHERE i.id = NEW.instance_pk;
    END;
"""

QUERIES = {
    "M10 an item goes along its arrows": f"""
        SELECT pk, run, step_key, position, old, new, old_attempts, attempts, at - due, answer FROM author_item
        WHERE is_over = 0 AND NOT coalesce(
              old = 'pending' AND new = 'sent' AND attempts = old_attempts + 1 AND (due IS NULL OR at >= due)
           OR old = 'sent' AND new IN ('done', 'failed', 'dead') AND attempts = old_attempts AND answer IS NOT NULL
           OR old = 'sent' AND new = 'pending' AND attempts = old_attempts AND {_IS_LATE}
           OR old = 'failed' AND new IN ('pending', 'dead') AND attempts = old_attempts
           OR old IN ('pending', 'sent', 'failed') AND new = 'cancelled' AND attempts = old_attempts
           OR old = new AND attempts = old_attempts, FALSE)""",
    "M11 no more items of a map are out than may be": f"""
        SELECT pk, run, step_key, position, sent FROM author_item
        WHERE new = 'sent' AND {_MOST} > 0 AND sent > {_MOST}""",
    "M12 nothing is sent while its instance is paused, or after its end": """
        SELECT pk, run, step_key, position, status FROM author_item
        WHERE old = 'pending' AND new = 'sent' AND (status = 'paused' OR is_over)""",
    "M13 a message goes with each attempt at an item": f"""
        SELECT a.pk, a.run, a.step_key, a.position, a.attempts FROM author_item a
        WHERE a.old = 'pending' AND a.new = 'sent' AND 1 <> (
          SELECT count(*) FROM author_message l
          WHERE l.pk = a.pk AND l.run = a.run AND l.step_key = a.step_key AND l.asks = {_TYPE.format("a")})
        UNION ALL
        SELECT l.pk, l.run, l.step_key, l.asks, NULL FROM author_message l
        WHERE l.asks LIKE 'item:%' AND NOT EXISTS (
          SELECT 1 FROM author_item a WHERE a.pk = l.pk AND a.run = l.run AND l.asks = {_TYPE.format("a")})""",
    "M14 no item has more attempts than it may": """
        SELECT m.instance_pk, m.run_number, m.step_key, m.position, m.attempts FROM workflow_item m
        JOIN workflow_step s
          ON s.instance_pk = m.instance_pk AND s.run_number = m.run_number AND s.step_key = m.step_key
        WHERE s.type = 'map' AND m.attempts > s.max_attempts""",
    "M15 a map has failed where an item has, and only if failures are not wanted": """
        SELECT s.instance_pk, s.run_number, s.step_key, s.status FROM workflow_step s
        WHERE s.type = 'map' AND s.status IN ('completed', 'errored') AND s.result IS NULL AND s.step_key NOT LIKE '%w'
          AND (s.status = 'errored') <> EXISTS (
            SELECT 1 FROM workflow_item m WHERE m.instance_pk = s.instance_pk AND m.run_number = s.run_number
              AND m.step_key = s.step_key AND m.status = 'dead')""",
    "M16 a map fails when nothing of it is under way": """
        SELECT s.instance_pk, s.run_number, s.step_key, m.position, m.status FROM workflow_step s
        JOIN workflow_item m
          ON m.instance_pk = s.instance_pk AND m.run_number = s.run_number AND m.step_key = s.step_key
        WHERE s.type = 'map' AND s.status = 'errored' AND m.status NOT IN ('done', 'dead')""",
}

COUNTS = """
    SELECT 'item ' || old || ' to ' || new, count(*) FROM author_item GROUP BY 1
    UNION ALL SELECT 'map ' || status, count(*) FROM workflow_step WHERE type = 'map' GROUP BY 1
    UNION ALL SELECT 'items of maps', count(*) FROM workflow_item WHERE step_key LIKE 'map%'"""

IS_OVERTAKEN = f"""EXISTS (
    SELECT 1 FROM author_item a WHERE a.pk = l.pk AND a.run = l.run AND l.asks = {_TYPE.format("a")}
      AND a.old = 'sent' AND a.new IN ('pending', 'dead') AND {_IS_LATE})"""
"""Whether message ``l`` was too late before it left."""


def is_awaited(database: sqlite3.Connection, instance: str, run: int, type_: str) -> bool:
    """Whether an item of a live map is out under this type."""
    query = f"""
        SELECT 1 FROM (SELECT instance_pk AS pk, run_number AS run, * FROM workflow_item) m
        JOIN workflow_instance i ON i.id = m.pk AND i.run_number = m.run
        JOIN workflow_step s ON s.instance_pk = m.pk AND s.run_number = m.run AND s.step_key = m.step_key
        WHERE i.instance_id = ? AND m.run = ? AND {_TYPE.format("m")} = ? AND m.status = 'sent'
          AND s.status = 'waiting' AND i.status NOT IN ('complete', 'errored', 'terminated')"""
    return database.execute(query, (instance, run, type_)).fetchone() is not None


def results(database: sqlite3.Connection, pk: int, run: int) -> dict[str, tuple[str, Any, Any]]:
    """What the maps of a run that have completed must have returned, in the form of their steps' rows."""
    query = """
        SELECT s.step_key, m.answer FROM workflow_step s LEFT JOIN workflow_item m
          ON m.instance_pk = s.instance_pk AND m.run_number = s.run_number AND m.step_key = s.step_key
        WHERE s.type = 'map' AND s.status = 'completed' AND s.instance_pk = ? AND s.run_number = ?
        ORDER BY s.step_key, m.position"""
    found: dict[str, list[Any]] = {}
    for key, answer in database.execute(query, (pk, run)):
        given = found.setdefault(key, [])
        if answer is not None:
            told = json.loads(answer)
            given.append(told["output"] if "output" in told else f"failed: {told['error']['name']}")
    return {key: ("completed", given, None) for key, given in found.items()}


def wrong(database: sqlite3.Connection, story: Any) -> list[str]:
    """Answers that no task gave to that very attempt."""
    query = f"""
        SELECT i.instance_id, a.run, {_TYPE.format("a")}, a.answer FROM author_item a
        JOIN workflow_instance i ON i.id = a.pk
        WHERE a.old = 'sent' AND a.new IN ('done', 'failed', 'dead') AND a.is_over = 0 AND NOT ({_IS_LATE})
        ORDER BY a.rowid"""
    return [
        f"M17 {instance}#{run} has the answer {answer} to {type_}, and no task gave it"
        for instance, run, type_, answer in database.execute(query)
        if json.loads(answer) not in story.given.get((instance, run, type_), [])
    ]
