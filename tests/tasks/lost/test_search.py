"""The search for lost tasks, on a database: deaths are noticed, markers sent, the roll called, losses reported."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
from celery import Celery

from celery_durable import Step, WorkflowEvent
from celery_durable.store import heartbeats, inventories
from celery_durable.store.heartbeats import HeartbeatUpdate
from celery_durable.store.lost_tasks import SentTask
from celery_durable.tasks.lost.search import Destination, LostTaskSearch
from tests.support.answers import answer
from tests.support.world import World

everywhere = pytest.mark.parametrize("database", ["sqlite", "postgresql", "mariadb"], indirect=True)

_SECOND = timedelta(seconds=1)

app = Celery("mill", set_as_current=False)


@app.task(name="mill.grind", shared=False)
def grind(number: int) -> int:
    """Never run here."""


class Broker:
    """One queue. Markers are passed at once, unless somebody else takes them."""

    def __init__(self) -> None:
        self.markers: list[str] = []
        self.length: int | None = 0
        self.is_away = False
        self.swallows = False

    def destination(self, body: str) -> Destination | None:
        return Destination("q")

    def send_marker(self, id_: str, to: Destination) -> bool:
        if not self.is_away:
            self.markers.append(id_)
        return not self.is_away

    def queue_length(self, queue: str) -> int | None:
        return self.length


class Peer:
    """A worker that beats, and answers inventories with what it holds."""

    ids = itertools.count(1)

    def __init__(
        self, world: World, node: str, broker: Broker, *held: Any, queue: str = "q", pool: str = "prefork"
    ) -> None:
        self.world, self.node, self.broker, self.queue = world, node, broker, queue
        self.id = f"{node}-{next(self.ids)}"
        self.held: list[str] = [message.id for message in held]
        self.answered, self.is_stuck = 0, False
        pulse = HeartbeatUpdate(self.id, "worker", node, 1, queues=[queue], pool=pool)
        world.store.transact_once(lambda tx: heartbeats.upsert(tx, pulse))
        self.beat()

    def beat(self) -> None:
        store = self.world.store
        if not self.broker.swallows and self.queue == "q":
            store.transact_once(lambda tx: inventories.record_received_markers(tx, self.id, self.broker.markers))
        number = store.transact_once(lambda tx: inventories.renew_worker(tx, self.id))
        if number > self.answered and not self.is_stuck:
            store.transact_once(lambda tx: inventories.answer_inventory(tx, self.id, number, self.held))
            self.answered = number


class Scene:
    """A world with lost tasks: its dispatchers search as long as they are driven."""

    def __init__(self, world: World) -> None:
        self.world, self.broker = world, Broker()
        self.peers: list[Peer] = []
        self.reported: list[str] = []
        self.searches = [self.dispatcher("beat-1")]

    def dispatcher(self, id_: str) -> LostTaskSearch:
        world = self.world
        world.store.transact_once(lambda tx: heartbeats.upsert(tx, HeartbeatUpdate(id_, "dispatcher", id_, 1)))

        def report(lost: Sequence[SentTask]) -> int:
            self.reported += [each.id for each in lost]
            return world.operations.answers.report_lost(
                [(each.reference, each.sent_us) for each in lost], why="it is gone"
            )

        return LostTaskSearch(world.store, world._web.runtime, self.broker, report, heartbeat_id=lambda: id_)

    def worker(self, node: str, *held: Any, **options: Any) -> Peer:
        self.peers.append(Peer(self.world, node, self.broker, *held, **options))
        return self.peers[-1]

    def drive(self, seconds: int, until: Callable[[], Any] = lambda: False) -> int:
        """Let time pass; answers with the seconds that it took."""
        for passed in range(seconds):
            if until():
                return passed
            self.world.clock.advance(_SECOND)
            for peer in self.peers:
                peer.beat()
            for search in self.searches:
                search.check()
        return seconds


@pytest.fixture
def scene(world: World) -> Scene:
    """Three tasks are out, and a dispatcher has been searching for a while."""

    @world.workflow
    def mill(event: WorkflowEvent, step: Step) -> Any:
        return step.map("grind", grind.s(), range(3), timeout="3 days")

    mill.run()
    return Scene(world)


@everywhere
def test_what_a_dead_worker_held_is_sent_again_and_nothing_else(scene: Scene) -> None:
    world = scene.world
    first, second, third = world.sent
    scene.worker("a", first, third)
    dead = scene.worker("b", second)
    scene.drive(120)  # slow looks find everybody at work
    assert scene.reported == []
    markers = len(scene.broker.markers)
    scene.peers.remove(dead)
    assert scene.drive(40, until=lambda: scene.reported) <= 20
    assert scene.reported == [second.id]
    assert len(scene.broker.markers) - markers >= 2  # the roll was called twice
    world.run_after(3)
    assert [message.id for message in world.sent[3:]] == [second.id]


def test_a_worker_that_starts_anew_under_its_name_was_dead(scene: Scene) -> None:
    """Nobody waits for its silence to be long enough."""
    first, second, third = scene.world.sent
    scene.worker("a", first, third)
    dead = scene.worker("b", second)
    scene.drive(100)
    scene.peers.remove(dead)
    scene.drive(1)
    scene.worker("b")
    assert scene.drive(40, until=lambda: scene.reported) <= 12
    assert scene.reported == [second.id]


@pytest.mark.parametrize(("pool", "lost"), [("prefork", True), ("solo", False)])
def test_what_a_worker_holds_whose_loop_is_stuck_is_lost(scene: Scene, pool: str, lost: bool) -> None:
    """Its heartbeat has a thread of its own and goes on. A solo pool that does not answer is in a body."""
    first, second, third = scene.world.sent
    scene.worker("a", first, third)
    scene.worker("b", second, pool=pool).is_stuck = True
    scene.drive(180, until=lambda: scene.reported)
    assert scene.reported == ([second.id] if lost else [])


def test_a_queue_that_was_purged_is_found_without_a_death(scene: Scene) -> None:
    messages = scene.world.sent
    scene.worker("a", messages[0])
    scene.drive(200, until=lambda: scene.reported)
    assert sorted(scene.reported) == sorted(message.id for message in messages[1:])


def test_what_is_lost_during_a_search_is_found_by_the_next_which_begins_at_once(scene: Scene) -> None:
    """A look that came meanwhile had left it out, and the next comes a minute later."""
    world = scene.world
    scene.worker("a", *world.sent)
    scene.broker.swallows, scene.broker.length = True, 500  # a search waits in a long queue
    scene.drive(70)

    @world.workflow
    def late(event: WorkflowEvent, step: Step) -> Any:
        return step.task("grind", grind.s(1), timeout="3 days")

    late.run()
    scene.drive(120)  # the look that would find it comes in this time
    assert len(scene.broker.markers) == 1
    scene.broker.swallows, scene.broker.length = False, 0
    assert scene.drive(60, until=lambda: scene.reported) <= 30
    assert scene.reported == [world.sent[-1].id]


def test_a_search_that_covers_all_that_is_out_is_not_repeated_at_once(scene: Scene) -> None:
    scene.worker("a", *scene.world.sent)
    scene.broker.swallows, scene.broker.length = True, 500
    scene.drive(190)  # two looks find it under way
    scene.broker.swallows, scene.broker.length = False, 0
    scene.drive(40)
    assert len(scene.broker.markers) == 1


def test_nothing_is_lost_before_the_database_was_seen_for_long_enough(scene: Scene) -> None:
    """Each worker seems dead after an outage: one that lives may be about to say so."""
    first, second, third = scene.world.sent
    scene.worker("a", first)
    other = scene.worker("b", second, third)
    scene.drive(100)
    scene.peers.remove(other)
    scene.world.clock.advance(timedelta(seconds=60))  # nobody saw the database
    assert scene.drive(28, until=lambda: scene.reported) == 28
    scene.peers.append(other)  # slow, and alive
    scene.drive(60)
    assert scene.reported == []


def test_of_two_dispatchers_the_older_searches_and_the_other_goes_on_for_it(scene: Scene) -> None:
    first, second, third = scene.world.sent
    scene.worker("a", first)
    dead = scene.worker("b", second, third)
    scene.drive(1)
    scene.searches.append(scene.dispatcher("beat-2"))
    scene.drive(100)
    scene.peers.remove(dead)
    scene.drive(5)
    del scene.searches[0]
    scene.drive(60, until=lambda: len(scene.reported) > 1)
    assert sorted(scene.reported) == sorted([second.id, third.id])
    assert len(scene.broker.markers) == len(set(scene.broker.markers))


def test_what_has_not_left_the_outbox_is_not_searched_for(world: World) -> None:
    @world.workflow
    def mill(event: WorkflowEvent, step: Step) -> Any:
        return step.map("grind", grind.s(), range(3), timeout="3 days")

    world.is_broker_away = True
    mill.run()
    scene = Scene(world)
    scene.worker("a")
    scene.drive(200)
    assert (scene.reported, scene.broker.markers) == ([], [])


def test_an_answer_that_comes_during_the_search_counts(scene: Scene) -> None:
    world = scene.world
    first, second, third = world.sent
    scene.worker("a", first, third)
    dead = scene.worker("b", second)
    scene.drive(100)
    scene.peers.remove(dead)
    scene.drive(13)
    assert answer(world, second, "just in time")
    scene.drive(60)
    assert len(world.sent) == 3


def test_only_tasks_that_are_still_awaited_are_logged_as_lost(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    first, second, third = scene.world.sent
    scene.broker.swallows, scene.broker.length = True, 500  # the search waits in a long queue
    scene.worker("a", first)
    scene.drive(70)
    assert answer(scene.world, second, "during the search")
    scene.broker.swallows, scene.broker.length = False, 0
    scene.drive(60)
    assert sorted(scene.reported) == sorted([second.id, third.id])
    assert [record.getMessage() for record in caplog.records if "lost" in record.getMessage()] == [
        "1 tasks of queue 'q' are lost: no worker holds them and no message is left. Each is sent again or fails with "
        "TaskLost"
    ]


def test_a_search_whose_tasks_were_all_answered_logs_no_loss(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    scene.broker.swallows, scene.broker.length = True, 500
    scene.worker("a")
    scene.drive(70)
    for message in list(scene.world.sent):
        assert answer(scene.world, message, "during the search")
    scene.broker.swallows, scene.broker.length = False, 0
    scene.drive(60, until=lambda: len(scene.reported) == 3)
    assert len(scene.reported) == 3
    assert "lost" not in caplog.text


def test_a_worker_that_cannot_answer_leaves_all_to_their_timeout(scene: Scene) -> None:
    """Its consumer has not begun to answer, and it may hold them all."""
    scene.worker("a")
    old = HeartbeatUpdate("old", "worker", "old", 1, queues=["q"])
    for _ in range(100):
        scene.world.store.transact_once(lambda tx: heartbeats.upsert(tx, old))
        scene.drive(2)
    assert scene.reported == []


def test_a_queue_that_nobody_consumes_waits_until_somebody_does(scene: Scene) -> None:
    scene.worker("a", queue="other")
    scene.drive(200)
    assert scene.reported == []
    scene.worker("b")
    assert scene.drive(60, until=lambda: len(scene.reported) == 3) < 40


def test_a_marker_that_disappears_is_sent_again_and_then_the_search_of_its_queue_pauses(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    """Another application takes it, and would take it again and again."""
    scene.broker.swallows = True
    scene.worker("a")
    scene.drive(300)
    assert len(scene.broker.markers) == len(scene.broker.markers[:1]) * 3
    assert len(set(scene.broker.markers)) == 1
    assert "Another application seems to consume queue 'q' too" in caplog.text
    assert scene.reported == []


def test_a_marker_in_a_long_queue_is_waited_for(scene: Scene) -> None:
    scene.broker.swallows, scene.broker.length = True, 500
    scene.worker("a")
    scene.drive(300)
    assert len(scene.broker.markers) == 1
    scene.broker.swallows, scene.broker.length = False, 0
    assert scene.drive(60, until=lambda: len(scene.reported) == 3) < 20


def test_a_broker_that_is_away_gets_the_marker_later(scene: Scene) -> None:
    scene.broker.is_away = True
    scene.worker("a")
    scene.drive(100)
    assert scene.broker.markers == []
    scene.broker.is_away = False
    assert scene.drive(60, until=lambda: len(scene.reported) == 3) < 20


def test_a_clock_that_went_back_makes_no_old_answer_new(scene: Scene) -> None:
    """Of a database that failed over: the inventory's number would be one that all have answered."""
    first, second, third = scene.world.sent
    holder = scene.worker("a", first, second, third)
    scene.drive(100)
    holder.held = [first.id]
    store = scene.world.store
    number = holder.answered
    scene.world.clock._now_us -= 90_000_000
    called = store.transact_once(lambda tx: inventories.start_inventory(tx, "beat-1"))
    assert called is not None
    assert called > number
