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
MIN_REACHABLE_SECONDS = 30.0
"""For how long the database must have been reachable without a gap: an outage makes all heartbeats stale at once."""
SOLO_ANSWER_SECONDS = 60.0
"""How long to wait for a solo worker that does not consume the queue; it may run a task's body for hours."""
STUCK_LOOP_SECONDS = 20.0
"""How long to wait for a worker whose main loop runs no task bodies.

After that time its loop is stuck, although its heartbeat continues. Otherwise the tasks that the loop has received, but
not given to the pool, would wait for their timeout.
"""


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker whose heartbeat is fresh.

    ``answered``: the newest inventory that the worker has answered; 0 if none yet, None if it has not begun to answer.
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

    ``received_markers``: the markers that a worker has received. ``reachable_seconds``: for how
    long the database has been reachable without a gap.
    """

    workers: Sequence[Worker]
    received_markers: frozenset[str]
    reachable_seconds: float


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


def decide(
    search: Search, observations: Observations, *, next_marker: str, waited_seconds: float = 0.0
) -> tuple[Search, Action]:
    """Decide what a search does next; returns the changed search and the action.

    ``next_marker``: an id for a second marker. ``waited_seconds``: the time since the inventory was requested.
    """
    consumers = [worker for worker in observations.workers if search.queue in worker.queues]
    if not consumers:
        return search, Abandon("no living worker consumes the queue")
    if any(worker.answered is None for worker in consumers):
        return search, Abandon("a worker that consumes the queue does not answer inventories yet")
    if search.stage is Stage.MARKER:
        if search.marker in observations.received_markers:
            return search, RequestInventory()
        return search, Wait("the marker is in the queue")
    return _evaluate_inventory(search, observations, next_marker, waited_seconds)


def with_inventory_request(search: Search, inventory: int) -> Search:
    """The search after the inventory with this number was requested."""
    return replace(search, stage=Stage.INVENTORY, inventory=inventory)


def _evaluate_inventory(
    search: Search, observations: Observations, next_marker: str, waited_seconds: float
) -> tuple[Search, Action]:
    if observations.reachable_seconds < MIN_REACHABLE_SECONDS:
        return search, Wait("the database has been reachable for less than 30 s, so heartbeats may be old")
    reported = [
        worker for worker in observations.workers if worker.answered is not None and worker.answered >= search.inventory
    ]
    missing = [worker for worker in observations.workers if worker not in reported and worker.answered is not None]
    late = [worker for worker in missing if waited_seconds < _max_wait_seconds(worker, search.queue)]
    if late:
        return search, Wait(f"{len(late)} workers have not answered")
    unaccounted = search.candidates.difference(*(worker.held for worker in reported))
    if not unaccounted or search.round == ROUNDS:
        return search, ReportLost(unaccounted)
    next_round = replace(search, candidates=unaccounted, marker=next_marker, stage=Stage.MARKER, round=search.round + 1)
    return next_round, SendMarker()


def _max_wait_seconds(worker: Worker, queue: str) -> float:
    """For how many seconds to wait for a worker's answer."""
    if not worker.runs_bodies:
        return STUCK_LOOP_SECONDS
    return math.inf if queue in worker.queues else SOLO_ANSWER_SECONDS
