"""The search for lost tasks under any schedule of workers, dispatchers, the queue and the database."""

from __future__ import annotations

import itertools
import shutil
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from celery_durable.errors import StoreUnavailable
from celery_durable.model import ItemRef, OutboxMessage
from celery_durable.tasks.lost.search import Lost, LostTaskSearch
from tests.support.answers import answer
from tests.support.world import World
from tests.tasks.lost.peers import Broker, Peer, outage, reference, search, start

_SECOND = timedelta(seconds=1)
_MICROSECOND = timedelta(microseconds=1)
COUNT = 5
"""The items of the map."""
DEAD = timedelta(seconds=10)
FOUND_LISTED, FOUND_SECONDS = DEAD + 3 * _SECOND, 60
"""Within which time a loss is found: of what was in a list, and of all if the queue is empty."""
FOREIGN = None
"""A message of somebody else."""
WORKERS = 2

numbers = st.integers(0, WORKERS - 1)
spans = st.sampled_from([1, 2, 4, 8, 12, 25])
long_spans = st.sampled_from([5, 13, 25])


class Worker:
    """A worker with its row, and the messages in its hands."""

    def __init__(self, world: World, number: int) -> None:
        self.peer = Peer(world, f"w{number}", reports=False)
        self.listed: list[OutboxMessage] = []
        self.is_alive, self.is_frozen, self.seen_at = True, False, world.now

    @property
    def hands(self) -> list[OutboxMessage]:
        return self.peer.held

    @property
    def is_working(self) -> bool:
        return self.is_alive and not self.is_frozen

    @property
    def may_count_as_dead(self) -> bool:
        return not self.is_working and self.peer.world.now - self.seen_at >= DEAD

    def report(self) -> None:
        self.peer.report()
        self.listed, self.seen_at = list(self.hands), self.peer.world.now


class Schedule(RuleBasedStateMachine):
    """The rules are what happens to workers, dispatcher, queue and database; each check of the search is judged."""

    new_url: Callable[[], str]

    @initialize(max_concurrency=st.sampled_from([None, 2]))
    def begin(self, max_concurrency: int | None) -> None:
        self.world, self.broker = World(self.new_url(), lost_limit=1000), Broker()
        self.world.clock.advance(_SECOND)
        start(self.world, COUNT, max_concurrency=max_concurrency)
        self.queue, self.sent, self.finished = deque[OutboxMessage | None](), 0, dict[int, int]()
        self.workers = [Worker(self.world, number) for number in range(WORKERS)]
        self.dead: list[Worker] = []
        self.search = self.dispatcher()
        self.has_dispatcher = self.has_database = True
        self.watched_since = self.world.now  # since then, a dispatcher and the database have been there
        self.pass_time(2)

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        try:
            self.come_to_an_end()
        finally:
            self.world.close()

    def dispatcher(self) -> LostTaskSearch:
        return search(self.world, self.broker, self.report_lost)

    # --- what happens ---------------------------------------------------------------------------

    @rule(number=numbers, count=st.integers(1, 3))
    def take(self, number: int, count: int) -> None:
        taken = [self.queue.popleft() for _ in range(min(count, len(self.queue)))]
        self.workers[number].hands.extend(each for each in taken if each is not FOREIGN)

    @rule(number=numbers)
    def finish(self, number: int) -> None:
        """The first success of an item counts, from whichever delivery it comes."""
        hands = self.workers[number].hands
        if hands:
            message = hands.pop(0)
            item = message.content["args"][0]
            is_first, value = item not in self.finished, len(self.finished)
            assert answer(self.world, message, value) is is_first
            self.finished.setdefault(item, value)

    @rule(number=numbers, is_replaced_at_once=st.booleans(), seconds=spans)
    def kill(self, number: int, is_replaced_at_once: bool, seconds: int) -> None:
        """What it held is gone; what it had taken since its last report is in no list."""
        killed = self.workers[number]
        killed.is_alive, killed.peer.held = False, []
        self.dead.append(killed)
        if not is_replaced_at_once:
            self.pass_time(seconds)
        self.workers[number] = Worker(self.world, number)

    @rule(number=numbers, seconds=long_spans)
    def freeze(self, number: int, seconds: int) -> None:
        frozen = self.workers[number]
        frozen.is_frozen = True
        self.pass_time(seconds)
        frozen.is_frozen = False

    @rule(seconds=spans)
    def stop_dispatcher(self, seconds: int) -> None:
        self.has_dispatcher = False
        self.pass_time(seconds)
        self.search, self.has_dispatcher = self.dispatcher(), True

    @rule(seconds=long_spans)
    def stop_database(self, seconds: int) -> None:
        """Afterwards, the dispatcher is two seconds quicker than the workers."""
        self.has_database = False
        self.pass_time(seconds)
        self.has_database = True
        for _ in range(2):
            self.world.clock.advance(_SECOND)
            self.check()

    @rule()
    def purge(self) -> None:
        self.queue.clear()

    @rule()
    def send_a_message_of_others(self) -> None:
        self.queue.append(FOREIGN)

    @rule(seconds=spans, is_check_first=st.booleans())
    def pass_time(self, seconds: int, is_check_first: bool = False) -> None:
        """``is_check_first``: the dispatcher is quicker than the workers."""
        for _ in range(seconds):
            self.world.clock.advance(_SECOND)
            is_watched = self.has_database and self.has_dispatcher
            self.watched_since = self.watched_since if is_watched else self.world.now
            if is_watched and is_check_first:
                self.check()
            for worker in self.workers:
                if self.has_database and worker.is_working:
                    worker.report()
            if is_watched:
                self.check()
            if self.has_database:
                self.world.sweeper.sweep()
            else:
                with outage(self.world), pytest.raises(StoreUnavailable):
                    self.search.check()
            self.queue.extend(self.world.sent[self.sent :])
            self.sent = len(self.world.sent)
            self.judge_listed()

    # --- what the search finds ------------------------------------------------------------------

    def check(self) -> None:
        self.broker.length = len(self.queue)
        self.search.check()

    def report_lost(self, lost: Sequence[Lost], *, why: str) -> int:
        """Nothing is sent again that is in its queue, or in the hands of a worker that has not been silent."""
        found = 0
        for each in lost:
            self.world.clock.advance(_MICROSECOND)  # a clock that statements read never stands
            if self.world.operations.answers.report_lost([each], why=why):
                found += 1
                assert each[0] not in [reference(it) for it in self.queue if it is not FOREIGN], each
                holders = [it for it in self.workers if each[0] in map(reference, it.hands)]
                assert all(it.may_count_as_dead for it in holders), (each, [it.peer.id for it in holders])
        return found

    def judge_listed(self) -> None:
        """What a dead worker had listed is sent again in time."""
        for worker in self.dead:
            if self.world.now - max(worker.seen_at, self.watched_since) > FOUND_LISTED:
                late = [each for each in worker.listed if self.is_newest(each) and not self.is_in_hands(each)]
                assert late == []

    def is_newest(self, message: OutboxMessage) -> bool:
        """Whether the step still waits for this delivery."""
        item = ItemRef.read(reference(message).event_type)
        assert item is not None
        columns = self.world.store.tables.item.c
        where = (columns.position == item.position, columns.status == "sent")
        rows = self.world.rows(self.world.store.tables.item.select().where(*where))
        return [row.loss_count for row in rows] == [reference(message).delivery]

    def is_in_hands(self, message: OutboxMessage) -> bool:
        return message in self.queue or any(message in worker.hands for worker in self.workers)

    def come_to_an_end(self) -> None:
        """Whatever happened: workers that live, a dispatcher and the database bring the map to its end."""
        for _ in range(FOUND_SECONDS + COUNT):
            self.take(0, len(self.queue))
            self.pass_time(1)
            for number in range(WORKERS):
                self.finish(number)
            if len(self.finished) == COUNT:
                break
        assert sorted(self.finished) == list(range(COUNT)), "a task is not sent again"
        self.world.run_until_idle()
        assert self.world.instance("mill", "i-1").output == [self.finished[item] for item in range(COUNT)]


@pytest.mark.parametrize("schedules", [6, pytest.param(100, marks=pytest.mark.gate)])
def test_only_lost_tasks_are_sent_again_and_all_of_them_in_time(
    sqlite_template: str, tmp_path: Path, schedules: int
) -> None:
    copies = itertools.count()

    class OnCopies(Schedule):
        @staticmethod
        def new_url() -> str:
            return f"sqlite:///{shutil.copy(sqlite_template, tmp_path / f'{next(copies)}.sqlite3')}"

    # To shrink a failing schedule takes longer than a test may. The first one is short enough to read.
    phases = [Phase.explicit, Phase.generate]
    options: dict[str, Any] = {"deadline": None, "suppress_health_check": list(HealthCheck), "phases": phases}
    run_state_machine_as_test(
        OnCopies, settings=settings(max_examples=schedules, stateful_step_count=25, derandomize=True, **options)
    )
