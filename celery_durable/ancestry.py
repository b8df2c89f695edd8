"""Runs that start with steps of another run: which steps they keep, and what their code sees while it replays them.

The module is pure. The code must take the same path up to the last copied row. Until then it sees the time and random
numbers of the other run. A retried step keeps the idempotency key that it had there.
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
    """The run (``workflow/instance/number``) whose time and random numbers the code sees before call ``until_seq``."""

    run: str
    created_at: datetime
    until_seq: int | None = None


@dataclass(frozen=True, slots=True)
class Ancestry:
    """The runs that a run comes from, itself last. ``retried_steps``: each with the run that first attempted it."""

    ancestors: tuple[AncestorRun, ...]
    retried_steps: dict[str, str]

    @classmethod
    def parse(cls, text: str | None, *, ref: RunRef, created_at: datetime) -> Ancestry:
        """Build the ancestry of a run from the stored `text` of its ancestors; None if it has none."""
        own = AncestorRun(f"{ref.workflow}/{ref.instance_id}/{ref.run_number}", created_at)
        stored: dict[str, Any] = {"parts": [], "carried": {}} if text is None else json.loads(text)
        earlier = [
            AncestorRun(run, from_us(created_at_us), until_seq) for run, created_at_us, until_seq in stored["parts"]
        ]
        return cls((*earlier, own), stored["carried"])

    @property
    def text(self) -> str:
        """The JSON text that is stored with a run that continues this one."""
        ancestors = [(ancestor.run, to_us(ancestor.created_at), ancestor.until_seq) for ancestor in self.ancestors]
        return json.dumps({"parts": ancestors, "carried": self.retried_steps}, ensure_ascii=False)

    def ancestor_at(self, seq: int) -> AncestorRun:
        """Return the ancestor whose time and random numbers the code sees after call number ``seq``."""
        return next(ancestor for ancestor in self.ancestors if ancestor.until_seq is None or ancestor.until_seq > seq)

    def origin_run(self, step_key: str) -> str:
        """Return the run that a step's idempotency key is derived from: for a retried step, the run it comes from."""
        return self.retried_steps.get(step_key, self.ancestors[-1].run)

    def for_continuation(self, seq: int, *, retried: Iterable[str] = ()) -> Ancestry:
        """Return the ancestry of a run that keeps steps up to call ``seq``, and retries some of them."""
        ancestors = []
        for ancestor in self.ancestors:
            is_last = ancestor.until_seq is None or ancestor.until_seq >= seq
            ancestors.append(replace(ancestor, until_seq=seq) if is_last else ancestor)
            if is_last:
                break
        return Ancestry(tuple(ancestors) if seq > 0 else (), {key: self.origin_run(key) for key in retried})


@dataclass(frozen=True, slots=True)
class RunFailure:
    """The failure that ended a run: ``keys`` of the failed steps, and the call number ``seq`` when it was raised."""

    keys: tuple[str, ...]
    seq: int

    @classmethod
    def parse(cls, text: str | None) -> RunFailure | None:
        """Read the stored text; None if no step caused the failure."""
        if text is None:
            return None
        stored = json.loads(text)
        return cls(tuple(stored["keys"]), stored["position"])

    @property
    def text(self) -> str:
        """The JSON text that is stored with the run."""
        return json.dumps({"keys": self.keys, "position": self.seq}, ensure_ascii=False)


def select_rows_before(rows: Sequence[StepRow], target: StepRow) -> list[StepRow]:
    """Return the rows that a run starting again at ``target`` keeps: rows called before it that completed or failed.

    A race of `first` is kept or repeated as a whole: if the target is the race or one of its branches, all run again.
    """
    races = _races(rows)
    seq = races[target.commit_id].first_seq if target.commit_id in races else target.seq
    return _without_undecided_losers([row for row in rows if row.is_finished and row.seq < seq], races)


def select_rows_for_retry(rows: Sequence[StepRow], failure: RunFailure | None) -> list[StepRow]:
    """Return the rows that a retry of the failed run keeps: those that finished before its failure was raised, or all.

    Steps called after it, such as a compensation or a clean-up, reacted to the failure and are not kept.
    """
    finished = [row for row in rows if row.is_finished]
    if failure is not None:
        finished = [row for row in finished if row.seq <= failure.seq and row.step_key not in failure.keys]
    return _without_undecided_losers(finished, _races(rows))


def select_rows_cancelled_by_terminate(rows: Sequence[StepRow]) -> list[StepRow]:
    """Return the steps that terminate() cancelled: rows that are cancelled but lost no race."""
    kept = _without_undecided_losers(list(rows), _races(rows))
    return [row for row in rows if row not in kept]


def find_last_seq(rows: Iterable[StepRow]) -> int:
    """Return the highest call number of these rows; 0 if there are none."""
    return max((row.seq for row in rows), default=0)


def find_closest_names(name: str, keys: Sequence[str]) -> list[str]:
    """Return the keys closest to ``name``, for an error message; the first keys if none is close."""
    return difflib.get_close_matches(name, keys, n=3, cutoff=0.5) or list(keys[:3])


@dataclass(frozen=True, slots=True)
class _Race:
    """A decided race of `first`: the number of its first call, and the key of its own row."""

    first_seq: int
    row_key: str


def _races(rows: Sequence[StepRow]) -> dict[str, _Race]:
    """The decided races, keyed by the commit that decided each of them.

    It wrote the race's row, whose number is higher than its branches', its losers and usually its winner.
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
    """Remove the losers of races that are not kept, since they may win when the race runs again.

    Also removes the steps that terminate() cancelled, which lost no race. Those that cancel() ended are kept.
    """
    keys = {row.step_key for row in kept}
    return [
        row
        for row in kept
        if row.status is not StepStatus.CANCELLED
        or row.is_cancelled
        or (row.commit_id in races and races[row.commit_id].row_key in keys)
    ]
