"""Flow control: how many messages each queue may get, when a queue was empty, and whether it refuses messages.

A long queue hides priorities, so work waits in SQL, sorted by priority, while the workers of a queue lag behind. The
dispatcher does not query rows of a queue that is full or refuses messages.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from celery_durable.config import Settings
from celery_durable.model import DueRun
from celery_durable.redispatch import SLACK, QueueProgress
from celery_durable.runtime import Runtime
from celery_durable.tasks.publishing import PublishReport, SendState

RECHECK_SECONDS = 1.0
"""How long the state of a queue or the broker is used: to ask Redis for a length takes milliseconds."""
_UNCLAIMED_CHECK_DELAY = timedelta(seconds=1.5)
"""If a run is not claimed for this long after its dispatch message was sent, its queue's length is read."""
_LOCAL_SECONDS = 0.25
"""The same two for queues in the memory of this process, which cost nothing to count."""
_MAX_BACKOFF_SECONDS = 60.0
_PROBE_LIMIT = 10
"""How many rows are offered to a broker or a queue that took no messages the last time."""


@dataclass(slots=True)
class _QueueState:
    """One queue. The times in ``empty`` are the database's; all other times are of this process's monotonic clock."""

    remaining: float = 0.0
    length_check_at: float = -math.inf
    lost_check_at: float = -math.inf
    backoff_until: float = -math.inf
    backoff: float = 0.0
    empty: list[datetime] = field(default_factory=list)
    is_empty: bool = False
    full_since: datetime | None = None
    """Since when the queue is at the high water mark, by this machine's clock."""

    def record_empty(self, at: datetime, slack: timedelta) -> None:
        self.empty.append(at)
        self._drop_old_times(at, slack)

    def empty_times(self, now: datetime, slack: timedelta) -> tuple[datetime | None, datetime | None]:
        """The newest empty time that is ``slack`` old, and the oldest that is younger; None if there is none."""
        self._drop_old_times(now, slack)
        old = [at for at in self.empty if at + slack <= now]
        young = [at for at in self.empty if at + slack > now]
        return (old[0] if old else None), (young[0] if young else None)

    def _drop_old_times(self, now: datetime, slack: timedelta) -> None:
        """Drop all times that are ``slack`` old, except for the newest of them.

        All younger ones are kept: an empty queue proves nothing about a message that is sent just after it.
        """
        known = [at for at in self.empty if at <= now]  # no time may be later, unless the clock was set back
        old = [at for at in known if at + slack <= now][-1:]
        young = [at for at in known if at + slack > now]
        self.empty = old + young


@dataclass(slots=True)
class FlowControl:
    """The state of all queues of one dispatcher, and of the broker as a whole."""

    settings: Settings
    runtime: Runtime
    queue_length: Callable[[str], int | None]
    slack: timedelta = SLACK
    """How old an observation of an empty queue must be before it counts."""
    _has_local_queues: bool = False
    _queues: dict[str, _QueueState] = field(default_factory=dict)
    _unavailable_until: float = -math.inf
    _is_unavailable: bool = False

    def _queue(self, name: str) -> _QueueState:
        return self._queues.setdefault(name, _QueueState())

    def assume_local_queues(self) -> None:
        """Count an unclaimed message as lost while its queue, in the memory of `durable dev`, is empty."""
        self._has_local_queues = True

    @property
    def unclaimed_check_delay(self) -> timedelta:
        """How long after its dispatch message an unclaimed run makes the dispatcher read the length of its queue."""
        return timedelta(seconds=_LOCAL_SECONDS) if self._has_local_queues else _UNCLAIMED_CHECK_DELAY

    @property
    def _recheck_seconds(self) -> float:
        return _LOCAL_SECONDS if self._has_local_queues else RECHECK_SECONDS

    @property
    def broker_backoff(self) -> float:
        """For how many more seconds nothing is sent, because the broker is down; 0 if sending may be tried."""
        return max(0.0, self._unavailable_until - self.runtime.monotonic())

    @property
    def batch_limit(self) -> int:
        """How many rows a round may read; after an outage only a few, until the broker takes a message again."""
        return _PROBE_LIMIT if self._is_unavailable else self.settings.sweep_batch

    def read_capacity(self, name: str, now: datetime) -> float:
        """How many messages a queue may get now. ``now``, of the database, was read before the broker is asked."""
        queue = self._queue(name)
        monotonic_now = self.runtime.monotonic()
        if monotonic_now < queue.backoff_until:
            return 0
        if monotonic_now >= queue.length_check_at:
            length = self.queue_length(name)
            queue.remaining = math.inf if length is None else self.settings.queue_high_water - length
            queue.length_check_at = monotonic_now + self._recheck_seconds
            queue.is_empty = length == 0
            is_full = queue.remaining <= 0
            queue.full_since = (queue.full_since or self.runtime.wall_clock()) if is_full else None
            if length == 0:
                queue.record_empty(now, self.slack)
        remaining = max(queue.remaining, 0)
        return min(remaining, _PROBE_LIMIT) if queue.backoff else remaining

    def queue_backoff(self, name: str) -> float:
        """For how many more seconds a queue gets no messages; 0 if its capacity may be checked."""
        queue, now = self._queue(name), self.runtime.monotonic()
        full = queue.length_check_at - now if queue.remaining <= 0 and queue.length_check_at > now else 0.0
        return max(full, queue.backoff_until - now, 0.0)

    def full_queues(self) -> dict[str, datetime]:
        """The queues that get no messages because too many wait in them, and since when."""
        return {name: queue.full_since for name, queue in self._queues.items() if queue.full_since is not None}

    def forget_full_queues(self, *, except_for: Collection[str]) -> None:
        """Forget that queues are full, except for those that have work: the length of the others is not read again."""
        for name, queue in self._queues.items():
            if name not in except_for:
                queue.full_since = None

    def build_queue_progress(self, name: str, now: datetime, claimed: datetime | None) -> QueueProgress:
        """Return what is known about how far the workers have consumed a queue.

        ``claimed``: the send time of the newest dispatch message that was claimed at least `SLACK` ago. If the queues
        are in the memory of this process and this one is empty, no message that was sent before ``now`` can arrive. A
        worker of this process that has just taken one gets a superfluous copy.
        """
        empty, empty_lately = self._queue(name).empty_times(now, self.slack)
        gone_before = now if self._has_local_queues and self._queue(name).is_empty else None
        return QueueProgress(claimed, empty, empty_lately, gone_before)

    # --- lost dispatch messages -----------------------------------------------------------------

    def seconds_to_lost_check(self, name: str) -> float:
        """The seconds until the next check for lost dispatch messages of a queue; 0 if it is due."""
        return max(0.0, self._queue(name).lost_check_at - self.runtime.monotonic())

    def record_lost_check(self, name: str, *, is_over: bool) -> None:
        """Record a check for lost dispatch messages; if ``is_over`` is False, the next check follows at once."""
        self._queue(name).lost_check_at = self.runtime.monotonic() + self._recheck_seconds if is_over else -math.inf

    # --- results of publishing -----------------------------------------------------------------

    def record_broker_outage(self) -> None:
        """Record that the broker is down; nothing is sent for the next second."""
        self._is_unavailable, self._unavailable_until = True, self.runtime.monotonic() + RECHECK_SECONDS

    def record_report(self, due_runs: Sequence[DueRun], report: PublishReport) -> dict[timedelta, list[DueRun]]:
        """Record the result of a publish; returns the unsent runs, by the delay after which they are due again."""
        unsent_by_delay: dict[timedelta, list[DueRun]] = {}
        if unsent := report.with_state(due_runs, SendState.UNSENT):
            self.record_broker_outage()
            unsent_by_delay[timedelta(seconds=RECHECK_SECONDS)] = unsent
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
            unsent_by_delay.setdefault(backoff, []).extend(due for due in refused if due.queue == name)
        return unsent_by_delay
