"""The crowd: keeps so many instances alive, and answers those that wait. It calls as a web application would."""

from __future__ import annotations

import contextlib
import heapq
import random
import threading
import time
from typing import Any

import sqlalchemy as sa

from celery_durable import CreateOptions, WorkflowInstance
from celery_durable.errors import InstanceTerminal, StoreUnavailable
from tests.chaos import flows
from tests.smoke.site import Site

_BATCH = 8
_PAUSE_SECONDS = 0.2


class Crowd:
    """A thread that creates instances of `planned`. A call that fails is made again until it is answered."""

    def __init__(self, site: Site, dice: random.Random, *, size: int) -> None:
        self._site, self._dice, self._size = site, dice, size
        self.plans: dict[str, list[str]] = {}
        self.accepted_events: set[str] = set()
        self.refusals = 0
        self._answers: list[tuple[float, str, str, Any]] = []
        self._is_over = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="crowd", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Create nothing more; the answers that are still owed are given."""
        self._is_over.set()
        self._thread.join(120)
        assert not self._thread.is_alive(), "the crowd could not end its calls"
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        batch: dict[str, list[str]] = {}
        try:
            while not self._is_over.wait(_PAUSE_SECONDS) or batch or self._answers:
                with self._outages():
                    if not (batch or self._is_over.is_set()) and self._site.open_instances() <= self._size - _BATCH:
                        batch = self._new_batch()
                    if batch:
                        self._create(batch)
                        batch = {}
                    self._answer()
        except BaseException as failure:
            self._failure = failure

    @contextlib.contextmanager
    def _outages(self) -> Any:
        try:
            yield
        except (StoreUnavailable, sa.exc.DBAPIError):
            self.refusals += 1

    def _new_batch(self) -> dict[str, list[str]]:
        begin = len(self.plans)
        return {f"p-{number}": flows.plan(self._dice) for number in range(begin, begin + _BATCH)}

    def _create(self, batch: dict[str, list[str]]) -> None:
        """Those of an earlier try that was not answered are skipped by `create_batch`; they count as answered now."""
        workflow = self._site.workflow("planned")
        workflow.create_batch([CreateOptions(id=key, params=plan) for key, plan in batch.items()])
        for key, plan in batch.items():
            self.plans[key] = plan
            self._site.instances.append(WorkflowInstance(workflow, key))
            for type_, payload in flows.events(plan):  # some come before they are waited for
                heapq.heappush(self._answers, (time.monotonic() + self._dice.uniform(0, 4), key, type_, payload))

    def _answer(self) -> None:
        while self._answers and (self._answers[0][0] <= time.monotonic() or self._is_over.is_set()):
            _, key, type_, payload = self._answers[0]
            event_id = f"{key}-{type_}"
            with contextlib.suppress(InstanceTerminal):  # then it is in the report: it ended without its event
                self._site.durable.internals.operations.events.send("planned", key, type_, payload, id=event_id)
                self.accepted_events.add(event_id)
            heapq.heappop(self._answers)
