"""Whether the code of today follows what is recorded of a run: for tests that run before a deploy."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from typing import Any

from celery_durable.config import Settings
from celery_durable.definitions import Registry
from celery_durable.model import History
from celery_durable.runner import Runner
from celery_durable.runner.recorded_run import from_export, from_history
from celery_durable.runtime import Runtime
from celery_durable.store.engine import Store
from celery_durable.testing.code import Code, definition_of
from celery_durable.testing.errors import NotReplayed, OpenStepChanged


def assert_replays(workflow: Code, history: History | Mapping[str, Any]) -> None:
    """Raise NotReplayed where the workflow does something else than the run; no step is run.

    ``history``: of an instance, or what `celery -A proj durable export` printed, parsed from JSON. Raises
    WorkflowNotFound for a run of a workflow of another name, ValueRefused for what is no run. Warns with
    OpenStepChanged where an open step waits for another event type, topic, task, child or time than the code asks for.
    """
    registry, runtime = Registry(), Runtime()
    registry.add(definition_of(workflow))
    store = Store(f"sqlite:///{os.devnull}", runtime=runtime)  # which is asked for nothing
    try:
        runner = Runner(store, Settings(), registry, runtime, lambda _: None)
        found = runner.check_replay(from_history(history) if isinstance(history, History) else from_export(history))
    finally:
        store.close()
    for change in found.open_step_changes:
        warnings.warn(OpenStepChanged(f"{found.ref}: {change.sentence} {change.remedy}"), stacklevel=2)
    if not found.matches:
        raise NotReplayed(found.ref, [(each.sentence, each.remedy) for each in found.differences])
