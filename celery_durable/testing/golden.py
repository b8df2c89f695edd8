"""Golden histories: recorded runs in files beside the tests, which the code of today has to follow."""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from celery_durable.all_kinds import KINDS
from celery_durable.config import Settings
from celery_durable.definitions import Registry
from celery_durable.insight.recorded_run import from_export, from_history
from celery_durable.insight.replay_check import check_replay
from celery_durable.model import History
from celery_durable.runner import Runner
from celery_durable.runtime import Runtime
from celery_durable.store.engine import Store
from celery_durable.testing.code import Code, definition_of
from celery_durable.testing.errors import GoldenHistoryMissing, HarnessMisuse, NotReplayed, OpenStepChanged
from celery_durable.testing.instance import HarnessInstance
from celery_durable.wire.encoding import export_run, to_data

# `assert_replays`: a test before a deploy that the new code can continue a stored run.


def assert_replays(workflow: Code, history: History | Mapping[str, Any]) -> None:
    """Replay a stored run with this code, without running a step, and fail if the code takes other steps.

    Warns with OpenStepChanged if an open step waits for another event type, topic, task, child or time than the code
    asks for.

    Args:
        workflow: The workflow, with its new code.
        history: An instance's history, or the output of `celery -A proj durable export`, parsed from JSON.

    Raises:
        NotReplayed: The code takes other steps than the run.
        WorkflowNotFound: The run is of a workflow with another name.
        ValueRefused: ``history`` is not a run.
    """
    registry, runtime = Registry(), Runtime()
    registry.add(definition_of(workflow))
    store = Store(f"sqlite:///{os.devnull}", runtime=runtime)  # no statement reaches it
    try:
        runner = Runner(store, Settings(), registry, runtime, lambda _: None, kinds=KINDS)
        recorded = from_history(history) if isinstance(history, History) else from_export(history)
        found = check_replay(runner, recorded)
    finally:
        store.close()
    for change in found.open_step_changes:
        warnings.warn(OpenStepChanged(f"{found.ref}: {change.sentence} {change.advice}"), stacklevel=2)
    if not found.matches:
        raise NotReplayed(found.ref, [(each.sentence, each.advice) for each in found.differences])


_NOT_IN_FILE_NAMES = re.compile(r"[^\w.-]+")


class GoldenHistories:
    """Replays the golden histories of one test, or records them. The fixture ``durable_golden`` is one.

    Args:
        folder: Where the files are.
        test: The name of the test, with which the names of its files begin.
        update: Record instead of failing if a file is missing or has another run.
    """

    def __init__(self, folder: Path, test: str, *, update: bool) -> None:
        self._folder, self._test, self._update = folder, test, update
        self._checked: set[Path] = set()

    def check(self, instance: HarnessInstance[Any], name: str = "") -> None:
        """Replay the recorded run with the workflow of the instance. No step runs.

        With ``--durable-update``, the current run of the instance is recorded first.

        Args:
            instance: An instance of the harness, in any state.
            name: Distinguishes several histories of one test.

        Raises:
            GoldenHistoryMissing: Nothing is recorded yet.
            NotReplayed: The code takes other steps than the recorded run.
            HarnessMisuse: The test has used the name before.
        """
        path = self._folder / f"{_NOT_IN_FILE_NAMES.sub('-', '-'.join(filter(None, [self._test, name])))}.json"
        if path in self._checked:
            raise HarnessMisuse(f"{path.name} was checked before in this test. Give each history a name of its own.")
        self._checked.add(path)
        if self._update:
            self._folder.mkdir(parents=True, exist_ok=True)
            path.write_text(_record(instance), encoding="utf-8")
        elif not path.exists():
            raise GoldenHistoryMissing(str(path))
        assert_replays(instance.workflow, json.loads(path.read_text(encoding="utf-8")))


def _record(instance: HarnessInstance[Any]) -> str:
    return json.dumps(to_data(export_run(instance.history())), ensure_ascii=False, indent=2, sort_keys=True) + "\n"
