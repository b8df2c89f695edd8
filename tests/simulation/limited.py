"""Limits of the steps of random programs, and what the database itself writes down of them, in triggers.

author_overheld    each take or grant after which more held a limit than it allows
author_overtaken   each take or grant beside another that had asked before, and waited for nothing else
author_hold_state  how often a hold came into each state
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from celery_durable import Limit
from celery_durable.errors import LimitNotFound
from tests.support.invariants import COUNTS as _COUNTS

ONE = Limit("one", at_once=1)
TWO = Limit("two", at_once=2, fair=lambda event: event.instance_id)
_NUMBER = re.compile(r"(?:book|plain|task|map)(\d+)")


def limits_of(step: str) -> Sequence[Limit]:
    """The limits of a step, by the number in its key."""
    found = _NUMBER.match(step)
    return {0: (ONE, TWO), 1: (ONE,), 2: (ONE,)}.get(int(found[1]) % 4, ()) if found else ()


_TAKES = f"""
    BEGIN
        INSERT INTO author_overheld
        SELECT NEW.name, NEW.instance_pk, NEW.state FROM workflow_limit l
        WHERE l.name = NEW.name AND l.key = NEW.key AND coalesce(l.set_at_once, l.at_once) < (
            SELECT count(*) FROM workflow_hold h WHERE h.name = NEW.name AND h.key = NEW.key AND {_COUNTS});
        INSERT INTO author_overtaken
        SELECT NEW.name, NEW.instance_pk, h.instance_pk FROM workflow_hold h
        JOIN workflow_instance i ON i.id = h.instance_pk AND i.run_number = h.run_number
          AND i.status IN ('active', 'waiting')
        JOIN workflow_step s ON s.instance_pk = h.instance_pk AND s.run_number = h.run_number
          AND s.step_key = h.step_key AND s.status IN ('pending', 'waiting')
        WHERE h.name = NEW.name AND h.key = NEW.key AND h.fair_key = NEW.fair_key AND h.state = 'waiting'
          AND h.seq < NEW.seq;
    END;"""

SCRIPT = f"""
    CREATE TABLE author_overheld (name, pk, state);
    CREATE TABLE author_overtaken (name, pk, earlier_pk);
    CREATE TABLE author_hold_state (state);
    CREATE TRIGGER author_takes AFTER INSERT ON workflow_hold WHEN NEW.state IN ('held', 'granted') {_TAKES}
    CREATE TRIGGER author_is_granted AFTER UPDATE ON workflow_hold
    WHEN NEW.state IN ('held', 'granted') AND OLD.state NOT IN ('held', 'granted') {_TAKES}
    CREATE TRIGGER author_hold_begins AFTER INSERT ON workflow_hold
    BEGIN
        INSERT INTO author_hold_state VALUES (NEW.state);
    END;
    CREATE TRIGGER author_hold_changes AFTER UPDATE ON workflow_hold WHEN NEW.state <> OLD.state
    BEGIN
        INSERT INTO author_hold_state VALUES (NEW.state);
    END;
"""

COUNTS = "SELECT 'limit ' || state, count(*) FROM author_hold_state GROUP BY 1"

QUERIES = {
    "Q1 no more hold a limit than it allows": "SELECT * FROM author_overheld",
    "Q4 nobody overtakes": "SELECT * FROM author_overtaken",
}

_HELD = """
    SELECT i.claimed_by, i.claim_task_id, (
      SELECT count(*) FROM workflow_hold h WHERE h.instance_pk = i.id AND h.run_number = i.run_number
        AND h.step_key = ? AND h.state = 'held' AND h.token = i.claim_token)
    FROM workflow_instance i WHERE i.instance_id = ? AND i.run_number = ?"""


def check_body(schedule: Any, worker: Any, instance: str, run: int, step: str) -> None:
    """Note a body that begins without its limits, although its worker has the claim."""
    if not (wanted := limits_of(step)):
        return
    found = schedule.world.raw.execute(_HELD, (step, instance, run)).fetchone()
    if found is not None and found[:2] == (worker.name, worker.task_id) and found[2] != len(wanted):
        schedule.story.wrongs.append(f"Q5 {step} of {instance}#{run} runs with {found[2]} of {len(wanted)} limits")


_STUCK = f"""
    SELECT w.instance_pk, w.step_key, w.name FROM workflow_hold w
    JOIN workflow_limit l ON l.name = w.name AND l.key = w.key
    WHERE w.state = 'waiting' AND coalesce(l.set_at_once, l.at_once) > (
        SELECT count(*) FROM workflow_hold h WHERE h.name = l.name AND h.key = l.key AND {_COUNTS})"""


class Limited:
    """The job that serves limits, and operators that change them."""

    def __init__(self, schedule: Any) -> None:
        self._schedule = schedule

    def serve(self) -> bool:
        """Run the job once, on a process with a dispatcher. Returns whether there are messages now."""
        self._schedule.world.beats[0].operations().limits.queue.run_job()
        return bool(self._schedule.messages)

    def act(self) -> None:
        """Mostly serve, and sometimes change a number before."""
        dice = self._schedule.dice
        if dice.random() < 0.2:
            limits, name, number = (
                self._schedule.world.operations.limits,
                dice.choice(["one", "two"]),
                dice.randint(0, 3),
            )
            try:
                if number:
                    limits.set(name, at_once=number, by="operator")
                else:
                    limits.set(name, at_once=None, rate=None, by="operator")
                self._schedule.tell(f"limit {name}: {number or 'reset'}")
            except LimitNotFound:
                self._schedule.tell(f"limit {name}: not found")
        self.serve()

    def stuck(self) -> list[str]:
        """What waits for a limit that has room, when nothing else is left to do at this time."""
        for _ in range(3):
            if self.serve():
                return []
        rows = self._schedule.world.raw.execute(_STUCK)
        return [f"Q6 {row} waits, and there is room" for row in rows]

    def left(self) -> list[str]:
        """Everything has ended, so nothing may hold or await anything."""
        self.serve()
        rows = self._schedule.world.raw.execute(
            "SELECT instance_pk, step_key, name, state FROM workflow_hold"
        ).fetchall()
        return [f"Q3 {row} is left" for row in rows]
