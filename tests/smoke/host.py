"""``celery -A tests.smoke.host``: an application of somebody else's, with a Durable or without one.

Every task writes down when it begins and ends, and every signal that it hears. What Durable changes there, or in the
application's connections and messages, it changes for its host.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from celery import Celery, signals
from celery.concurrency.solo import TaskPool

from celery_durable import Durable, Step, WorkflowEvent

VARIABLE = "DURABLE_HOST"
HELD_SECONDS = 120
_HEARD = ("task_prerun", "task_postrun", "task_success", "task_failure", "task_retry", "task_revoked", "task_rejected")


@dataclass(frozen=True)
class HostConfig:
    """Where the application is at home; without ``database_url`` it has no Durable."""

    name: str
    folder: str
    broker_url: str
    database_url: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)

    def environment(self) -> dict[str, str]:
        return {VARIABLE: json.dumps(dataclasses.asdict(self))}

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> HostConfig:
        return cls(**json.loads(environment[VARIABLE]))

    @property
    def runs(self) -> Path:
        """One line for each begin and end of a task: what, its id, the process, the time."""
        return Path(self.folder, "runs")

    def runs_so_far(self) -> str:
        return self.runs.read_text() if self.runs.exists() else ""

    @property
    def signals(self) -> Path:
        """One line for each signal: its name, the task's name."""
        return Path(self.folder, "signals")

    def gate(self, id_: str) -> Path:
        """What a task that is held waits for."""
        return Path(self.folder, f"go-{id_}")


def build(config: HostConfig) -> Celery:
    app = Celery("host", broker=config.broker_url, set_as_current=False)
    app.conf.update({"worker_prefetch_multiplier": 1, **copy.deepcopy(config.settings)})
    if config.database_url is not None:
        attach(app, config.database_url)

    def note(what: str, id_: str) -> None:
        with config.runs.open("a") as runs:  # short lines: each is written whole
            runs.write(f"{what} {id_} {os.getpid()} {time.monotonic()}\n")

    @app.task(name="late", bind=True, acks_late=True, reject_on_worker_lost=True, shared=False)
    def late(self: Any, seconds: float | None = None) -> None:
        note("begin", self.request.id)
        _rest(config.gate(self.request.id), seconds)
        note("end", self.request.id)

    @app.task(name="early", bind=True, shared=False)
    def early(self: Any, seconds: float | None = None) -> None:
        note("begin", self.request.id)
        _rest(config.gate(self.request.id), seconds)
        note("end", self.request.id)

    @app.task(name="limited", bind=True, rate_limit="2/s", shared=False)
    def limited(self: Any) -> None:
        note("begin", self.request.id)

    @app.task(name="moody", bind=True, autoretry_for=(OSError,), default_retry_delay=0.2, shared=False)
    def moody(self: Any) -> int:
        note("begin", self.request.id)
        if self.request.retries < 2:
            raise OSError("not yet")
        return int(self.request.retries)

    @app.task(name="tick", shared=False)
    def tick() -> None:
        note("tick", "tick")

    @app.task(name="double", shared=False)
    def double(number: int) -> int:
        return 2 * number

    @app.task(name="total", shared=False)
    def total(numbers: list[int]) -> int:
        return sum(numbers)

    return app


def _rest(gate: Path, seconds: float | None) -> None:
    if seconds is not None:
        time.sleep(seconds)
        return
    end = time.monotonic() + HELD_SECONDS
    while not gate.exists():
        assert time.monotonic() < end
        time.sleep(0.05)


def listen(config: HostConfig) -> None:
    """Write down the signals of the application's own tasks."""

    def hear(name: str) -> None:
        def heard(sender: Any = None, **_: Any) -> None:
            task = getattr(sender, "name", str(sender))
            if not task.startswith("celery_durable."):
                with config.signals.open("a") as heard:
                    heard.write(f"{name} {task}\n")

        getattr(signals, name).connect(heard, weak=False)

    for name in _HEARD:
        hear(name)


def attach(app: Celery, database_url: str) -> Durable:
    app.conf.update(durable_database_url=database_url, durable_unknown_workflow_seconds=1.0)
    durable = Durable(app)

    @durable.workflow(name="errand")
    def errand(event: WorkflowEvent[int], step: Step) -> Any:
        return step.task("double", app.signature("double", (event.payload,)))

    @durable.workflow(name="own", queue="celery")
    def own(event: WorkflowEvent[Any], step: Step) -> int:
        return step.do("one", lambda: 1)

    return durable


class OwnPool(TaskPool):
    """A pool of the application's own."""


if VARIABLE in os.environ:
    _config = HostConfig.read(os.environ)
    app = build(_config)
    app.set_current()
    listen(_config)
