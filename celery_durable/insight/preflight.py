"""The preflight: a replay check of all open runs against the code at hand, before it is deployed. It only reads."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from celery_durable.definitions import LinearDefinition
from celery_durable.insight.recorded_run import RecordedRun, from_open_run
from celery_durable.insight.replay_check import ReplayResult, check_replay
from celery_durable.runner import Runner
from celery_durable.runner.step_kinds import Difference
from celery_durable.store.engine import Store
from celery_durable.store.runs import open_runs

_BATCH = 200
_EXAMPLES = 3
_UNKNOWN = Difference(
    "The code has no workflow of this name.", "Keep the workflow, or import its module, until no run of it is left."
)
_KEEP_HANDLERS = "Keep the handlers of all steps of unfinished runs."


class Preflight:
    """Checks open runs."""

    def __init__(self, store: Store, runner: Runner) -> None:
        self._store, self._runner = store, runner

    def is_known(self, workflow: str) -> bool:
        return self._runner.registry.find(workflow) is not None

    def count_open_runs(self, workflow: str | None = None) -> dict[str, int]:
        return self._store.read(lambda tx: open_runs.count(tx, workflow=workflow))

    def check_open_runs(self, workflow: str, *, sample: int | None = None) -> Iterator[ReplayResult]:
        """Check the open runs of a workflow. ``sample``: only so many, spread evenly from the oldest to the newest."""
        keys = self._list_keys(workflow)
        chosen = keys if sample is None else iter(_select_evenly(list(keys), sample))
        while batch := list(islice(chosen, _BATCH)):
            results = [(pk, self.check(recorded)) for pk, recorded in self._read(batch)]
            # A run that went on between the statements that read it may look as if it diverged.
            read_again = dict(self._read([pk for pk, result in results if not result.matches]))
            for pk, result in results:
                if result.matches:
                    yield result
                elif pk in read_again:
                    yield self.check(read_again[pk])

    def check(self, recorded: RecordedRun) -> ReplayResult:
        definition = self._runner.registry.find(recorded.ref.workflow)
        if definition is None:
            return _build_result(recorded, [_UNKNOWN])
        if isinstance(definition, LinearDefinition):
            return _build_result(recorded, list(_find_missing_handlers(definition, recorded)))
        return check_replay(self._runner, recorded)

    def _list_keys(self, workflow: str) -> Iterator[int]:
        after_pk = 0
        list_keys = functools.partial(open_runs.list_keys, workflow=workflow, limit=_BATCH)
        while keys := self._store.read(functools.partial(list_keys, after_pk=after_pk)):
            yield from keys
            after_pk = keys[-1]

    def _read(self, keys: Sequence[int]) -> list[tuple[int, RecordedRun]]:
        if not keys:
            return []
        return [(run.pk, from_open_run(run)) for run in self._store.read(lambda tx: open_runs.read(tx, keys))]


def _select_evenly(keys: Sequence[int], number: int) -> list[int]:
    if len(keys) <= number:
        return list(keys)
    last = len(keys) - 1
    return sorted({keys[round(index * last / max(number - 1, 1))] for index in range(number)})


def _find_missing_handlers(definition: LinearDefinition, recorded: RecordedRun) -> Iterator[Difference]:
    """Yield the steps that no handler can run: a run of a linear workflow follows the rows that it began with."""
    for row in recorded.run_state.steps:
        if not row.is_finished and row.name not in definition.handlers:
            yield Difference(f"The code has no handler for step {row.name!r}.", _KEEP_HANDLERS)


def _build_result(recorded: RecordedRun, differences: Sequence[Difference]) -> ReplayResult:
    return ReplayResult(
        ref=recorded.ref, replayed=(), next_steps=(), uncalled=(), end="", differences=tuple(differences)
    )


@dataclass(slots=True)
class Occurrences:
    """A difference or a change that several runs have in common, with the ids of some of them."""

    advice: str
    count: int = 0
    examples: list[str] = field(default_factory=list)

    def add(self, instance_id: str) -> None:
        self.count += 1
        if len(self.examples) < _EXAMPLES:
            self.examples.append(instance_id)


@dataclass(slots=True)
class WorkflowReport:
    """What the preflight has found about one workflow. ``continuing`` includes ``changed`` runs."""

    continuing: int = 0
    changed: int = 0
    diverging: int = 0
    differences: dict[str, Occurrences] = field(default_factory=dict)
    open_step_changes: dict[str, Occurrences] = field(default_factory=dict)

    def add(self, result: ReplayResult) -> None:
        if result.matches:
            self.continuing += 1
            self.changed += bool(result.open_step_changes)
        else:
            self.diverging += 1
        kinds = ((result.differences, self.differences), (result.open_step_changes, self.open_step_changes))
        for found, occurrences in kinds:
            for each in dict.fromkeys(found):
                occurrences.setdefault(each.sentence, Occurrences(each.advice)).add(result.ref.instance_id)
