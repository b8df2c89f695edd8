"""The dispatcher's part of the search for lost tasks: it detects deaths, sends markers, requests inventories, reports.

Only the number of the inventory is stored. If a dispatcher ends, another dispatcher starts its searches again. A search
starts when a worker died or a new worker started. Once a minute it also starts for tasks that were sent more than a
minute ago. That finds losses that no process reports, such as a purged queue.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol

from celery_durable.runtime import Runtime
from celery_durable.store import inventories, lost_tasks
from celery_durable.store.engine import Store
from celery_durable.store.inventories import REPLACED_AFTER, SILENT_AFTER, ProcessRow
from celery_durable.store.lost_tasks import SentCursor, SentTask
from celery_durable.tasks.lost import detection
from celery_durable.tasks.lost.detection import (
    Abandon,
    Observations,
    ReportLost,
    RequestInventory,
    Search,
    SendMarker,
    Wait,
    Worker,
)

logger = logging.getLogger("celery_durable.lost")

_CHECK_SECONDS = 1.0
_MAX_GAP_SECONDS = 10.0
"""The longest normal time between two calls of `check`; after more, the database or this process may have been down."""
_PERIODIC_SCAN_SECONDS = 60.0
_NEW_WORKER_SECONDS = 5.0
"""The time after which a worker that has just started consumes its queues."""
_RETRY_SECONDS = 5.0
"""When to search again after an abandoned search, while a worker's death is recent."""
_RECENT_DEATH_SECONDS = 600.0
_PAGE_SIZE = 10_000
_REPORT_BATCH_SIZE = 50
"""How many lost tasks one transaction reports; each call of `check` runs one."""
_MARKER_CHECK_SECONDS = 10.0
"""A marker is lost if no worker has reported it for this long and its queue is empty."""
_MAX_MARKERS = 3
"""After this many lost markers, another application seems to consume them, so the search skips the queue."""
_QUEUE_PAUSE_SECONDS = 600.0
_POOLS_THAT_RUN_BODIES_IN_MAIN_LOOP = ("solo", None)
"""The pools whose main loop runs the bodies of tasks, as heartbeats name them; None: not known."""
LOSS_REASON = "no worker holds it, and its message is gone"


@dataclass(frozen=True, slots=True)
class Destination:
    """The queue and the priority of a task's messages."""

    queue: str
    priority: int = 0


class MessageBroker(Protocol):
    """The operations of Celery that the search needs."""

    def destination(self, body: str) -> Destination | None:
        """The destination of a stored task's message; None if no queue is known."""

    def send_marker(self, id_: str, destination: Destination) -> bool:
        """Send a marker; returns False if the broker did not take it."""

    def queue_length(self, queue: str) -> int | None:
        """How many messages wait in the queue; None if unknown."""


@dataclass(slots=True)
class _ActiveSearch:
    """A search that is running; its times are of this process's monotonic clock.

    ``has_successor``: after the search started, a scan found tasks that it does not cover.
    """

    search: Search
    tasks: dict[str, SentTask]
    started_at: float
    marker_sent_at: float = -math.inf
    inventory_requested_at: float = 0.0
    markers_sent: int = 0
    has_successor: bool = False


@dataclass(slots=True)
class _Scan:
    """When to scan for candidates next: tasks sent at least ``age_seconds`` ago, from the position ``after`` on."""

    due_at: float
    age_seconds: float
    after: SentCursor | None = None


@dataclass(slots=True)
class _SearchState:
    """What the oldest dispatcher remembers. ``lost``: the lost tasks to report, each batch with its queue."""

    searches: dict[Destination, _ActiveSearch] = field(default_factory=dict)
    paused_until: dict[str, float] = field(default_factory=dict)
    lost: list[tuple[str, Sequence[SentTask]]] = field(default_factory=list)
    known_workers: frozenset[str] | None = None
    last_death_at: float = -math.inf
    periodic_scan: _Scan = field(default_factory=lambda: _Scan(-math.inf, _PERIODIC_SCAN_SECONDS))
    full_scan: _Scan = field(default_factory=lambda: _Scan(math.inf, 0.0))


class LostTaskSearch:
    """Finds lost tasks; of several dispatchers, the oldest one searches.

    ``heartbeat_id`` returns the id of this process's heartbeat row.
    """

    def __init__(
        self,
        store: Store,
        runtime: Runtime,
        messages: MessageBroker,
        report: Callable[[Sequence[SentTask]], int],
        *,
        heartbeat_id: Callable[[], str | None],
    ) -> None:
        self._store, self._runtime, self._messages, self._report, self._heartbeat_id = (
            store,
            runtime,
            messages,
            report,
            heartbeat_id,
        )
        self._next_check_at, self._last_check_at, self._reachable_since = -math.inf, -math.inf, math.inf
        self._state = _SearchState()

    def check(self) -> None:
        """Advance all searches by a bounded amount of work; raises the database's errors."""
        now = self._runtime.monotonic()
        heartbeat_id = self._heartbeat_id()
        if now < self._next_check_at or heartbeat_id is None:
            return
        self._next_check_at = now + _CHECK_SECONDS
        if now - self._last_check_at > _MAX_GAP_SECONDS:
            self._reachable_since = now
        try:
            processes = self._store.transact_once(lambda tx: inventories.register_searcher(tx, heartbeat_id))
            if not _is_oldest_searcher(heartbeat_id, processes):
                self._state = _SearchState()
            else:
                self._advance_searches(heartbeat_id, processes, now)
        except Exception:
            self._last_check_at = -math.inf
            raise
        self._last_check_at = now

    def _advance_searches(self, heartbeat_id: str, processes: Sequence[ProcessRow], now: float) -> None:
        state = self._state
        if state.lost:
            self._report_lost(*state.lost.pop(0))
            return
        workers = [process for process in processes if process.is_worker and not _is_dead(process, processes)]
        self._schedule_full_scan(frozenset(process.id for process in workers), now)
        observations = Observations(
            [
                Worker(each.queues, each.answered, each.held, each.pool in _POOLS_THAT_RUN_BODIES_IN_MAIN_LOOP)
                for each in workers
            ],
            frozenset().union(*(process.received_markers for process in workers)),
            now - self._reachable_since,
        )
        needing_inventory = [
            destination
            for destination, each in list(state.searches.items())
            if self._advance_search(destination, each, observations, now)
        ]
        if needing_inventory:
            self._request_inventory(heartbeat_id, needing_inventory, now)
        for scan, repeat_seconds in ((state.full_scan, math.inf), (state.periodic_scan, _PERIODIC_SCAN_SECONDS)):
            if now >= scan.due_at:
                self._start_searches(scan, now, repeat_seconds)
                break

    def _schedule_full_scan(self, living: frozenset[str], now: float) -> None:
        """Schedule a scan of all sent tasks if a worker has died or a new worker has started."""
        state, known_workers = self._state, self._state.known_workers
        state.known_workers = living
        if known_workers is None or known_workers - living:
            state.last_death_at = now
            state.full_scan.due_at, state.full_scan.after = now, None
        elif living - known_workers:
            state.full_scan.due_at, state.full_scan.after = min(state.full_scan.due_at, now + _NEW_WORKER_SECONDS), None

    # --- start a search -------------------------------------------------------------------------

    def _start_searches(self, scan: _Scan, now: float, repeat_seconds: float) -> None:
        """Read a page of sent tasks, and start a search for each destination of these tasks.

        ``repeat_seconds``: when a periodic scan is due again; infinite for a full scan.
        """
        age = timedelta(seconds=scan.age_seconds)
        page = self._store.read(lambda tx: lost_tasks.read_sent(tx, age=age, after=scan.after, limit=_PAGE_SIZE))
        scan.after = page.next
        # A periodic scan reads one page each time. A full scan reads the next page soon, and none after the last one.
        is_periodic = repeat_seconds < math.inf
        scan.due_at = now + (repeat_seconds if is_periodic or page.next is None else _CHECK_SECONDS)
        candidates = self._store.read(lambda tx: lost_tasks.exclude_unsent(tx, page.tasks)) if page.tasks else []
        for destination, tasks in self._group_by_destination(candidates).items():
            if (active := self._state.searches.get(destination)) is not None:
                active.has_successor |= any(active.tasks.get(task.id) != task for task in tasks)
                continue
            if now < self._state.paused_until.get(destination.queue, -math.inf):
                continue
            by_id = {task.id: task for task in tasks}
            search = Search(destination.queue, frozenset(by_id), self._runtime.new_token())
            active = self._state.searches[destination] = _ActiveSearch(search, by_id, now)
            self._send_marker(destination, active, now)

    def _group_by_destination(self, candidates: Sequence[SentTask]) -> dict[Destination, list[SentTask]]:
        """Group tasks by destination; all tasks of a step have the destination of its first one."""
        steps: dict[tuple[int, int, str], list[SentTask]] = {}
        for task in candidates:
            steps.setdefault(task.key[:3], []).append(task)
        first = [tasks[0] for tasks in steps.values()]
        bodies = self._store.read(lambda tx: lost_tasks.read_bodies(tx, first)) if first else {}
        found: dict[Destination, list[SentTask]] = {}
        for tasks in steps.values():
            body = bodies.get(tasks[0].key)
            destination = None if body is None else self._messages.destination(body)
            if destination is not None:
                found.setdefault(destination, []).extend(tasks)
        return found

    def _send_marker(self, destination: Destination, active: _ActiveSearch, now: float) -> None:
        if self._messages.send_marker(active.search.marker, destination):
            active.marker_sent_at, active.markers_sent = now, active.markers_sent + 1

    # --- advance a search -----------------------------------------------------------------------

    def _advance_search(
        self, destination: Destination, active: _ActiveSearch, observations: Observations, now: float
    ) -> bool:
        """Advance one search as far as possible; returns True if it needs an inventory."""
        active.search, action = detection.decide(
            active.search,
            observations,
            next_marker=self._runtime.new_token(),
            waited_seconds=now - active.inventory_requested_at,
        )
        match action:
            case RequestInventory():
                return True
            case SendMarker():
                active.markers_sent = 0
                self._send_marker(destination, active, now)
            case Wait():
                self._check_marker(destination, active, now)
            case Abandon(why):
                self._end_search(destination, active, now)
                logger.debug("The dispatcher cannot search for lost tasks of queue %r: %s", destination.queue, why)
                if now - self._state.last_death_at < _RECENT_DEATH_SECONDS:
                    self._state.full_scan.due_at = min(self._state.full_scan.due_at, now + _RETRY_SECONDS)
            case ReportLost(lost):
                self._end_search(destination, active, now)
                tasks = [active.tasks[id_] for id_ in sorted(lost)]
                for start in range(0, len(tasks), _REPORT_BATCH_SIZE):
                    self._state.lost.append((destination.queue, tasks[start : start + _REPORT_BATCH_SIZE]))
        return False

    def _end_search(self, destination: Destination, active: _ActiveSearch, now: float) -> None:
        del self._state.searches[destination]
        if active.started_at < self._state.last_death_at:  # a worker died during the search: scan all sent tasks again
            self._state.full_scan.due_at, self._state.full_scan.after = now, None
        elif active.has_successor:
            self._state.periodic_scan.due_at, self._state.periodic_scan.after = now, None

    def _request_inventory(self, heartbeat_id: str, searching: Sequence[Destination], now: float) -> None:
        number = self._store.transact_once(lambda tx: inventories.start_inventory(tx, heartbeat_id))
        for destination in searching if number is not None else ():
            active = self._state.searches[destination]
            active.search, active.inventory_requested_at = (
                detection.with_inventory_request(active.search, number or 0),
                now,
            )

    def _check_marker(self, destination: Destination, active: _ActiveSearch, now: float) -> None:
        """Send the marker again if the broker did not take it, or if its queue is empty."""
        if active.search.stage is not detection.Stage.MARKER or now - active.marker_sent_at < _MARKER_CHECK_SECONDS:
            return
        is_sent = active.marker_sent_at > -math.inf
        if is_sent and self._messages.queue_length(destination.queue) != 0:
            active.marker_sent_at = now  # check the queue again later
        elif active.markers_sent < _MAX_MARKERS:
            self._send_marker(destination, active, now)
        else:
            self._end_search(destination, active, now)
            self._state.paused_until[destination.queue] = now + _QUEUE_PAUSE_SECONDS
            logger.warning(
                "Another application seems to consume queue %r too, since the search's markers disappear. A task "
                "that is lost there waits for its timeout",
                destination.queue,
            )

    def _report_lost(self, queue: str, tasks: Sequence[SentTask]) -> None:
        # Only the report shows which of them are lost: others were answered while the search ran.
        if found := self._report(tasks):
            logger.warning(
                "%d tasks of queue %r are lost: no worker holds them and no message is left. Each is sent again or "
                "fails with TaskLost",
                found,
                queue,
            )


def _is_dead(process: ProcessRow, processes: Sequence[ProcessRow]) -> bool:
    """Whether a process is dead: silent for `SILENT_AFTER`, or for `REPLACED_AFTER` if it has a successor.

    A successor is a process that started later under the same node name and was seen more recently.
    """
    if process.since_seen >= SILENT_AFTER:
        return True
    successors = [other for other in processes if other.node == process.node and other.started_at > process.started_at]
    return process.since_seen >= REPLACED_AFTER and any(other.since_seen < process.since_seen for other in successors)


def _is_oldest_searcher(heartbeat_id: str, processes: Sequence[ProcessRow]) -> bool:
    """Whether this process is the oldest living dispatcher that searches.

    Two dispatchers may both be the oldest for a moment. Then both search, which does no harm.
    """
    searching = [
        process for process in processes if process.inventory is not None and process.since_seen < SILENT_AFTER
    ]
    return bool(searching) and min(searching, key=lambda process: (process.started_at, process.id)).id == heartbeat_id
