"""When to send a dispatch message again: the watermark rule, as a pure function of what is known about a queue.

A queue is first in, first out. If a worker has claimed a message, or the queue is empty, each unclaimed message that
was sent before is lost. A long queue proves nothing, and a second copy would only make it longer.

If a message is wrongly considered lost, its copy changes nothing (LAW 1). If a loss is not detected, the run waits. So
every unclaimed message is sent again after ``longest``. All times are the database's (LAW 4).
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

SLACK = timedelta(seconds=3)
"""How long a worker may hold a message before it claims the run: workers prefetch several messages."""
MIN_LOST_AGE = timedelta(seconds=5)
"""The minimum age at which a message can be lost because its queue is empty. It doubles with each further copy."""
_MAX_DOUBLINGS = 10


@dataclass(frozen=True, slots=True)
class QueueProgress:
    """How far the workers have consumed a queue; a value of None means that nothing is known.

    ``claimed``: the newest send time among the messages that were claimed at least `SLACK` ago. ``empty``: a time at
    least `SLACK` ago when the queue was empty; a process that sweeps only once also uses the present. ``empty_lately``:
    one more recent than that. ``gone_before``: messages sent earlier were in the memory of a process, and cannot
    arrive.
    """

    claimed: datetime | None = None
    empty: datetime | None = None
    empty_lately: datetime | None = None
    gone_before: datetime | None = None

    @property
    def lost_before(self) -> datetime | None:
        """Each unclaimed message that was sent before this time is lost; None if nothing is known."""
        return max((at for at in (self.claimed, self.gone_before) if at is not None), default=None)


NOTHING_KNOWN = QueueProgress()


@dataclass(frozen=True, slots=True)
class Redispatch:
    """The watermark rule with its settings. What a tick took is due after ``first``, doubling to ``longest``."""

    first: timedelta
    longest: timedelta

    def after(self, dispatch_count: int) -> timedelta:
        """The delay after which a run is due again that a tick has taken for the ``dispatch_count``-th time."""
        return min(self.first * (1 << min(max(dispatch_count - 1, 0), 30)), self.longest)

    def min_age(self, dispatch_count: int) -> timedelta:
        """The minimum age at which a message can be lost because its queue is empty.

        Without the doubling, a worker without a prefetch limit, which empties the queue, would get a copy every few
        seconds.
        """
        return min(MIN_LOST_AGE * (1 << min(max(dispatch_count - 1, 0), _MAX_DOUBLINGS)), self.longest)

    def is_lost(self, sent_at: datetime, dispatch_count: int, progress: QueueProgress, now: datetime) -> bool:
        """Whether an unclaimed message that was sent at ``sent_at`` is lost and must be sent again."""
        age = now - sent_at
        if age >= self.longest or (progress.lost_before is not None and sent_at < progress.lost_before):
            return True
        return progress.empty is not None and sent_at < progress.empty and age >= self.min_age(dispatch_count)

    def lost_before(self, progress: QueueProgress, now: datetime) -> datetime:
        """Only messages that were sent before this time can be lost."""
        too_old = now - self.longest + timedelta(microseconds=1)  # a message of exactly this age is lost
        return max([too_old, *(at for at in (progress.lost_before, progress.empty) if at is not None)])

    def next_check_at(self, sent_at: datetime, dispatch_count: int, progress: QueueProgress) -> datetime:
        """When to check a message again that is not lost now, if nothing more becomes known about its queue."""
        empties = [at for at in (progress.empty, progress.empty_lately) if at is not None and sent_at < at]
        last = sent_at + self.longest
        if not empties:
            return last
        return min(last, max(sent_at + self.min_age(dispatch_count), min(empties) + SLACK))

    def recheck_at(
        self, sent_at: datetime, dispatch_count: int, progress: QueueProgress, now: datetime
    ) -> datetime | None:
        """When to check a message again. None means that it is lost and must be sent again."""
        if self.is_lost(sent_at, dispatch_count, progress, now):
            return None
        # In the future, or the same sweep would find its row again.
        return max(self.next_check_at(sent_at, dispatch_count, progress), now + timedelta(microseconds=1))

    def outbox_pause(self, age: timedelta) -> timedelta:
        """How long to wait until a message of the outbox is offered again, which has waited for ``age``."""
        return min(max(age, self.first), self.longest)
