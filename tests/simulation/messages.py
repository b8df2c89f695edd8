"""What must hold of the outbox: what was committed leaves, and nothing else does."""

from __future__ import annotations

import sqlite3
from typing import Any

from tests.simulation import maps
from tests.simulation.witnesses import IS_COPY

QUERIES = {
    "O1 a step that sends has put one message into the outbox": f"""
        SELECT s.instance_pk, s.run_number, s.step_key FROM workflow_step s
        WHERE s.name LIKE 'mail%' AND NOT {IS_COPY.format("s")} AND (s.status = 'completed') <> (
          SELECT count(*) FROM author_message l
          WHERE l.pk = s.instance_pk AND l.run = s.run_number AND l.step_key = s.step_key)""",
}


def wrong(database: sqlite3.Connection, story: Any) -> list[str]:
    """Messages that never left, or were handled more than once or never."""
    found = []
    # A task that has timed out before its message left need not be done any more.
    query = f"""
        SELECT l.id, l.kind, {maps.IS_OVERTAKEN} OR EXISTS (
          SELECT 1 FROM author_attempt a WHERE a.pk = l.pk AND a.run = l.run
          AND a.old_asks = l.asks AND a.error = 'StepTimeout' AND a.at >= a.deadline)
        FROM author_message l ORDER BY l.rowid"""
    for id_, kind, is_overtaken in database.execute(query):
        if not (story.sent[id_] or is_overtaken):
            found.append(f"O3 message {id_} was committed, and never sent")
        elif kind == "event" and story.noted[id_] != 1:
            found.append(f"O4 the handler of message {id_} has returned {story.noted[id_]} times")
    left = database.execute("SELECT id FROM workflow_outbox").fetchall()
    return found + [f"O5 message {id_} is left when all is over" for (id_,) in left]
