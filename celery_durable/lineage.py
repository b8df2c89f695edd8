"""Runs that begin with steps of another: which they keep, and what their code sees while it replays them.

Pure: rows in, rows out. A run that continues another holds copies of rows that settled there, so its code has to take
the same way as far as they reach: until then time, chance and the keys of retried steps are those of the other run.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from celery_durable.model import Ref, StepRow, StepStatus, from_us, to_us


@dataclass(frozen=True, slots=True)
class Part:
    """Before call number ``until`` (None: without end) the code sees the time and chance of this run.

    ``run`` is ``workflow/instance/number``; ``began`` is when it was created.
    """

    run: str
    began: datetime
    until: int | None = None


@dataclass(frozen=True, slots=True)
class Lineage:
    """Where a run comes from. ``parts`` end with the run itself; ``carried``: steps that are retried, and their run."""

    parts: tuple[Part, ...]
    carried: dict[str, str]

    @classmethod
    def read(cls, text: str | None, *, ref: Ref, began: datetime) -> Lineage:
        """That of a run, from what `text` of its ancestors says."""
        own = Part(f"{ref.workflow}/{ref.instance_id}/{ref.run_number}", began)
        given: dict[str, Any] = {"parts": [], "carried": {}} if text is None else json.loads(text)
        before = [Part(run, from_us(began_us), until) for run, began_us, until in given["parts"]]
        return cls((*before, own), given["carried"])

    @property
    def text(self) -> str:
        """As it is stored with a run that continues this one."""
        parts = [(part.run, to_us(part.began), part.until) for part in self.parts]
        return json.dumps({"parts": parts, "carried": self.carried}, ensure_ascii=False)

    def at(self, place: int) -> Part:
        """The part that code sees which has made ``place`` calls."""
        return next(part for part in self.parts if part.until is None or part.until > place)

    def identity(self, step_key: str) -> str:
        """The run in whose name a step speaks to systems outside: a retried one goes on with its keys."""
        return self.carried.get(step_key, self.parts[-1].run)

    def until(self, place: int, *, carry: Iterable[str] = ()) -> Lineage:
        """The ancestors of a run that continues this one: as this one up to ``place``, with the steps it retries."""
        parts = []
        for part in self.parts:
            is_last = part.until is None or part.until >= place
            parts.append(replace(part, until=place) if is_last else part)
            if is_last:
                break
        return Lineage(tuple(parts) if place > 0 else (), {key: self.identity(key) for key in carry})


@dataclass(frozen=True, slots=True)
class Failure:
    """What ended a run: the steps that failed, and how many calls the code had made when it was told."""

    keys: tuple[str, ...]
    place: int

    @classmethod
    def read(cls, text: str | None) -> Failure | None:
        """As it is stored; None where no step was to blame."""
        if text is None:
            return None
        given = json.loads(text)
        return cls(tuple(given["keys"]), given["place"])

    @property
    def text(self) -> str:
        """As it is stored with the run."""
        return json.dumps({"keys": self.keys, "place": self.place}, ensure_ascii=False)


def before(rows: Sequence[StepRow], target: StepRow) -> list[StepRow]:
    """What a run keeps that begins again at ``target``: all that had settled, failures included, and was called before.

    A race of `first` is one: where the target is the race or a branch of it, it is run again as a whole.
    """
    races = _races(rows)
    place = races[target.commit_id].begins if target.commit_id in races else target.seq
    return _whole([row for row in rows if row.is_settled and row.seq < place], races)


def without(rows: Sequence[StepRow], failure: Failure | None) -> list[StepRow]:
    """What a run keeps that tries again what ended this one: all that settled before the failure came to light.

    What was called after it (a compensation, a clean-up) answered the failure, and is not kept. ``failure`` None: no
    step was to blame, and all that has settled is kept.
    """
    settled = [row for row in rows if row.is_settled]
    if failure is not None:
        settled = [row for row in settled if row.seq <= failure.place and row.step_key not in failure.keys]
    return _whole(settled, _races(rows))


def cut_off(rows: Sequence[StepRow]) -> list[StepRow]:
    """The steps that terminate() cancelled: they lost no race."""
    kept = _whole(list(rows), _races(rows))
    return [row for row in rows if row not in kept]


def last_place(rows: Iterable[StepRow]) -> int:
    """The number of the last of these calls; 0 where there are none."""
    return max((row.seq for row in rows), default=0)


def nearest(name: str, keys: Sequence[str], *, most: int = 3) -> list[str]:
    """The steps that somebody may have meant, the nearest first; else the first ones that there are."""
    return difflib.get_close_matches(name, keys, n=most, cutoff=0.5) or list(keys[:most])


@dataclass(frozen=True, slots=True)
class _Race:
    """Which calls a decided race of `first` spans, and the key of its own row."""

    begins: int
    entry: str


def _races(rows: Sequence[StepRow]) -> dict[str, _Race]:
    """The decided races, by the commit that decided them: one wrote its row, its losers and, mostly, its winner.

    The race is called after its branches, so its own row is the last of them.
    """
    commits: dict[str, list[StepRow]] = {}
    for row in sorted(rows, key=lambda row: row.seq):
        commits.setdefault(row.commit_id, []).append(row)
    return {
        commit_id: _Race(group[0].seq, group[-1].step_key)
        for commit_id, group in commits.items()
        if len(group) > 1 and group[-1].status is StepStatus.COMPLETED
    }


def _whole(kept: list[StepRow], races: dict[str, _Race]) -> list[StepRow]:
    """Without the losers of races that are not kept: in a race that is run again they may win.

    What terminate() cancelled lost no race, and is not kept either.
    """
    keys = {row.step_key for row in kept}
    return [
        row
        for row in kept
        if row.status is not StepStatus.CANCELLED or (row.commit_id in races and races[row.commit_id].entry in keys)
    ]
