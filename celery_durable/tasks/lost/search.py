"""The search for lost tasks, a job: it finds dead workers and missing messages in the lists of the workers.

What a dead worker held by its last list is lost. A task is also lost if its message has left the queue, no worker holds
it, and every worker of the queue has listed its tasks since that was noticed (docs/design.md).

All that is remembered is in the database. So any number of dispatchers may search, and each may end at any time.
Several reports of a loss have one effect.
"""

from __future__ import annotations

import functools
import json
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from celery import Celery

from celery_durable.config import Settings
from celery_durable.model import RunRef, TaskReference
from celery_durable.redispatch import SLACK
from celery_durable.runtime import Runtime
from celery_durable.store import heartbeats, lost_tasks
from celery_durable.store.engine import Store
from celery_durable.store.heartbeats import WorkerRow
from celery_durable.store.lost_tasks import SentTask

logger = logging.getLogger("celery_durable.lost")

_CHECK_SECONDS = 1.0
_SILENT = timedelta(seconds=3)
"""A worker that has not reported for this long, of the two seconds between its reports, is noticed to be silent."""
_SEARCH_SECONDS = 3.0
_MIN_AGE = timedelta(seconds=5)
"""How often to look for missing tasks, of those that were sent this long ago: most tasks have ended by then."""
_PAUSE_FACTOR = 10
"""A search that takes long, because many tasks are out, takes a tenth of the time."""
_ORDER_MARGIN = timedelta(seconds=30)
"""Two messages of different commits may be sent in the other order, but not so late."""
_BATCH_SIZE = 50
"""How many lost tasks one transaction reports."""
_WHY = "no worker holds it, and its message is gone"

Lost = tuple[TaskReference, datetime]
Destination = tuple[str, int]
"""The queue to which Celery routes a stored task now, and its priority there."""
Hands = Mapping[tuple[RunRef, str], int]
"""The attempts of the tasks that living workers hold, each with its newest delivery there."""


class LostTaskSearch:
    """Finds lost tasks. One search reads ``page_size`` of the tasks that are out; the next ones read the others.

    ``report_lost`` returns how many of the tasks are still awaited. ``find_destination``: of an encoded task; None if
    unknown. ``queue_length``: None if the broker does not say.
    """

    def __init__(
        self,
        store: Store,
        settings: Settings,
        runtime: Runtime,
        report_lost: Callable[..., int],
        *,
        find_destination: Callable[[str], Destination | None],
        queue_length: Callable[[str], int | None],
        page_size: int = 2_000,
    ) -> None:
        self._store, self._settings, self._runtime, self._report_lost = store, settings, runtime, report_lost
        self._find_destination, self._queue_length, self._page_size = find_destination, queue_length, page_size
        self._dead_after = timedelta(seconds=settings.worker_lost_seconds)
        self._next_search_at, self._offset, self._had_outage = -math.inf, 0, False

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
        is_due = began >= self._next_search_at
        sent, has_more = self._read_page(now - _MIN_AGE) if is_due else ([], False)
        dead = [each for each in workers if self._is_dead(each, now)]
        if sent or any(each.has_list for each in dead):
            held = self._store.read(lambda tx: heartbeats.read_held(tx, [each.id for each in workers]))
            living = [each for each in workers if each not in dead]
            in_hands: dict[tuple[RunRef, str], int] = {}
            for each in (task for worker in living for task in held.get(worker.id, ())):
                in_hands[each.attempt] = max(each.delivery, in_hands.get(each.attempt, 0))
            for worker in dead:
                self._report_list(worker, held.get(worker.id, ()), in_hands)
            self._check_sent(sent, living, in_hands)
        if is_due:
            took = self._runtime.monotonic() - began
            self._next_search_at = began + max(0.0 if has_more else _SEARCH_SECONDS, _PAUSE_FACTOR * took)

    # --- dead workers ---------------------------------------------------------------------------

    def _notice_silence(self, workers: Sequence[WorkerRow], now: datetime) -> None:
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
        self._report(lost, f"with worker {worker.node!r}")
        if worker.has_list:
            self._store.transact_once(lambda tx: heartbeats.forget_held(tx, worker.id))

    def _report(self, lost: Sequence[Lost], where: str) -> None:
        parts = [lost[start : start + _BATCH_SIZE] for start in range(0, len(lost), _BATCH_SIZE)]
        found = sum(self._report_lost(part, why=_WHY) for part in parts)
        if found:  # others were answered meanwhile
            logger.warning("%d tasks are lost %s. Each is sent again or fails with TaskLost", found, where)

    # --- missing messages -----------------------------------------------------------------------

    def _read_page(self, before: datetime) -> tuple[list[SentTask], bool]:
        """Read a page of the tasks that were sent before a time, and whether there are more; the next page next."""
        page = {"limit": self._page_size, "offset": self._offset}
        sent, has_more = self._store.read(lambda tx: lost_tasks.read_sent(tx, before=before, **page))
        self._offset = self._offset + self._page_size if has_more else 0
        return sent, has_more

    def _check_sent(self, sent: Sequence[SentTask], living: Sequence[WorkerRow], in_hands: Hands) -> None:
        """Report which of these tasks are lost, and record which others are missing."""
        for (queue, _), tasks in self._group(sent).items():
            listed = [each.listed_at for each in living if queue in each.queues]
            # A worker that has not listed its tasks yet is starting, and may have received any.
            if not listed or not all(listed):
                continue
            missing = self._find_missing(queue, tasks, in_hands)
            listed_since = min(each for each in listed if each is not None) - SLACK
            lost = [each for each in missing if each.missing_at is not None and each.missing_at <= listed_since]
            self._report([(each.reference, each.sent_at) for each in lost], f"of queue {queue!r}")
            if new := [each for each in missing if each.missing_at is None]:
                self._store.transact_once(functools.partial(lost_tasks.record_missing, tasks=new))

    def _group(self, sent: Sequence[SentTask]) -> Mapping[Destination, Sequence[SentTask]]:
        """Group tasks by destination; all tasks of a step have the destination of one of them."""
        bodies = self._store.read(lambda tx: lost_tasks.read_bodies(tx, sent))
        destinations = {step: self._find_destination(body) for step, body in bodies.items()}
        found: dict[Destination, list[SentTask]] = defaultdict(list)
        for task in sent:
            if (destination := destinations.get(task.step)) is not None:
                found[destination].append(task)
        return found

    def _find_missing(self, queue: str, sent: Sequence[SentTask], in_hands: Hands) -> list[SentTask]:
        """The tasks of one destination that no worker holds and whose message has left the queue."""
        # Only the newest delivery was sent at that time. A worker that was frozen may hold an older one.
        taken = [each for each in sent if in_hands.get(each.reference.attempt) == each.reference.delivery]
        rest = [each for each in sent if each.reference.attempt not in in_hands]
        if not rest or self._queue_length(queue) == 0:
            return rest
        last_sent_at = max((each.sent_at for each in taken), default=rest[0].sent_at)
        # The messages of one commit are sent in the order of their positions.
        maps = list({each.step for each in rest if each.is_of_map})
        last = self._store.read(lambda tx: lost_tasks.read_last_answered(tx, maps))
        for each in taken:
            last[each.step, each.sent_at] = max(last.get((each.step, each.sent_at), 0), each.position)
        return [
            each
            for each in rest
            if each.position < last.get((each.step, each.sent_at), 0) or each.sent_at + _ORDER_MARGIN < last_sent_at
        ]


def find_destination(app: Celery, body: str) -> Destination | None:
    """Return the destination of an encoded task; None if it is not one known queue."""
    content = json.loads(body)
    name = content["name"]
    task: Any = app.tasks.get(name)
    # Task.apply_async starts from these options too.
    options = {**(task._get_exec_options() if task is not None else {}), **content["options"]}  # noqa: SLF001
    try:
        routed = app.amqp.router.route(options, name, content["args"], content["kwargs"], task)
    except Exception as exc:  # noqa: BLE001  # the queue does not exist, or a router of the application fails
        logger.debug("The destination of task %r is unknown: %s", name, exc)
        return None
    queue = _find_queue(app, routed)
    return None if queue is None else (queue, int(routed.get("priority") or app.conf.task_default_priority or 0))


def _find_queue(app: Celery, routed: dict[str, Any]) -> str | None:
    exchange, key = routed.get("exchange"), routed.get("routing_key")
    if not exchange:
        queue = routed.get("queue")
        return None if queue is None else str(queue.name)
    wanted = (getattr(exchange, "name", exchange), key)
    bound = [each for each in app.amqp.queues.values() if (each.exchange.name, each.routing_key) == wanted]
    return str(bound[0].name) if len(bound) == 1 else None
