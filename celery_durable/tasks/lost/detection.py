"""Elimination: which of the tasks that are out are in nobody's hands.

No row says which worker holds a task: that would be a commit for each task that starts. Instead a marker goes through
the queue behind the tasks' messages. When a worker has received it, everything before it was received too, so each
task is held by a worker, or has ended, or is lost. Then every living worker is asked what it holds.

Both are done twice before anything counts as lost. A message may lie unread in a worker's socket when the first roll
call is answered, and a broker may put a returned message behind the first marker.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto

ROUNDS = 2
SEEN_SECONDS = 30.0
"""An outage of the database makes all heartbeats stale at once: so long must it have been seen without a gap."""
IDLE_SECONDS = 60.0
"""So long a worker that does not consume the queue is waited for; it may be in the body of a solo pool for hours."""
UNRESPONSIVE_SECONDS = 20.0
"""So long a worker is waited for whose loop has no bodies to run. Later it is stuck, though its heartbeat goes on: what
it had received but not given to its pool would otherwise wait for its timeout."""


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker whose heartbeat is fresh.

    ``answered``: the newest inventory that it has answered, 0: none yet; None where it cannot answer any. ``held``:
    the ids of the tasks that it held then. ``runs_bodies``: its loop runs them itself (the solo pool), so it may
    answer hours later.
    """

    queues: frozenset[str]
    answered: int | None
    held: frozenset[str] = frozenset()
    runs_bodies: bool = False


@dataclass(frozen=True, slots=True)
class Observations:
    """What is known now. ``passed``: the markers that a worker has received. ``seen_seconds``: of the database."""

    workers: Sequence[Worker]
    received_markers: frozenset[str]
    seen_seconds: float


class Stage(Enum):
    """What a search waits for."""

    MARKER = auto()
    INVENTORY = auto()


@dataclass(frozen=True, slots=True)
class Search:
    """A search for lost tasks among those that were sent to one queue with one priority.

    ``suspects``: their ids; all had left the outbox before the first marker was sent.
    """

    queue: str
    candidates: frozenset[str]
    marker: str
    stage: Stage = Stage.MARKER
    round: int = 1
    inventory: int = 0


@dataclass(frozen=True, slots=True)
class SendMarker:
    """Send the search's marker, which is new, to its queue."""


@dataclass(frozen=True, slots=True)
class RequestInventory:
    """Call the roll: the search has passed its marker."""


@dataclass(frozen=True, slots=True)
class Wait:
    """There is nothing to do yet. ``why``: for the log."""

    why: str


@dataclass(frozen=True, slots=True)
class Abandon:
    """Nothing can be known: the suspects wait for their timeout."""

    why: str


@dataclass(frozen=True, slots=True)
class ReportLost:
    """These are lost; the search is over."""

    lost: frozenset[str]


Action = SendMarker | RequestInventory | Wait | Abandon | ReportLost


def advance(
    search: Search, facts: Observations, *, next_marker: str, waited_seconds: float = 0.0
) -> tuple[Search, Action]:
    """What comes next. ``next_marker``: an id for a further marker. ``waited_seconds``: since the roll was called."""
    consumers = [worker for worker in facts.workers if search.queue in worker.queues]
    if not consumers:
        return search, Abandon("no living worker consumes the queue")
    if any(worker.answered is None for worker in consumers):
        return search, Abandon("a worker that consumes the queue cannot answer a inventory")
    if search.stage is Stage.MARKER:
        if search.marker in facts.received_markers:
            return search, RequestInventory()
        return search, Wait("the marker is in the queue")
    return _call(search, facts, next_marker, waited_seconds)


def with_inventory_request(search: Search, inventory: int) -> Search:
    """The search after the roll was called under this number."""
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
    """For how many seconds a worker's answer is waited for."""
    if not worker.runs_bodies:
        return UNRESPONSIVE_SECONDS
    return math.inf if queue in worker.queues else IDLE_SECONDS
