"""``celery -A tests.chaos.project``: the application of tests/chaos/flows.py; a pool process says what it is at."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from celery import signals

from celery_durable import tasks
from tests.chaos.arena import AT_TASK
from tests.chaos.flows import WORK, build
from tests.chaos.stillness import step
from tests.smoke.config import Config
from tests.smoke.dying import become_child

config = Config.read(os.environ)
app = build(config)
app.set_current()
_NOTED = (tasks.ADVANCE, WORK)


def say_at(*, sender: Any, task_id: str, **_: Any) -> None:
    """The test that kills this process wants to know which pass it cuts short, or that it is at a step's task."""
    if sender.name in _NOTED:
        _note().write_text(task_id if sender.name == tasks.ADVANCE else AT_TASK)


def say_idle(*, sender: Any, **_: Any) -> None:
    if sender.name in _NOTED:
        _note().write_text("")


def _note() -> Path:
    return config.path("at", str(os.getpid()))


if config.role == "worker":
    app.steps["worker"].add(step(config.path()))
    signals.worker_process_init.connect(become_child)
    signals.task_prerun.connect(say_at)
    signals.task_postrun.connect(say_idle)
