"""The rule by which hints are sent again, against a model of a queue: first in, first out, and some get lost."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

import hypothesis
import hypothesis.strategies as st
import pytest

from celery_durable.redispatch import NOTHING_KNOWN, QueueProgress, Redispatch

START = datetime(2030, 1, 1, tzinfo=UTC)
RULE = Redispatch(first=timedelta(seconds=15), longest=timedelta(minutes=30))


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


@pytest.mark.parametrize(
    ("age", "progress", "is_lost"),
    [
        (1799.999999, NOTHING_KNOWN, False),
        (1800, NOTHING_KNOWN, True),
        (60, QueueProgress(claimed=at(-0.000001)), False),
        (60, QueueProgress(claimed=at(0)), False),  # itself, or one of the same moment
        (3, QueueProgress(claimed=at(0.000001)), True),
        (60, QueueProgress(gone_before=at(0)), False),
        (0.3, QueueProgress(gone_before=at(0.2)), True),
        (0.3, QueueProgress(claimed=at(-1), gone_before=at(0.2)), True),
        (60, QueueProgress(empty=at(0)), False),
        (4.999999, QueueProgress(empty=at(1)), False),
        (5, QueueProgress(empty=at(1)), True),
        (60, QueueProgress(empty_lately=at(59)), False),
    ],
)
def test_a_hint_is_lost_by_what_is_known_of_its_queue(age: float, progress: QueueProgress, is_lost: bool) -> None:
    assert RULE.is_lost(at(0), 0, progress, at(age)) is is_lost


def test_the_time_until_a_tick_offers_work_again_doubles_up_to_the_longest() -> None:
    gaps = [RULE.after(count).total_seconds() for count in (0, 1, 2, 3, 10**6)]
    assert gaps == [15, 15, 30, 60, 1800]


def test_a_short_limit_holds_for_empty_queues_too() -> None:
    rule = Redispatch(first=timedelta(seconds=1), longest=timedelta(seconds=2))
    assert rule.min_age(10**6) == rule.min_age(0) == timedelta(seconds=2)
    assert rule.next_check_at(at(0), 0, QueueProgress(empty=at(1))) == at(2)


@dataclass
class Queue:
    """A broker's queue, the workers behind it, and a dispatcher that follows the rule; one turn is a second.

    ``wait``: how many messages of others come before each hint. ``held``: what workers have prefetched.
    """

    now: int = 0
    messages: list[str | None] = field(default_factory=list)
    held: list[tuple[int, str | None]] = field(default_factory=list)
    sent: dict[str, tuple[int, int]] = field(default_factory=dict)
    claims: list[tuple[int, int]] = field(default_factory=list)
    seen_empty: list[int] = field(default_factory=list)
    done: set[str] = field(default_factory=set)
    copies: int = 0

    def send(self, name: str, *, is_lost: bool, others: int = 0) -> None:
        sent, dispatch_count = self.sent.get(name, (0, -1))
        self.sent[name] = self.now, dispatch_count + 1
        self.messages += [None] * others
        if not is_lost:
            self.messages.append(name)

    def work(self, speed: int) -> None:
        """Workers claim what they took a second ago, and take what they have room for."""
        for _, name in [each for each in self.held if each[0] < self.now]:
            if name is not None and name not in self.done:
                self.done.add(name)
                self.claims.append((self.now, self.sent[name][0]))
        self.held = [(self.now, name) for name in self.messages[:speed]]
        del self.messages[:speed]

    def progress(self) -> QueueProgress:
        claimed = [sent for claimed_at, sent in self.claims if claimed_at <= self.now - 3]
        empty = [seen for seen in self.seen_empty if seen <= self.now - 3]
        return QueueProgress(at(max(claimed)) if claimed else None, at(max(empty)) if empty else None)

    def look(self) -> list[str]:
        if not self.messages:
            self.seen_empty.append(self.now)
        lost = [
            name
            for name, (sent, dispatch_count) in self.sent.items()
            if name not in self.done and RULE.is_lost(at(sent), dispatch_count, self.progress(), at(self.now))
        ]
        for name in lost:
            self.copies += 1
            self.send(name, is_lost=False)
        return lost

    def is_under_way(self, name: str) -> bool:
        return name in self.messages or any(held == name for _, held in self.held)


@hypothesis.given(
    hints=st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.integers(0, 40)), min_size=1, max_size=30),
    speed=st.integers(1, 5),
    paused_for=st.integers(0, 900),
)
@hypothesis.example(hints=[(0, True, 0)], speed=1, paused_for=29)  # its copy has to wait for a worker
def test_only_lost_hints_are_sent_again_and_all_of_them_soon(
    hints: list[tuple[int, bool, int]], speed: int, paused_for: int
) -> None:
    """No worker for up to a quarter of an hour, any number of foreign messages before each hint.

    Soon: as early as the rule allows, whenever a worker comes for the copy.
    """
    queue = Queue()
    lost = {f"h{number}" for number, (_, is_lost, _) in enumerate(hints) if is_lost}
    for number, (pause, is_lost, others) in enumerate(hints):
        queue.now += pause
        queue.send(f"h{number}", is_lost=is_lost, others=others)
    started, first_sent = queue.now, {name: sent for name, (sent, _) in queue.sent.items()}
    missing, ended = set(lost), None
    while len(queue.done) < len(hints):
        queue.now += 1
        if queue.now > started + paused_for:
            queue.work(speed)
        if ended is None and not queue.messages:
            ended = queue.now  # later than all were sent
        for name in queue.look():
            assert name in missing, f"{name} was sent again though it was not lost"
            missing.remove(name)
        for name in missing if ended is not None else ():
            is_soon = queue.now < max(ended + 3, first_sent[name] + 5)
            assert is_soon, f"{name} was lost, and is not sent again soon after its queue was empty"
        assert queue.now <= started + 5000, "a hint that was sent again does not come through"
    assert queue.copies == len(lost)


@hypothesis.given(st.integers(0, 10**9), st.integers(0, 40), st.none() | st.integers(0, 100), st.integers(0, 3600))
def test_nothing_is_lost_that_was_sent_at_the_bound_or_later(
    age_us: int, dispatch_count: int, known: int | None, now: int
) -> None:
    """The bound is what the index is searched with."""
    sent_at = at(now) - timedelta(microseconds=age_us)
    moment = None if known is None else at(now - known)
    for progress in (QueueProgress(claimed=moment), QueueProgress(empty=moment), QueueProgress(moment, moment)):
        if RULE.is_lost(sent_at, dispatch_count, progress, at(now)):
            assert sent_at < RULE.lost_before(progress, at(now))


def test_a_message_that_is_lost_is_not_checked_again_later() -> None:
    assert RULE.recheck_at(at(0), 0, QueueProgress(claimed=at(1)), at(3)) is None


def test_a_message_that_is_not_lost_is_checked_when_it_may_be_and_never_in_the_past() -> None:
    seen_empty = QueueProgress(empty_lately=at(1))
    assert RULE.recheck_at(at(0), 0, seen_empty, at(2)) == RULE.next_check_at(at(0), 0, seen_empty) == at(5)
    assert RULE.recheck_at(at(0), 0, seen_empty, at(9)) == at(9.000001)


def test_a_message_of_the_outbox_waits_as_long_as_it_has_waited_within_both_limits() -> None:
    waits = [RULE.outbox_pause(timedelta(seconds=age)) // timedelta(seconds=1) for age in (0, 14, 16, 1799, 9999)]
    assert waits == [15, 15, 16, 1799, 1800]
