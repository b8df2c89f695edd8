"""When to send a hint again: the watermark rule, as a pure function of what is known about a queue.

A queue is first in, first out. If a hint that was sent later has been claimed, an unclaimed hint that was sent earlier
is lost. If the queue is empty, every unclaimed hint that was sent before is lost. A long queue proves nothing: its
hints wait behind other messages, and a second copy would only make it longer.

A wrong guess costs one superfluous message, which changes nothing (LAW 1). A missed one costs time, so a hint is always
sent again after ``longest``. All times are the database's (LAW 4).
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

SLACK = timedelta(seconds=3)
"""How long a worker may hold a hint between the queue and its claim, since workers prefetch several messages."""
MIN_LOST_AGE = timedelta(seconds=5)
"""The minimum age of a hint before an empty queue means that it is lost. It doubles with each further copy."""
_MAX_DOUBLINGS = 10


@dataclass(frozen=True, slots=True)
class QueueProgress:
    """What is known about the progress of a queue; None: nothing.

    ``claimed``: the newest sending time among the hints that were claimed at least `SLACK` ago. ``empty``: a time at
    least `SLACK` ago when the queue was empty; a single sweep also uses the present. ``empty_lately``: a time when the
    queue was empty that is more recent than `SLACK`.
    """

    claimed: datetime | None = None
    empty: datetime | None = None
    empty_lately: datetime | None = None


NOTHING_KNOWN = QueueProgress()


@dataclass(frozen=True, slots=True)
class Redispatch:
    """The rule with its settings.

    ``first``: how long a run rests that a tick took, before it is offered again. It doubles up to ``longest``.
    """

    first: timedelta
    longest: timedelta

    def after(self, dispatches: int) -> timedelta:
        """How long a run rests after a tick took it for the ``dispatches``-th time."""
        return min(self.first * (1 << min(max(dispatches - 1, 0), 30)), self.longest)

    def min_age(self, dispatches: int) -> timedelta:
        """The minimum age of a hint before an empty queue means that it is lost.

        A worker without a prefetch limit empties the queue into its memory. Without the doubling, a copy would be sent
        every few seconds while that worker is busy.
        """
        return min(MIN_LOST_AGE * (1 << min(max(dispatches - 1, 0), _MAX_DOUBLINGS)), self.longest)

    def is_lost(self, sent_at: datetime, dispatches: int, progress: QueueProgress, now: datetime) -> bool:
        """Whether an unclaimed hint that was sent at ``sent_at`` is lost and must be sent again."""
        age = now - sent_at
        if age >= self.longest or (progress.claimed is not None and sent_at < progress.claimed):
            return True
        return progress.empty is not None and sent_at < progress.empty and age >= self.min_age(dispatches)

    def lost_before(self, progress: QueueProgress, now: datetime) -> datetime:
        """The time before which a hint must have been sent to be lost: no later hint is."""
        too_old = now - self.longest + timedelta(microseconds=1)  # a hint of exactly this age is lost already
        return max([too_old, *(at for at in (progress.claimed, progress.empty) if at is not None)])

    def next_check_at(self, sent_at: datetime, dispatches: int, progress: QueueProgress) -> datetime:
        """When to check again a hint that is not lost now, if nothing more becomes known about its queue."""
        empties = [at for at in (progress.empty, progress.empty_lately) if at is not None and sent_at < at]
        last = sent_at + self.longest
        if not empties:
            return last
        return min(last, max(sent_at + self.min_age(dispatches), min(empties) + SLACK))
