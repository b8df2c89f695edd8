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

from celery_durable.model import RunRef, StepRow, StepStatus, from_us, to_us


@dataclass(frozen=True, slots=True)
class AncestorRun:
    """Before call number ``until`` (None: without end) the code sees the time and chance of this run.

    ``run`` is ``workflow/instance/number``; ``began`` is when it was created.
    """

    run: str
    created_at: datetime
    until: int | None = None


@dataclass(frozen=True, slots=True)
class Ancestry:
    """Where a run comes from. ``parts`` end with the run itself; ``carried``: steps that are retried, and their run."""

    ancestors: tuple[AncestorRun, ...]
    retried_steps: dict[str, str]

    @classmethod
    def parse(cls, text: str | None, *, ref: RunRef, created_at: datetime) -> Ancestry:
        """That of a run, from what `text` of its ancestors says."""
        own = AncestorRun(f"{ref.workflow}/{ref.instance_id}/{ref.run_number}", created_at)
        given: dict[str, Any] = {"parts": [], "carried": {}} if text is None else json.loads(text)
        kept_before = [AncestorRun(run, from_us(began_us), until) for run, began_us, until in given["parts"]]
        return cls((*kept_before, own), given["carried"])

    @property
    def text(self) -> str:
        """As it is stored with a run that continues this one."""
        ancestors = [(part.run, to_us(part.created_at), part.until) for part in self.ancestors]
        return json.dumps({"parts": ancestors, "carried": self.retried_steps}, ensure_ascii=False)

    def at(self, seq: int) -> AncestorRun:
        """The part that code sees which has made ``place`` calls."""
        return next(part for part in self.ancestors if part.until is None or part.until > seq)

    def identity(self, step_key: str) -> str:
        """The run in whose name a step speaks to systems outside: a retried one goes on with its keys."""
        return self.retried_steps.get(step_key, self.ancestors[-1].run)

    def until(self, seq: int, *, retried: Iterable[str] = ()) -> Ancestry:
        """The ancestors of a run that continues this one: as this one up to ``place``, with the steps it retries."""
        ancestors = []
        for part in self.ancestors:
            is_last = part.until is None or part.until >= seq
            ancestors.append(replace(part, until=seq) if is_last else part)
            if is_last:
                break
        return Ancestry(tuple(ancestors) if seq > 0 else (), {key: self.identity(key) for key in retried})


@dataclass(frozen=True, slots=True)
class RunFailure:
    """What ended a run: the steps that failed, and how many calls the code had made when it was told."""

    keys: tuple[str, ...]
    seq: int

    @classmethod
    def parse(cls, text: str | None) -> RunFailure | None:
        """As it is stored; None where no step was to blame."""
        if text is None:
            return None
        given = json.loads(text)
        return cls(tuple(given["keys"]), given["place"])

    @property
    def text(self) -> str:
        """As it is stored with the run."""
        return json.dumps({"keys": self.keys, "place": self.seq}, ensure_ascii=False)


def kept_before(rows: Sequence[StepRow], target: StepRow) -> list[StepRow]:
    """What a run keeps that begins again at ``target``: all that had settled, failures included, and was called before.

    A race of `first` is one: where the target is the race or a branch of it, it is run again as a whole.
    """
    races = _races(rows)
    seq = races[target.commit_id].first_seq if target.commit_id in races else target.seq
    return _without_undecided_losers([row for row in rows if row.is_finished and row.seq < seq], races)


def kept_for_retry(rows: Sequence[StepRow], failure: RunFailure | None) -> list[StepRow]:
    """What a run keeps that tries again what ended this one: all that settled before the failure came to light.

    What was called after it (a compensation, a clean-up) answered the failure, and is not kept. ``failure`` None: no
    step was to blame, and all that has settled is kept.
    """
    settled = [row for row in rows if row.is_finished]
    if failure is not None:
        settled = [row for row in settled if row.seq <= failure.seq and row.step_key not in failure.keys]
    return _without_undecided_losers(settled, _races(rows))


def cancelled_by_terminate(rows: Sequence[StepRow]) -> list[StepRow]:
    """The steps that terminate() cancelled: they lost no race."""
    kept = _without_undecided_losers(list(rows), _races(rows))
    return [row for row in rows if row not in kept]


def last_seq(rows: Iterable[StepRow]) -> int:
    """The number of the last of these calls; 0 where there are none."""
    return max((row.seq for row in rows), default=0)


def closest_names(name: str, keys: Sequence[str], *, limit: int = 3) -> list[str]:
    """The steps that somebody may have meant, the nearest first; else the first ones that there are."""
    return difflib.get_close_matches(name, keys, n=limit, cutoff=0.5) or list(keys[:limit])


@dataclass(frozen=True, slots=True)
class _Race:
    """Which calls a decided race of `first` spans, and the key of its own row."""

    first_seq: int
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


def _without_undecided_losers(kept: list[StepRow], races: dict[str, _Race]) -> list[StepRow]:
    """Without the losers of races that are not kept: in a race that is run again they may win.

    What terminate() cancelled lost no race, and is not kept either.
    """
    keys = {row.step_key for row in kept}
    return [
        row
        for row in kept
        if row.status is not StepStatus.CANCELLED or (row.commit_id in races and races[row.commit_id].entry in keys)
    ]
