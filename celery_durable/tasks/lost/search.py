"""The search for lost tasks, a job: it finds dead workers and missing messages in the lists of the workers.

What a dead worker held by its last list is lost. A task is also lost if its message has left the queue, no worker holds
it, and every worker of the queue has listed its tasks since that was noticed (docs/design.md).

All that is remembered is in the database. So any number of dispatchers may search, and each may end at any time.
Several reports of a loss have one effect.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Protocol

from celery_durable.config import Settings
from celery_durable.model import RunRef, TaskReference
from celery_durable.redispatch import SLACK
from celery_durable.runtime import Runtime
from celery_durable.store import heartbeats, lost_tasks
from celery_durable.store.engine import Store
from celery_durable.store.heartbeats import WorkerRow
from celery_durable.store.lost_tasks import SentTask, StepKey

logger = logging.getLogger("celery_durable.lost")

_CHECK_SECONDS = 1.0
_SILENT = timedelta(seconds=3)
"""A worker that has not reported for this long, of the two seconds between its reports, is noticed to be silent."""
_RECENT = timedelta(seconds=60)
"""How long every check looks for the tasks that were out when a worker became silent."""
_OLD = timedelta(seconds=30)
_OLD_CHECK_SECONDS = 15.0
"""How often to look for tasks that are missing without the death of a worker, of those that were sent `_OLD` ago."""
_ORDER_MARGIN = timedelta(seconds=30)
"""Two messages of different commits may be sent in the other order, but not so late."""
_PAUSE_FACTOR = 10
"""A search that takes long, because many tasks are out, takes a tenth of the time."""
_BATCH_SIZE = 50
"""How many lost tasks one transaction reports."""
LOSS_REASON = "no worker holds it, and its message is gone"

Destination = tuple[str, int]
Lost = tuple[TaskReference, datetime]
Hands = frozenset[tuple[RunRef, str]]
"""The attempts of the tasks that living workers hold."""


class MessageBroker(Protocol):
    def destination(self, body: str) -> Destination | None:
        """The destination of a stored task's message; None if no queue is known."""

    def queue_length(self, queue: str) -> int | None: ...


class LostTaskSearch:
    """Finds lost tasks. ``report`` returns how many of them are still awaited.

    One search reads ``page_size`` of the tasks that are out, and reports at most ``max_reported`` for each worker and
    each queue. The next searches find the rest.
    """

    def __init__(
        self,
        store: Store,
        settings: Settings,
        runtime: Runtime,
        messages: MessageBroker,
        report: Callable[[Sequence[Lost]], int],
        *,
        page_size: int = 2_000,
        max_reported: int = 1_000,
    ) -> None:
        self._store, self._settings, self._runtime = store, settings, runtime
        self._page_size, self._max_reported = page_size, max_reported
        self._messages, self._report = messages, report
        self._dead_after = timedelta(seconds=settings.worker_lost_seconds)
        self._next_search_at = self._next_old_check_at = -math.inf
        self._offset, self._had_outage = 0, False

    def check(self) -> float:
        """Report what is lost, as far as it is known now. Returns after how many seconds to check again."""
        had_outage, self._had_outage = self._had_outage, True  # unless this check ends well
        if self._settings.is_execution_enabled:
            self._check(self._runtime.monotonic(), had_outage=had_outage)
            self._had_outage = False
        return _CHECK_SECONDS

    def _check(self, began: float, *, had_outage: bool) -> None:
        now, workers = self._store.read(heartbeats.read_workers)
        if had_outage:  # workers that have been silent may have been unable to write
            workers = [replace(each, silent_at=None) for each in workers]
        self._notice_silence(workers, now)
        if began >= self._next_search_at:
            self._search(workers, now, began)
            self._next_search_at = began + _PAUSE_FACTOR * (self._runtime.monotonic() - began)

    def _search(self, workers: Sequence[WorkerRow], now: datetime, began: float) -> None:
        dead = [each for each in workers if self._is_dead(each, now)]
        living = [each for each in workers if each not in dead]
        times = [each.silent_at for each in workers if each.silent_at is not None and each.silent_at > now - _RECENT]
        if began >= self._next_old_check_at:
            self._next_old_check_at = began + _OLD_CHECK_SECONDS
            times.append(now - _OLD)
        if not times and not any(each.has_list for each in dead):
            return
        held = self._store.read(lambda tx: heartbeats.read_held(tx, [each.id for each in workers]))
        in_hands = frozenset(each.attempt for worker in living for each in held.get(worker.id, ()))
        for each in dead:
            self._report_list(each, held.get(each.id, ()), in_hands)
        if times and living:
            self._check_sent(max(times), living, in_hands)

    # --- dead workers ---------------------------------------------------------------------------

    def _notice_silence(self, workers: Iterable[WorkerRow], now: datetime) -> None:
        """Record which workers have become silent: they count as dead if not seen again in the rest of the time.

        An outage of the database silences all. After an outage that this process saw, silence is noticed anew.
        """
        since = now - _SILENT
        silent = [each.id for each in workers if each.silent_at is None and each.seen_at <= since]
        if silent:
            self._store.transact_once(lambda tx: heartbeats.record_silence(tx, silent, since=since))

    def _is_dead(self, worker: WorkerRow, now: datetime) -> bool:
        if worker.silent_at is None:
            return worker.is_stuck
        return worker.seen_at <= now - self._dead_after and worker.silent_at <= now - (self._dead_after - _SILENT)

    def _report_list(self, worker: WorkerRow, held: Sequence[TaskReference], in_hands: Hands) -> None:
        """Report what a dead worker held, unless the broker has delivered it to another one."""
        lost = [(each, worker.seen_at) for each in held if each.attempt not in in_hands]
        self._report_lost(lost[: self._max_reported], f"with worker {worker.node!r}")
        if worker.has_list and len(lost) <= self._max_reported:
            self._store.transact_once(lambda tx: heartbeats.forget_held(tx, worker.id))

    def _report_lost(self, lost: Sequence[Lost], where: str) -> None:
        found = sum(self._report(lost[start : start + _BATCH_SIZE]) for start in range(0, len(lost), _BATCH_SIZE))
        if found:  # others were answered meanwhile
            logger.warning("%d tasks are lost %s. Each is sent again or fails with TaskLost", found, where)

    # --- missing messages -----------------------------------------------------------------------

    def _check_sent(self, before: datetime, living: Sequence[WorkerRow], in_hands: Hands) -> None:
        """Look for missing tasks in a page of those that were sent before a time; the next call reads the next page."""
        tasks, has_more = self._store.read(
            lambda tx: lost_tasks.read_sent(tx, before=before, limit=self._page_size, offset=self._offset)
        )
        self._offset = self._offset + self._page_size if has_more else 0
        if has_more:
            self._next_old_check_at = -math.inf
        for (queue, _), sent in self._group(tasks).items():
            listed = [each.listed_at for each in living if queue in each.queues]
            # A worker that has not listed its tasks yet is starting, and may have received any.
            if not listed or None in listed:
                continue
            missing = self._find_missing(queue, sent, in_hands)
            listed_since = min(each for each in listed if each is not None) - SLACK
            lost = [each for each in missing if each.missing_at is not None and each.missing_at <= listed_since]
            self._report_lost(
                [(each.reference, each.sent_at) for each in lost[: self._max_reported]], f"of queue {queue!r}"
            )
            steps: dict[StepKey, list[int]] = {}
            for each in missing:
                if each.missing_at is None:
                    steps.setdefault(each.step, []).append(each.position)
            for step, positions in steps.items():
                record = functools.partial(lost_tasks.record_missing, step=step, positions=positions)
                self._store.transact_once(record)

    def _group(self, tasks: Sequence[SentTask]) -> Mapping[Destination, Sequence[SentTask]]:
        """Group tasks by destination; all tasks of a step have the destination of one of them."""
        bodies = self._store.read(lambda tx: lost_tasks.read_bodies(tx, tasks)) if tasks else {}
        destinations = {step: self._messages.destination(body) for step, body in bodies.items()}
        found: dict[Destination, list[SentTask]] = {}
        for task in tasks:
            if (destination := destinations.get(task.step)) is not None:
                found.setdefault(destination, []).append(task)
        return found

    def _find_missing(self, queue: str, sent: Sequence[SentTask], in_hands: Hands) -> list[SentTask]:
        """The tasks of one destination that no worker holds and whose message has left the queue."""
        taken = [each for each in sent if each.reference.attempt in in_hands]
        rest = [each for each in sent if each.reference.attempt not in in_hands]
        if not rest or self._messages.queue_length(queue) == 0:
            return rest
        last_sent_at = max((each.sent_at for each in taken), default=rest[0].sent_at)
        maps = {each.step for each in rest if each.is_of_map}
        # The messages of one commit are sent in the order of their positions.
        last = {step: self._store.read(functools.partial(lost_tasks.read_last_answered, step=step)) for step in maps}
        for each in taken:
            if each.step in last:
                batches = last[each.step]
                batches[each.sent_at] = max(batches.get(each.sent_at, 0), each.position)
        return [
            each
            for each in rest
            if each.position < last.get(each.step, {}).get(each.sent_at, 0)
            or each.sent_at + _ORDER_MARGIN < last_sent_at
        ]
