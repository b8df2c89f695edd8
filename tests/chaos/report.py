"""What the storm has left: evidence from logs and tables, the violations, and one table for people."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from tests.chaos import flows
from tests.chaos.arena import Arena
from tests.chaos.crowd import Crowd
from tests.chaos.storm import FAULTS, Tally

_SUPERSEDED = "'superseded: the instance was taken over, restarted or ended meanwhile'"
_UNKNOWN = "The outcome of a commit is unknown, looking it up"
_TERMINAL = ("complete", "errored", "terminated")

LEGEND = """\
stood still        Celery's main loop did not turn for 30 s; the worker's log has the stacks of its threads
writes refused     passes that ended because their claim was somebody else's by then, as the workers logged it
commits looked up  commits whose connection was lost, so that their outcome had to be looked up, from all logs
COMMITs            on MariaDB also those that SQLAlchemy sends to set the isolation level back after a read"""


@dataclass(frozen=True)
class Report:
    """One pair's numbers."""

    pair: str
    seconds: float
    faults: Counter[str]
    instances: int
    steps: int
    maps: int
    tasks: int
    errored: int
    refused: int
    looked_up: int
    violations: list[str]
    longest_pause: float = 0.0
    still: int = 0
    longest_still: float = 0.0

    def rows(self) -> list[tuple[str, str]]:
        """Label and value, in the table's order."""
        return [
            *((fault, str(self.faults[fault])) for fault in FAULTS),
            ("faults in all", str(self.faults.total())),
            ("storm, seconds", f"{self.seconds:.0f}"),
            ("instances", str(self.instances)),
            ("instances errored", str(self.errored)),
            ("steps recorded", str(self.steps)),
            ("maps recorded", str(self.maps)),
            ("tasks of steps and items done", str(self.tasks)),
            ("longest time without a kill, seconds", f"{self.longest_pause:.1f}"),
            ("workers that stood still", str(self.still)),
            ("longest time without a turn of a main loop, seconds", f"{self.longest_still:.1f}"),
            ("writes refused", str(self.refused)),
            ("commits looked up", str(self.looked_up)),
            ("VIOLATIONS", str(len(self.violations))),
        ]


def report(arena: Arena, crowd: Crowd, tally: Tally, *, seconds: float) -> Report:
    """Look at everything once it is quiet."""
    logs = "".join(proc.text() for proc in arena.site.procs)
    t = arena.site.durable.internals.store.tables
    with arena.site.engine.connect() as connection:
        ended = dict(_counts(connection, t.step.c.type, t.step.c.finished_at.is_not(None)))
        items = dict(_counts(connection, t.item.c.status))
        statuses = dict(_counts(connection, t.instance.c.status))
    return Report(
        pair=arena.pair,
        seconds=seconds,
        faults=tally.faults,
        instances=len(crowd.plans),
        steps=sum(ended.values()),
        maps=ended.get("map", 0),
        tasks=ended.get("task", 0) + items.get("done", 0),
        errored=statuses.get("errored", 0),
        refused=logs.count(_SUPERSEDED),
        looked_up=logs.count(_UNKNOWN),
        violations=[
            *tally.fallen,
            *_endings(arena, crowd),
            *_lost_events(arena, crowd),
            *arena.site.broken(reruns=None),
        ],
        longest_pause=tally.longest_pause,
        still=len(arena.stillness.found),
        longest_still=arena.stillness.longest,
    )


def _counts(connection: sa.Connection, column: Any, *where: Any) -> list[tuple[str, int]]:
    query = sa.select(column, sa.func.count()).where(*where).group_by(column)
    return [(str(value), int(count)) for value, count in connection.execute(query)]


def _endings(arena: Arena, crowd: Crowd) -> list[str]:
    """Every instance completes, with the output that its plan foretells."""
    t = arena.site.durable.internals.store.tables
    query = sa.select(t.instance.c.instance_id, t.instance.c.status, t.run.c.output, t.run.c.error_message).join(
        t.run, (t.run.c.instance_pk == t.instance.c.id) & (t.run.c.run_number == t.instance.c.run_number)
    )
    found = []
    with arena.site.engine.connect() as connection:
        for key, status, output, error in connection.execute(query):
            wanted = flows.expected(crowd.plans[key]) if key in crowd.plans else None
            if status not in _TERMINAL:
                found.append(f"I6 {key} is still {status} after the quiet: {_open_work(arena, key)}")
            elif status != "complete":
                found.append(f"I8 {key} ended {status}: {error}")
            elif json.loads(output) != wanted:
                found.append(f"I8 {key} put out {output}, not {wanted}")
    return found


def _open_work(arena: Arena, key: str) -> str:
    """What an instance waits for, in the words of its users, and the tasks that are out."""
    diagnosis = arena.site.workflow("planned").get(key).explain()
    t = arena.site.durable.internals.store.tables
    columns = (
        t.item.c.step_key,
        t.item.c.position,
        t.item.c.status,
        t.item.c.attempts,
        t.item.c.loss_count,
        t.item.c.sent_at,
    )
    mine = (t.item.c.instance_pk == t.instance.c.id) & (t.item.c.run_number == t.instance.c.run_number)
    query = sa.select(*columns).join(t.instance, mine).where(t.instance.c.instance_id == key, t.item.c.status != "done")
    with arena.site.engine.connect() as connection:
        out = [tuple(row) for row in connection.execute(query)]
    return f"{diagnosis.code}: {diagnosis.sentence} Out (step, place, status, attempts, loss_count, sent): {out}"


def _lost_events(arena: Arena, crowd: Crowd) -> list[str]:
    e = arena.site.durable.internals.store.tables.event.c
    with arena.site.engine.connect() as connection:
        recorded = set(connection.execute(sa.select(e.event_id)).scalars())
    return [f"I12 send_event was answered, and is gone: {each}" for each in sorted(crowd.accepted_events - recorded)]


def table(reports: Sequence[Report]) -> str:
    """The one table: a row for each number, a column for each pair."""
    heads = ["", *(each.pair for each in reports)]
    rows = [heads, *([label, *values] for label, *values in _merged(reports))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(heads))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def _merged(reports: Sequence[Report]) -> list[tuple[str, ...]]:
    columns = [dict(each.rows()) for each in reports]
    return [(label, *(column[label] for column in columns)) for label in columns[0]]
