"""Detection of lost tasks by elimination: a sent task is lost if no worker holds it and no queue contains it.

No row says which worker holds a task: that would cost a commit for each task that starts. Instead, a dispatcher sends
a marker to the queue, behind the tasks' messages. When a worker has received the marker, all messages before it were
received too. So each task is held by a worker, or has ended, or is lost. Then the dispatcher requests an inventory:
each living worker lists the tasks that it holds.

The marker and the inventory are repeated once before a task counts as lost. A message may be unread in a worker's
socket when the worker answers the first inventory. And a broker may put a returned message behind the first marker.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto

ROUNDS = 2
SEEN_SECONDS = 30.0
"""For how long the database must have been reachable without a gap: an outage makes all heartbeats stale at once."""
IDLE_SECONDS = 60.0
"""How long to wait for a solo worker that does not consume the queue; it may run a task's body for hours."""
UNRESPONSIVE_SECONDS = 20.0
"""How long to wait for a worker whose main loop runs no task bodies.

After that time its loop is stuck, although its heartbeat goes on. Otherwise the tasks that the loop has received, but
not given to the pool, would wait for their timeout.
"""


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker whose heartbeat is fresh.

    ``answered``: the newest inventory that the worker has answered; 0 if none yet, None if it cannot answer any.
    ``held``: the ids of the tasks in that answer. ``runs_bodies``: the worker's main loop runs the bodies of tasks (the
    solo pool), so the worker may answer hours later.
    """

    queues: frozenset[str]
    answered: int | None
    held: frozenset[str] = frozenset()
    runs_bodies: bool = False


@dataclass(frozen=True, slots=True)
class Observations:
    """What the dispatcher knows now.

    ``received_markers``: the markers that a worker has received. ``seen_seconds``: for how long the database has been
    reachable without a gap.
    """

    workers: Sequence[Worker]
    received_markers: frozenset[str]
    seen_seconds: float


class Stage(Enum):
    """The event that a search waits for."""

    MARKER = auto()
    INVENTORY = auto()


@dataclass(frozen=True, slots=True)
class Search:
    """A search for lost tasks among those that were sent to one queue with one priority.

    ``candidates``: the ids of the tasks that may be lost; all had left the outbox before the first marker was sent.
    """

    queue: str
    candidates: frozenset[str]
    marker: str
    stage: Stage = Stage.MARKER
    round: int = 1
    inventory: int = 0


@dataclass(frozen=True, slots=True)
class SendMarker:
    """Send the search's new marker to its queue."""


@dataclass(frozen=True, slots=True)
class RequestInventory:
    """Request an inventory: a worker has received the search's marker."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Do nothing yet. ``why``: the reason, for the log."""

    why: str


@dataclass(frozen=True, slots=True)
class Abandon:
    """End the search without a result: the candidates wait for their timeout."""

    why: str


@dataclass(frozen=True, slots=True)
class ReportLost:
    """Report these tasks as lost; the search is over."""

    lost: frozenset[str]


Action = SendMarker | RequestInventory | Wait | Abandon | ReportLost


def advance(
    search: Search, facts: Observations, *, next_marker: str, waited_seconds: float = 0.0
) -> tuple[Search, Action]:
    """The search after this step, and the next action.

    ``next_marker``: an id for a second marker. ``waited_seconds``: the time since the inventory was requested.
    """
    consumers = [worker for worker in facts.workers if search.queue in worker.queues]
    if not consumers:
        return search, Abandon("no living worker consumes the queue")
    if any(worker.answered is None for worker in consumers):
        return search, Abandon("a worker that consumes the queue cannot answer an inventory")
    if search.stage is Stage.MARKER:
        if search.marker in facts.received_markers:
            return search, RequestInventory()
        return search, Wait("the marker is in the queue")
    return _call(search, facts, next_marker, waited_seconds)


def with_inventory_request(search: Search, inventory: int) -> Search:
    """The search after the inventory with this number was requested."""
    return replace(search, stage=Stage.INVENTORY, inventory=inventory)


def _call(search: Search, facts: Observations, next_marker: str, waited_seconds: float) -> tuple[Search, Action]:
    if facts.seen_seconds < SEEN_SECONDS:
        return search, Wait("the database was away, and heartbeats with it")
    here = [worker for worker in facts.workers if worker.answered is not None and worker.answered >= search.inventory]
    missing = [worker for worker in facts.workers if worker not in here and worker.answered is not None]
    late = [worker for worker in missing if waited_seconds < _waits_for(worker, search.queue)]
    if late:
        return search, Wait(f"{len(late)} workers have not answered")
    left = search.candidates.difference(*(worker.held for worker in here))
    if not left or search.round == ROUNDS:
        return search, ReportLost(left)
    again = replace(search, candidates=left, marker=next_marker, stage=Stage.MARKER, round=search.round + 1)
    return again, SendMarker()


def _waits_for(worker: Worker, queue: str) -> float:
    """For how many seconds to wait for a worker's answer."""
    if not worker.runs_bodies:
        return UNRESPONSIVE_SECONDS
    return math.inf if queue in worker.queues else IDLE_SECONDS
