"""`assert_replays`: a test before a deploy that the new code can continue a stored run."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from typing import Any

from celery_durable import remote
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
        runner = Runner(store, Settings(), registry, runtime, lambda _: None, kinds=remote.KINDS)
        found = runner.check_replay(from_history(history) if isinstance(history, History) else from_export(history))
    finally:
        store.close()
    for change in found.open_step_changes:
        warnings.warn(OpenStepChanged(f"{found.ref}: {change.sentence} {change.advice}"), stacklevel=2)
    if not found.matches:
        raise NotReplayed(found.ref, [(each.sentence, each.advice) for each in found.differences])
