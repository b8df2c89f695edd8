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
from celery_durable.store.inventories import REPLACED, SILENT, Peer
from celery_durable.store.lost_tasks import Place, SentTask
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

_LOOK_SECONDS = 1.0
_GAP_SECONDS = 10.0
"""The longest time between two calls of `look`; after more, the database or this process may have been down."""
_SLOW_SECONDS = 60.0
_NEW_WORKER_SECONDS = 5.0
"""The time after which a worker that has just started consumes its queues."""
_AGAIN_SECONDS = 5.0
"""When to search again after an abandoned search, while a worker's death is recent."""
_RECENT_SECONDS = 600.0
_PAGE = 10_000
_REPORTS = 50
"""How many lost tasks one transaction reports; each call of `look` runs one."""
_VANISHED_SECONDS = 10.0
"""A marker that no worker has reported for this long, and whose queue is empty, is gone."""
_MARKERS = 3
"""After this many lost markers, another application seems to consume them: the queue is not searched for a while."""
_LEFT_ALONE_SECONDS = 600.0
_LOOPS_THAT_RUN_BODIES = ("solo", None)
"""The pools whose main loop runs the bodies of tasks, as heartbeats name them; None: not known."""
WHY = "no worker holds it, and its message is gone"


@dataclass(frozen=True, slots=True)
class Destination:
    """The queue and the priority of a task's messages."""

    queue: str
    priority: int = 0


class MessageBroker(Protocol):
    """The operations of Celery that the search needs."""

    def destination(self, body: str) -> Destination | None:
        """The destination of a stored task's message; None if no queue is known."""

    def send_marker(self, id_: str, to: Destination) -> bool:
        """Send a marker; returns False if the broker did not take it."""

    def queue_length(self, queue: str) -> int | None:
        """How many messages wait in the queue; None if unknown."""


@dataclass(slots=True)
class _ActiveSearch:
    """A search that is running; ``marked_at`` and ``called_at`` are times of this process's steady clock.

    ``has_successor``: after the search started, a scan found tasks that it does not cover.
    """

    search: Search
    tasks: dict[str, SentTask]
    begun_at: float
    marked_at: float = -math.inf
    called_at: float = 0.0
    markers: int = 0
    has_successor: bool = False


@dataclass(slots=True)
class _Scan:
    """When to scan for candidates next: tasks sent at least ``age_seconds`` ago, from the position ``after`` on."""

    at: float
    age_seconds: float
    after: Place | None = None


@dataclass(slots=True)
class _State:
    searches: dict[Destination, _ActiveSearch] = field(default_factory=dict)
    left_alone: dict[str, float] = field(default_factory=dict)
    lost: list[SentTask] = field(default_factory=list)
    known: frozenset[str] | None = None
    death_at: float = -math.inf
    slow: _Scan = field(default_factory=lambda: _Scan(-math.inf, _SLOW_SECONDS))
    full: _Scan = field(default_factory=lambda: _Scan(math.inf, 0.0))


class LostTasks:
    """Finds lost tasks; of several dispatchers, the oldest one searches.

    ``row`` returns the id of this process's heartbeat row.
    """

    def __init__(
        self,
        store: Store,
        runtime: Runtime,
        messages: MessageBroker,
        report: Callable[[Sequence[SentTask]], int],
        *,
        row: Callable[[], str | None],
    ) -> None:
        self._store, self._runtime, self._messages, self._report, self._row = store, runtime, messages, report, row
        self._look_at, self._looked_at, self._seen_from = -math.inf, -math.inf, math.inf
        self._state = _State()

    def look(self) -> None:
        """Advance all searches by a bounded amount of work; raises the database's errors."""
        now = self._runtime.monotonic()
        row = self._row()
        if now < self._look_at or row is None:
            return
        self._look_at = now + _LOOK_SECONDS
        if now - self._looked_at > _GAP_SECONDS:
            self._seen_from = now
        try:
            peers = self._store.transact_once(lambda tx: inventories.stand(tx, row))
            if not _is_first(row, peers):
                self._state = _State()
            else:
                self._go_on(row, peers, now)
        except Exception:
            self._looked_at = -math.inf
            raise
        self._looked_at = now

    def _go_on(self, row: str, peers: Sequence[Peer], now: float) -> None:
        state = self._state
        if state.lost:
            part, state.lost = state.lost[:_REPORTS], state.lost[_REPORTS:]
            self._report_lost(part)
            return
        workers = [peer for peer in peers if peer.is_worker and not _is_dead(peer, peers)]
        self._notice(frozenset(peer.id for peer in workers), now)
        facts = Observations(
            [Worker(each.queues, each.answered, each.held, each.pool in _LOOPS_THAT_RUN_BODIES) for each in workers],
            frozenset().union(*(peer.received_markers for peer in workers)),
            now - self._seen_from,
        )
        wants_roll = [to for to, each in list(state.searches.items()) if self._advance(to, each, facts, now)]
        if wants_roll:
            self._call(row, wants_roll, now)
        for due, every in ((state.full, math.inf), (state.slow, _SLOW_SECONDS)):
            if now >= due.at:
                self._begin(due, now, every)
                break

    def _notice(self, living: frozenset[str], now: float) -> None:
        """Schedule a scan of all sent tasks if a worker has died or a new worker has started."""
        state, known = self._state, self._state.known
        state.known = living
        if known is None or known - living:
            state.death_at = now
            state.full.at, state.full.after = now, None
        elif living - known:
            state.full.at, state.full.after = min(state.full.at, now + _NEW_WORKER_SECONDS), None

    # --- start a search -------------------------------------------------------------------------

    def _begin(self, due: _Scan, now: float, every: float) -> None:
        """Read a page of sent tasks, and start a search for each destination of these tasks."""
        age = timedelta(seconds=due.age_seconds)
        page = self._store.read(lambda tx: lost_tasks.read_sent(tx, age=age, after=due.after, limit=_PAGE))
        due.after = page.next
        due.at = now + (every if page.next is None or every < math.inf else _LOOK_SECONDS)
        candidates = self._store.read(lambda tx: lost_tasks.left_outbox(tx, page.tasks)) if page.tasks else []
        for to, tasks in self._by_destination(candidates).items():
            if (under_way := self._state.searches.get(to)) is not None:
                under_way.has_successor |= any(under_way.tasks.get(task.id) != task for task in tasks)
                continue
            if now < self._state.left_alone.get(to.queue, -math.inf):
                continue
            by_id = {task.id: task for task in tasks}
            search = Search(to.queue, frozenset(by_id), self._runtime.new_token())
            opened = self._state.searches[to] = _ActiveSearch(search, by_id, now)
            self._mark(to, opened, now)

    def _by_destination(self, candidates: Sequence[SentTask]) -> dict[Destination, list[SentTask]]:
        """Group tasks by destination; all tasks of a step have the destination of its first one."""
        steps: dict[tuple[int, int, str], list[SentTask]] = {}
        for task in candidates:
            steps.setdefault(task.key[:3], []).append(task)
        first = [tasks[0] for tasks in steps.values()]
        bodies = self._store.read(lambda tx: lost_tasks.read_bodies(tx, first)) if first else {}
        found: dict[Destination, list[SentTask]] = {}
        for tasks in steps.values():
            body = bodies.get(tasks[0].key)
            to = None if body is None else self._messages.destination(body)
            if to is not None:
                found.setdefault(to, []).extend(tasks)
        return found

    def _mark(self, to: Destination, opened: _ActiveSearch, now: float) -> None:
        if self._messages.send_marker(opened.search.marker, to):
            opened.marked_at, opened.markers = now, opened.markers + 1

    # --- advance a search -----------------------------------------------------------------------

    def _advance(self, to: Destination, opened: _ActiveSearch, facts: Observations, now: float) -> bool:
        """Advance one search as far as possible; returns True if it needs an inventory."""
        opened.search, action = detection.advance(
            opened.search, facts, next_marker=self._runtime.new_token(), waited_seconds=now - opened.called_at
        )
        match action:
            case RequestInventory():
                return True
            case SendMarker():
                opened.markers = 0
                self._mark(to, opened, now)
            case Wait():
                self._look_after_marker(to, opened, now)
            case Abandon(why):
                self._end(to, opened, now)
                logger.debug("Tasks of queue %r cannot be searched for: %s", to.queue, why)
                if now - self._state.death_at < _RECENT_SECONDS:
                    self._state.full.at = min(self._state.full.at, now + _AGAIN_SECONDS)
            case ReportLost(lost):
                self._end(to, opened, now)
                if lost:
                    logger.warning("%d tasks of queue %r are in nobody's hands, and are lost", len(lost), to.queue)
                self._state.lost += [opened.tasks[id_] for id_ in sorted(lost)]
        return False

    def _end(self, to: Destination, opened: _ActiveSearch, now: float) -> None:
        del self._state.searches[to]
        if opened.begun_at < self._state.death_at:  # a worker died during the search: scan all sent tasks again
            self._state.full.at, self._state.full.after = now, None
        elif opened.has_successor:
            self._state.slow.at, self._state.slow.after = now, None

    def _call(self, row: str, searching: Sequence[Destination], now: float) -> None:
        number = self._store.transact_once(lambda tx: inventories.call(tx, row))
        for to in searching if number is not None else ():
            opened = self._state.searches[to]
            opened.search, opened.called_at = detection.with_inventory_request(opened.search, number or 0), now

    def _look_after_marker(self, to: Destination, opened: _ActiveSearch, now: float) -> None:
        """Send the marker again if the broker did not take it, or if its queue is empty."""
        if opened.search.stage is not detection.Stage.MARKER or now - opened.marked_at < _VANISHED_SECONDS:
            return
        is_out = opened.marked_at > -math.inf
        if is_out and self._messages.queue_length(to.queue) != 0:
            opened.marked_at = now  # check the queue again later
        elif opened.markers < _MARKERS:
            self._mark(to, opened, now)
        else:
            self._end(to, opened, now)
            self._state.left_alone[to.queue] = now + _LEFT_ALONE_SECONDS
            logger.warning(
                "Queue %r is consumed by another application too, which takes our markers: tasks that are lost there "
                "wait for their timeout",
                to.queue,
            )

    def _report_lost(self, lost: Sequence[SentTask]) -> None:
        found = self._report(lost)
        logger.warning("%d of %d lost tasks were still awaited: sent again, or ended as TaskLost", found, len(lost))


def _is_dead(peer: Peer, peers: Sequence[Peer]) -> bool:
    """Whether a process was silent for too long, or a newer process with its node name is more recently seen."""
    if peer.since_seen >= SILENT:
        return True
    after = [other for other in peers if other.node == peer.node and other.started_at > peer.started_at]
    return peer.since_seen >= REPLACED and any(other.since_seen < peer.since_seen for other in after)


def _is_first(row: str, peers: Sequence[Peer]) -> bool:
    """Whether this process is the oldest living dispatcher that searches.

    Two dispatchers may both be the oldest for a moment. Then both search, which does no harm.
    """
    searching = [peer for peer in peers if peer.inventory is not None and peer.since_seen < SILENT]
    return bool(searching) and min(searching, key=lambda peer: (peer.started_at, peer.id)).id == row
