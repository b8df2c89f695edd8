"""When a hint is sent again: the watermark rule, as a pure function of what is known of a queue.

A queue is first in, first out. If a hint that was sent later has been claimed, a hint that was sent earlier and has
not been claimed is lost. A queue that is empty proves the same of everything that was sent before. A long queue proves
nothing: its hints wait behind other messages, and a second copy would only make it longer.

A wrong guess costs one superfluous message, which changes nothing (LAW 1). A right one that is not made costs time; so
after ``longest`` a hint is sent again whatever is known. All instants are the database's (LAW 4).
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

SLACK = timedelta(seconds=3)
"""How long a worker may hold a hint that it has taken from the queue before it claims: it prefetches several."""
PATIENCE = timedelta(seconds=5)
"""How old a hint is at least before an empty queue makes it lost; doubles with each further copy."""
_MOST_DOUBLINGS = 10


@dataclass(frozen=True, slots=True)
class QueueProgress:
    """How far a queue is known to have come; None: nothing is known.

    ``claimed``: the newest time of sending among hints that were claimed at least `SLACK` ago. ``empty``: a moment at
    least `SLACK` ago at which the queue was seen empty, or just now for who looks only once. ``empty_lately``: such a
    moment that is not as old yet.
    """

    claimed: datetime | None = None
    empty: datetime | None = None
    empty_lately: datetime | None = None


NOTHING_KNOWN = QueueProgress()


@dataclass(frozen=True, slots=True)
class Redispatch:
    """The rule with its settings.

    ``first``: how soon work is offered again that a tick took, doubling up to ``longest``.
    """

    first: timedelta
    longest: timedelta

    def after(self, dispatches: int) -> timedelta:
        """How long to wait after the ``dispatches``-th time that a tick took it."""
        return min(self.first * (1 << min(max(dispatches - 1, 0), 30)), self.longest)

    def min_age(self, dispatches: int) -> timedelta:
        """How old a hint is before an empty queue makes it lost.

        A worker without a prefetch limit empties the queue into its memory: without the doubling a copy would follow
        every few seconds for as long as that worker is busy.
        """
        return min(PATIENCE * (1 << min(max(dispatches - 1, 0), _MOST_DOUBLINGS)), self.longest)

    def is_lost(self, sent_at: datetime, dispatches: int, progress: QueueProgress, now: datetime) -> bool:
        """Whether a hint that was sent then, and that nobody has claimed, is to be sent again."""
        age = now - sent_at
        if age >= self.longest or (progress.claimed is not None and sent_at < progress.claimed):
            return True
        return progress.empty is not None and sent_at < progress.empty and age >= self.min_age(dispatches)

    def lost_before(self, progress: QueueProgress, now: datetime) -> datetime:
        """No hint that was sent at this moment or later is lost."""
        too_old = now - self.longest + timedelta(microseconds=1)  # an age of just this is too old already
        return max([too_old, *(at for at in (progress.claimed, progress.empty) if at is not None)])

    def look_again(self, sent_at: datetime, dispatches: int, progress: QueueProgress) -> datetime:
        """When to look at such a hint again that is not lost yet, should nothing more become known."""
        empties = [at for at in (progress.empty, progress.empty_lately) if at is not None and sent_at < at]
        last = sent_at + self.longest
        if not empties:
            return last
        return min(last, max(sent_at + self.min_age(dispatches), min(empties) + SLACK))
