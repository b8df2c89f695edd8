"""The inventory against a model of a queue and its workers: nothing alive counts as lost, all that is lost does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from celery_durable.tasks.lost import detection
from celery_durable.tasks.lost.detection import (
    Abandon,
    Observations,
    ReportLost,
    RequestInventory,
    Search,
    SendMarker,
    Wait,
    Worker,
    decide,
    with_inventory_request,
)

LIVE = Worker(frozenset({"q"}), answered=0)


def facts(*workers: Worker, received_markers: str = "", seen: float = 100.0) -> Observations:
    return Observations(workers, frozenset(received_markers.split()), seen)


def step(search: Search, known: Observations, waited: float = 0.0) -> tuple[Search, detection.Action]:
    return decide(search, known, next_marker="m2", waited_seconds=waited)


SEARCH = Search("q", frozenset({"a", "b"}), "m1")
CALLED = with_inventory_request(SEARCH, 7)
LAST = with_inventory_request(Search("q", frozenset({"a", "b"}), "m2", round=2), 9)


# --- one rule at a time -------------------------------------------------------------------------


def test_nobody_is_asked_before_the_marker_has_come_back() -> None:
    assert step(SEARCH, facts(LIVE)) == (SEARCH, Wait("the marker is in the queue"))
    assert step(SEARCH, facts(LIVE, received_markers="m0 m1"))[1] == RequestInventory()


def test_a_queue_that_nobody_consumes_is_left_alone() -> None:
    other = Worker(frozenset({"other"}), answered=0)
    assert step(SEARCH, facts(other))[1] == Abandon("no living worker consumes the queue")


def test_a_worker_that_cannot_answer_ends_the_search() -> None:
    old = Worker(frozenset({"q"}), answered=None)
    for search in (SEARCH, CALLED, LAST):
        action = step(search, facts(LIVE, old, received_markers="m1"))[1]
        assert action == Abandon("a worker that consumes the queue does not answer inventories yet")


def test_each_living_worker_has_to_answer_this_inventory_or_a_later_one() -> None:
    late = Worker(frozenset({"q"}), answered=6)
    assert step(CALLED, facts(Worker(LIVE.queues, 8), late))[1] == Wait("1 workers have not answered")
    assert step(CALLED, facts(Worker(LIVE.queues, 8), late), waited=19)[1] == Wait("1 workers have not answered")


def test_a_worker_whose_loop_is_stuck_is_waited_for_only_so_long() -> None:
    """Its heartbeat goes on, and what it has received will never run."""
    stuck = Worker(frozenset({"q"}), answered=6, held=frozenset({"a"}))
    search, action = step(CALLED, facts(Worker(LIVE.queues, 8), stuck), waited=20)
    assert (search.candidates, action) == (frozenset({"a", "b"}), SendMarker())
    assert step(LAST, facts(Worker(LIVE.queues, 9), stuck), waited=20)[1] == ReportLost(frozenset({"a", "b"}))


def test_a_loop_that_runs_the_bodies_itself_may_answer_hours_later() -> None:
    busy = Worker(frozenset({"q"}), answered=6, runs_bodies=True)
    assert step(CALLED, facts(Worker(LIVE.queues, 8), busy), waited=1e6)[1] == Wait("1 workers have not answered")


def test_a_worker_of_other_queues_is_waited_for_only_so_long() -> None:
    """It may hold what it took before it stopped consuming the queue, or be busy for hours."""
    elsewhere = Worker(frozenset({"other"}), answered=0, runs_bodies=True)
    known = facts(Worker(LIVE.queues, 9), elsewhere)
    assert step(LAST, known, waited=59)[1] == Wait("1 workers have not answered")
    assert step(LAST, known, waited=60)[1] == ReportLost(frozenset({"a", "b"}))


def test_what_is_held_by_anybody_is_not_lost() -> None:
    holder = Worker(frozenset({"other"}), 9, frozenset({"a"}))
    assert step(LAST, facts(Worker(LIVE.queues, 9), holder))[1] == ReportLost(frozenset({"b"}))


def test_what_is_missing_once_is_searched_for_a_second_time() -> None:
    search, action = step(CALLED, facts(Worker(LIVE.queues, 7, frozenset({"a"}))))
    assert (search, action) == (Search("q", frozenset({"b"}), "m2", round=2, inventory=7), SendMarker())


def test_a_search_whose_suspects_are_all_held_is_over_at_once() -> None:
    assert step(CALLED, facts(Worker(LIVE.queues, 7, frozenset({"a", "b"}))))[1] == ReportLost(frozenset())


@pytest.mark.parametrize("search", [CALLED, LAST])
def test_nothing_is_concluded_soon_after_an_outage_of_the_database(search: Search) -> None:
    """All heartbeats are old then, and the workers that are missing may live."""
    known = facts(Worker(LIVE.queues, 9), seen=29.9)
    assert step(search, known)[1] == Wait(
        "the database has been reachable for less than 30 s, so heartbeats may be old"
    )


# --- the model ----------------------------------------------------------------------------------


@dataclass
class Peer:
    """A worker: what lies in its socket, what it holds, what it last answered."""

    lives: bool = True
    socket: list[str] = field(default_factory=list)
    held: set[str] = field(default_factory=set)
    answered: int = 0
    told: frozenset[str] = frozenset()

    def read(self) -> None:
        self.held.update(self.socket)
        self.socket.clear()


@dataclass
class Model:
    """One queue. ``returns``: a broker that puts back what a dead worker had not acknowledged, behind all else."""

    returns: bool
    queue: list[str]
    peers: list[Peer]
    ended: set[str] = field(default_factory=set)
    received_markers: set[str] = field(default_factory=set)
    called: int = 0

    def receive(self, peer: Peer) -> None:
        if peer.lives and self.queue:
            peer.socket.append(self.queue.pop(0))

    def read(self, peer: Peer) -> None:
        """The worker's loop comes round; a marker that it finds is in nobody's way any more."""
        if peer.lives:
            peer.read()
            self.received_markers.update(each for each in peer.held if each.startswith("m"))
            peer.held -= self.received_markers

    def end(self, peer: Peer) -> None:
        if peer.lives and peer.held:
            self.ended.add(peer.held.pop())

    def answer(self, peer: Peer) -> None:
        """What lay in its socket is missing in this answer, and has been read before the next."""
        if peer.lives and peer.answered < self.called:
            peer.answered, peer.told = self.called, frozenset(peer.held)
            self.read(peer)

    def kill(self, peer: Peer) -> None:
        if sum(each.lives for each in self.peers) > 1 and peer.lives:
            peer.lives = False
            if self.returns:
                self.queue += [*peer.socket, *sorted(peer.held)]

    def lost(self) -> set[str]:
        """What is in no queue, and in no hands."""
        there = {*self.queue, *self.ended}
        for peer in self.peers:
            if peer.lives:
                there |= {*peer.socket, *peer.held}
        return {f"t{n}" for n in range(6)} - there

    def facts(self) -> Observations:
        living = [peer for peer in self.peers if peer.lives]
        told = [Worker(frozenset({"q"}), peer.answered, peer.told) for peer in living]
        return Observations(told, frozenset(self.received_markers), 100.0)


@dataclass
class Run:
    model: Model
    search: Search
    concluded: frozenset[str] | None = None

    def look(self) -> None:
        if self.concluded is not None:
            return
        next_marker = f"m{self.search.round + 1}"
        self.search, action = decide(self.search, self.model.facts(), next_marker=next_marker, waited_seconds=0.0)
        match action:
            case SendMarker():
                self.model.queue.append(self.search.marker)
            case RequestInventory():
                self.model.called += 1
                self.search = with_inventory_request(self.search, self.model.called)
            case ReportLost(lost):
                self.concluded = lost - self.model.ended
                assert self.concluded <= self.model.lost(), "in somebody's hands"


@settings(max_examples=400, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    returns=st.booleans(),
    before=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2)), max_size=15),
    after=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2)), max_size=60),
)
def test_what_is_concluded_is_lost_and_what_was_lost_is_concluded(
    returns: bool, before: list[tuple[int, int]], after: list[tuple[int, int]]
) -> None:
    model = Model(returns, [f"t{n}" for n in range(6)], [Peer(), Peer(), Peer()])
    moves: list[Callable[[Peer], None]] = [model.receive, model.read, model.end, model.kill, model.answer]
    for move, peer in before:
        moves[move](model.peers[peer])
    candidates = frozenset(f"t{n}" for n in range(6)) - model.ended
    was_lost = model.lost()
    model.queue.append("m1")
    run = Run(model, Search("q", candidates, "m1"))
    for move, peer in after:
        if move < len(moves):
            moves[move](model.peers[peer])
        else:
            run.look()
    for _ in range(40):  # now everybody goes on, and nobody dies any more
        for peer in model.peers:
            model.receive(peer)
            model.read(peer)
            model.answer(peer)
        run.look()
    assert run.concluded is not None
    assert run.concluded >= (was_lost & candidates)
