"""What a dispatcher knows of the queues that it feeds: how much each may get, when it was empty, whether it refuses.

Priority lives in SQL, not behind a long queue: while its workers lag behind, work waits where it is sorted. A queue
that is full, or that refuses, is not looked at in SQL either: what waits for it costs nothing, however much it is.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from celery_durable.config import Settings
from celery_durable.model import DueRun
from celery_durable.redispatch import SLACK, QueueProgress
from celery_durable.runtime import Runtime
from celery_durable.tasks.publishing import PublishReport, SendState

QUEUE_LENGTH_TTL_SECONDS = 1.0
"""How old an answer about a queue's length may be: over Redis the question takes milliseconds."""
_MAX_BACKOFF_SECONDS = 60.0
_PROBE = 10
"""So many rows are offered to a broker, or to a queue, that took nothing the last time."""


@dataclass(slots=True)
class _Queue:
    """One queue. All but the moments at which it was ``empty`` are of this process's steady clock."""

    remaining: float = 0.0
    length_check_at: float = -math.inf
    lost_check_at: float = -math.inf
    backoff_until: float = -math.inf
    backoff: float = 0.0
    empty: list[datetime] = field(default_factory=list)

    def record_empty(self, at: datetime, slack: timedelta) -> None:
        """It was seen empty, at a moment of the database's time."""
        self.empty.append(at)
        self.empty_times(at, slack)

    def empty_times(self, now: datetime, slack: timedelta) -> tuple[datetime | None, datetime | None]:
        """The newest moment that is ``slack`` old, and the oldest that is not; what is older is forgotten.

        All that are younger are kept, a few since each costs a question: with fewer, a hint that was sent just after
        one of them would wait for the next but one.
        """
        known = [at for at in self.empty if at <= now]  # not what is of a clock that has been set back
        old = [at for at in known if at + slack <= now][-1:]
        young = [at for at in known if at + slack > now]
        self.empty = old + young
        return (old[0] if old else None), (young[0] if young else None)


@dataclass(slots=True)
class FlowControl:
    """All queues of one dispatcher, and the broker as a whole."""

    settings: Settings
    runtime: Runtime
    queue_length: Callable[[str], int | None]
    slack: timedelta = SLACK
    """How old the sight of an empty queue is before it counts."""
    _queues: dict[str, _Queue] = field(default_factory=dict)
    _unavailable_until: float = -math.inf
    _is_unavailable: bool = False

    def _queue(self, name: str) -> _Queue:
        return self._queues.setdefault(name, _Queue())

    @property
    def broker_backoff(self) -> float:
        """How many seconds the broker is left alone, since it took nothing; 0: it may be tried."""
        return max(0.0, self._unavailable_until - self.runtime.monotonic())

    @property
    def batch_limit(self) -> int:
        """How many rows a turn may look at: a few, until the broker takes one again."""
        return _PROBE if self._is_unavailable else self.settings.sweep_batch

    def capacity(self, name: str, now: datetime) -> float:
        """How many messages a queue may get now. ``now``: the database's time, read before."""
        queue = self._queue(name)
        steady = self.runtime.monotonic()
        if steady < queue.backoff_until:
            return 0
        if steady >= queue.length_check_at:
            length = self.queue_length(name)
            queue.remaining = math.inf if length is None else self.settings.queue_high_water - length
            queue.length_check_at = steady + QUEUE_LENGTH_TTL_SECONDS
            if length == 0:
                queue.record_empty(now, self.slack)
        remaining = max(queue.remaining, 0)
        return min(remaining, _PROBE) if queue.backoff else remaining

    def queue_backoff(self, name: str) -> float:
        """How many seconds a queue gets nothing, whatever is due; 0: it may be asked."""
        queue, now = self._queue(name), self.runtime.monotonic()
        full = queue.length_check_at - now if queue.remaining <= 0 and queue.length_check_at > now else 0.0
        return max(full, queue.backoff_until - now, 0.0)

    def progress(self, name: str, now: datetime, claimed: datetime | None) -> QueueProgress:
        """How far a queue has come, by what this dispatcher saw and by what workers ``claimed`` from it."""
        empty, empty_lately = self._queue(name).empty_times(now, self.slack)
        return QueueProgress(claimed, empty, empty_lately)

    # --- lost hints -----------------------------------------------------------------------------

    def lost_check_in(self, name: str) -> float:
        """In how many seconds to look for lost hints of a queue."""
        return max(0.0, self._queue(name).lost_check_at - self.runtime.monotonic())

    def lost_check_done(self, name: str, *, is_over: bool) -> None:
        """Lost hints were looked for; ``is_over`` False: there may be more."""
        self._queue(name).lost_check_at = self.runtime.monotonic() + QUEUE_LENGTH_TTL_SECONDS if is_over else -math.inf

    # --- what became of messages ----------------------------------------------------------------

    def broker_unavailable(self) -> None:
        """The broker took nothing: leave it alone for a while."""
        self._is_unavailable, self._unavailable_until = True, self.runtime.monotonic() + QUEUE_LENGTH_TTL_SECONDS

    def record(self, due_runs: Sequence[DueRun], report: PublishReport) -> dict[timedelta, list[DueRun]]:
        """Learn from what became of these; returns what was not sent, by the time after which to offer it again."""
        again: dict[timedelta, list[DueRun]] = {}
        if unsent := report.with_state(due_runs, SendState.UNSENT):
            self.broker_unavailable()
            again[timedelta(seconds=QUEUE_LENGTH_TTL_SECONDS)] = unsent
        else:
            self._is_unavailable = False
        refused = report.with_state(due_runs, SendState.REFUSED)
        sent = Counter(due.queue for due in report.with_state(due_runs, SendState.SENT, SendState.UNKNOWN))
        for name, count in sent.items():
            queue = self._queue(name)
            queue.backoff, queue.remaining = 0.0, queue.remaining - count
            if queue.remaining <= 0:
                queue.length_check_at = -math.inf
        for name in {due.queue for due in refused}:
            queue = self._queue(name)
            queue.backoff = min(max(1.0, 2 * queue.backoff), _MAX_BACKOFF_SECONDS)
            queue.backoff_until = self.runtime.monotonic() + queue.backoff
            backoff = timedelta(seconds=queue.backoff)
            again.setdefault(backoff, []).extend(due for due in refused if due.queue == name)
        return again
