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
from celery_durable.model import Due
from celery_durable.redispatch import SLACK, QueueProgress
from celery_durable.runtime import Runtime
from celery_durable.tasks.publishing import PublishReport, SendState

ASK_SECONDS = 1.0
"""How old an answer about a queue's length may be: over Redis the question takes milliseconds."""
_LONGEST_REST_SECONDS = 60.0
_PROBE = 10
"""So many rows are offered to a broker, or to a queue, that took nothing the last time."""


@dataclass(slots=True)
class _Queue:
    """One queue. All but the moments at which it was ``empty`` are of this process's steady clock."""

    left: float = 0.0
    ask_at: float = -math.inf
    look_at: float = -math.inf
    rest_until: float = -math.inf
    rest: float = 0.0
    empty: list[datetime] = field(default_factory=list)

    def was_empty(self, at: datetime, slack: timedelta) -> None:
        """It was seen empty, at a moment of the database's time."""
        self.empty.append(at)
        self.emptiness(at, slack)

    def emptiness(self, now: datetime, slack: timedelta) -> tuple[datetime | None, datetime | None]:
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
class Flow:
    """All queues of one dispatcher, and the broker as a whole."""

    settings: Settings
    runtime: Runtime
    queue_length: Callable[[str], int | None]
    slack: timedelta = SLACK
    """How old the sight of an empty queue is before it counts."""
    _queues: dict[str, _Queue] = field(default_factory=dict)
    _away_until: float = -math.inf
    _is_away: bool = False

    def _queue(self, name: str) -> _Queue:
        return self._queues.setdefault(name, _Queue())

    @property
    def away_for(self) -> float:
        """How many seconds the broker is left alone, since it took nothing; 0: it may be tried."""
        return max(0.0, self._away_until - self.runtime.monotonic())

    @property
    def most(self) -> int:
        """How many rows a turn may look at: a few, until the broker takes one again."""
        return _PROBE if self._is_away else self.settings.sweep_batch

    def room(self, name: str, now: datetime) -> float:
        """How many messages a queue may get now. ``now``: the database's time, read before."""
        queue = self._queue(name)
        steady = self.runtime.monotonic()
        if steady < queue.rest_until:
            return 0
        if steady >= queue.ask_at:
            length = self.queue_length(name)
            queue.left = math.inf if length is None else self.settings.queue_high_water - length
            queue.ask_at = steady + ASK_SECONDS
            if length == 0:
                queue.was_empty(now, self.slack)
        left = max(queue.left, 0)
        return min(left, _PROBE) if queue.rest else left

    def blocked_for(self, name: str) -> float:
        """How many seconds a queue gets nothing, whatever is due; 0: it may be asked."""
        queue, now = self._queue(name), self.runtime.monotonic()
        full = queue.ask_at - now if queue.left <= 0 and queue.ask_at > now else 0.0
        return max(full, queue.rest_until - now, 0.0)

    def progress(self, name: str, now: datetime, claimed: datetime | None) -> QueueProgress:
        """How far a queue has come, by what this dispatcher saw and by what workers ``claimed`` from it."""
        empty, empty_lately = self._queue(name).emptiness(now, self.slack)
        return QueueProgress(claimed, empty, empty_lately)

    # --- lost hints -----------------------------------------------------------------------------

    def looks_in(self, name: str) -> float:
        """In how many seconds to look for lost hints of a queue."""
        return max(0.0, self._queue(name).look_at - self.runtime.monotonic())

    def has_looked(self, name: str, *, is_over: bool) -> None:
        """Lost hints were looked for; ``is_over`` False: there may be more."""
        self._queue(name).look_at = self.runtime.monotonic() + ASK_SECONDS if is_over else -math.inf

    # --- what became of messages ----------------------------------------------------------------

    def took_none(self) -> None:
        """The broker took nothing: leave it alone for a while."""
        self._is_away, self._away_until = True, self.runtime.monotonic() + ASK_SECONDS

    def note(self, dues: Sequence[Due], report: PublishReport) -> dict[timedelta, list[Due]]:
        """Learn from what became of these; returns what was not sent, by the time after which to offer it again."""
        again: dict[timedelta, list[Due]] = {}
        if unsent := report.with_state(dues, SendState.UNSENT):
            self.took_none()
            again[timedelta(seconds=ASK_SECONDS)] = unsent
        else:
            self._is_away = False
        refused = report.with_state(dues, SendState.REFUSED)
        sent = Counter(due.queue for due in report.with_state(dues, SendState.SENT, SendState.UNKNOWN))
        for name, count in sent.items():
            queue = self._queue(name)
            queue.rest, queue.left = 0.0, queue.left - count
            if queue.left <= 0:
                queue.ask_at = -math.inf
        for name in {due.queue for due in refused}:
            queue = self._queue(name)
            queue.rest = min(max(1.0, 2 * queue.rest), _LONGEST_REST_SECONDS)
            queue.rest_until = self.runtime.monotonic() + queue.rest
            rest = timedelta(seconds=queue.rest)
            again.setdefault(rest, []).extend(due for due in refused if due.queue == name)
        return again
