"""The search for lost tasks, on a database: dead workers and missing messages are found in the workers' lists."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from celery_durable import Step, WorkflowEvent
from celery_durable.errors import StoreUnavailable
from celery_durable.model import OutboxMessage
from celery_durable.store import heartbeats, lost_tasks
from celery_durable.store.heartbeats import HeartbeatUpdate
from celery_durable.tasks.lost.search import LostTaskSearch
from tests.support.answers import answer
from tests.support.world import World
from tests.tasks.lost.peers import Broker, Peer, grind, out, outage, reference, search, start

everywhere = pytest.mark.parametrize("database", ["sqlite", "postgresql", "mariadb"], indirect=True)

_SECOND = timedelta(seconds=1)
DEAD_SECONDS = 12
"""After its last report, with what lies between two checks."""


class Scene:
    """A world with tasks of a map that are out: its dispatchers search as long as they are driven."""

    def __init__(self, world: World, **bounds: int) -> None:
        self.world, self.broker, self.bounds = world, Broker(), bounds
        self.peers: list[Peer] = []
        self.reported: list[str] = []
        self.searches = [self.dispatcher()]

    @property
    def lost(self) -> list[int]:
        """The numbers of the tasks that were sent again."""
        self.world.run_after(0)
        return sorted(each.content["args"][0] for each in self.world.sent if reference(each).delivery)

    def dispatcher(self) -> LostTaskSearch:
        return search(self.world, self.broker, self.world.operations.answers.report_lost, **self.bounds)

    def worker(self, node: str, *held: OutboxMessage, **options: Any) -> Peer:
        self.peers.append(Peer(self.world, node, *held, **options))
        return self.peers[-1]

    def drive(self, seconds: int, until: Callable[[], Any] = lambda: False) -> int:
        """Let time pass; answers with the seconds that it took."""
        for passed in range(seconds):
            if until():
                return passed
            self.world.clock.advance(_SECOND)
            for peer in self.peers:
                peer.report()
            for each in self.searches:
                each.check()
        return seconds


@pytest.fixture
def scene(world: World) -> Scene:
    """Three tasks are out, and a dispatcher has been searching for a while."""
    start(world)
    return Scene(world)


# --- dead workers -------------------------------------------------------------------------------


@everywhere
def test_what_a_dead_worker_held_is_sent_again_and_nothing_else(scene: Scene) -> None:
    first, second, third = scene.world.sent
    scene.worker("a", first, third)
    dead = scene.worker("b", second)
    scene.drive(120)  # everybody is at work
    assert scene.lost == []
    scene.peers.remove(dead)
    assert scene.drive(40, until=lambda: scene.lost) <= DEAD_SECONDS
    scene.broker.length = 5
    scene.drive(120)  # the copy waits in its queue
    assert scene.lost == [1]


def test_a_dispatcher_that_has_just_started_knows_what_the_others_knew(scene: Scene) -> None:
    """Beat may be restarted every few seconds."""
    first, second, third = scene.world.sent
    scene.worker("a", first)
    dead = scene.worker("b", second)
    scene.drive(100)
    scene.peers.remove(dead)
    for _ in range(6):  # the third was received after the last list
        scene.searches = [scene.dispatcher()]
        scene.drive(2)
    scene.searches = [scene.dispatcher()]
    scene.drive(2)
    assert third
    assert scene.lost == [1, 2]


def test_two_dispatchers_report_a_loss_once(scene: Scene) -> None:
    scene.worker("a")
    dead = scene.worker("b", *scene.world.sent)
    scene.searches.append(scene.dispatcher())
    scene.drive(10)
    scene.peers.remove(dead)
    scene.drive(20)
    assert scene.lost == [0, 1, 2]


def test_an_outage_of_the_database_makes_no_worker_look_dead(scene: Scene) -> None:
    """Each heartbeat is old after it. One that lives needs a moment, and one that died in it is found."""
    first, second, third = scene.world.sent
    scene.worker("a", first)
    slow, dead = scene.worker("b", second), scene.worker("c", third)
    scene.drive(100)
    scene.peers = []
    scene.world.clock.advance(timedelta(seconds=60))  # nobody saw the database
    scene.drive(6)
    scene.worker("a", first)
    scene.peers.append(slow)
    scene.drive(DEAD_SECONDS)
    assert (scene.lost, dead.held) == ([2], [third])


def test_a_worker_that_was_silent_before_an_outage_gets_its_time_again(scene: Scene) -> None:
    """A database that fails often lets a dispatcher notice that all workers are silent, and no worker write."""
    slow = scene.worker("a", *scene.world.sent)
    scene.drive(100)
    scene.peers = []
    scene.drive(5)  # noticed
    scene.world.clock.advance(timedelta(seconds=60))
    with outage(scene.world), pytest.raises(StoreUnavailable):
        scene.searches[0].check()
    scene.drive(6)
    scene.peers = [slow]
    scene.drive(20)
    assert scene.lost == []
    scene.peers = []
    scene.drive(DEAD_SECONDS)
    scene.worker("b")
    assert scene.lost == [0, 1, 2]


def test_a_frozen_worker_that_comes_back_changes_nothing(scene: Scene) -> None:
    first, second, third = scene.world.sent
    scene.worker("a", first, third)
    frozen = scene.worker("b", second)
    scene.peers.remove(frozen)
    scene.drive(DEAD_SECONDS)
    scene.peers.append(frozen)
    scene.drive(100)
    assert scene.lost == [1]
    assert answer(scene.world, second, "by the frozen one")


def test_what_the_broker_has_delivered_to_another_worker_is_not_lost(scene: Scene) -> None:
    first, second, third = scene.world.sent
    living, dead = scene.worker("a", first), scene.worker("b", second, third)
    scene.drive(5)
    scene.peers.remove(dead)
    living.held += [second]
    scene.drive(20)
    assert scene.lost == [2]


def test_a_task_that_has_sent_itself_again_is_not_lost_with_the_worker_that_ran_it(scene: Scene) -> None:
    first, second, third = scene.world.sent
    scene.worker("a", first, third)
    dead = scene.worker("b", second)
    scene.drive(5)
    scene.peers.remove(dead)
    scene.world.clock.advance(_SECOND)
    scene.world.store.transact(lambda tx: lost_tasks.record_sent_again(tx, reference(second), timedelta(seconds=5)))
    scene.broker.length = 1
    scene.drive(60)
    assert scene.lost == []


def test_what_a_worker_holds_whose_loop_is_stuck_is_lost(scene: Scene) -> None:
    """Its heartbeat has a thread of its own and goes on."""
    first, second, third = scene.world.sent
    scene.worker("a", first, third)
    stuck = scene.worker("b", second)
    scene.drive(5)
    stuck.is_stuck = True
    scene.drive(100)
    assert scene.lost == [1]


def test_an_answer_that_comes_before_its_worker_counts_as_dead_counts(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    first, second, third = scene.world.sent
    scene.worker("a", first)
    dead = scene.worker("b", second, third)
    scene.peers.remove(dead)
    scene.drive(8)
    assert answer(scene.world, second, "just in time")
    scene.drive(20)
    assert scene.lost == [2]
    assert [record.getMessage() for record in caplog.records if "lost" in record.getMessage()] == [
        "1 tasks are lost with worker 'b'. Each is sent again or fails with TaskLost"
    ]


# --- missing messages ---------------------------------------------------------------------------


def test_what_a_worker_received_after_its_last_list_is_lost_with_it(scene: Scene) -> None:
    scene.worker("a", scene.world.sent[0])
    dead = scene.worker("b")
    scene.drive(5)
    scene.peers.remove(dead)
    assert scene.drive(40, until=lambda: scene.lost) <= DEAD_SECONDS + 1
    assert scene.lost == [1, 2]


@pytest.mark.parametrize("is_answered", [False, True], ids=["held", "answered"])
def test_in_a_long_queue_only_what_was_sent_before_a_task_that_was_taken_is_lost(
    scene: Scene, is_answered: bool
) -> None:
    """The last task waits in the queue behind those of others."""
    scene.broker.length = 500
    second = scene.world.sent[1]
    scene.worker("a", *([] if is_answered else [second]))
    dead = scene.worker("b")
    scene.drive(5)
    scene.peers.remove(dead)
    if is_answered:
        answer(scene.world, second, "ground")
    assert scene.drive(40, until=lambda: scene.lost) <= DEAD_SECONDS + 1
    scene.drive(100)
    assert scene.lost == [0]


@pytest.mark.parametrize("is_answered", [False, True], ids=["held", "answered"])
def test_an_old_delivery_says_nothing_about_what_was_sent_before_the_new_one(scene: Scene, is_answered: bool) -> None:
    """A frozen worker comes back with its tasks, which have been sent again: these messages wait behind others."""
    first, second, third = scene.world.sent
    scene.broker.length = 500
    scene.worker("a", *([third] if is_answered else [first]))
    frozen = scene.worker("b", *([first, second] if is_answered else [second]))
    scene.drive(40)
    scene.peers.remove(frozen)
    scene.drive(DEAD_SECONDS + 1)
    sent_again = [0, 1] if is_answered else [1]
    assert scene.lost == sent_again
    if is_answered:
        assert answer(scene.world, second, "by the frozen one")
    else:
        scene.peers.append(frozen)
    scene.drive(100)
    assert scene.lost == sent_again


def test_a_task_that_was_sent_long_before_one_of_another_step_is_lost_if_that_one_was_taken(scene: Scene) -> None:
    scene.broker.length = 500
    for seconds, name in ((20, "soon"), (20, "late")):
        scene.world.advance(seconds)

        @scene.world.workflow(name=name)
        def later(event: WorkflowEvent, step: Step) -> Any:
            return step.task("grind", grind.s(9), timeout="3 days")

        later.run(id=name)
    soon, late = scene.world.sent[3:]
    worker = scene.worker("a", soon)
    scene.drive(70)
    assert scene.lost == []  # two commits may send their messages in the other order
    worker.held = [soon, late]
    scene.drive(70)
    assert scene.lost == [0, 1, 2]


@everywhere
def test_a_queue_that_was_purged_is_found_without_a_death(scene: Scene) -> None:
    scene.worker("a", scene.world.sent[0])
    assert scene.drive(200, until=lambda: scene.lost) <= 15
    assert scene.lost == [1, 2]


def test_a_message_that_is_not_read_yet_is_in_the_next_list(scene: Scene) -> None:
    """It lies in the socket of a worker when it is noticed to be missing."""
    worker = scene.worker("a")
    scene.drive(60, until=lambda: any(each.missing_at for each in out(scene.world)))
    worker.held = list(scene.world.sent)
    scene.drive(100)
    assert scene.lost == []


def test_a_worker_whose_loop_does_not_turn_may_hold_what_it_has_not_listed(scene: Scene) -> None:
    """A solo pool's loop runs the bodies of tasks."""
    solo = scene.worker("a", scene.world.sent[0])
    scene.drive(2)
    solo.turns = False
    scene.drive(300)
    assert scene.lost == []
    solo.turns = True
    scene.drive(60)
    assert scene.lost == [1, 2]


def test_a_worker_that_has_not_listed_its_tasks_yet_may_hold_all(scene: Scene) -> None:
    scene.worker("a")
    scene.peers.pop()
    scene.worker("b")
    starting = scene.worker("c", reports=False)
    scene.peers.remove(starting)
    pulse = HeartbeatUpdate(starting.id, "worker", "c", 1, queues=["q"])
    for _ in range(50):
        scene.world.store.transact_once(lambda tx: heartbeats.upsert(tx, pulse))
        scene.drive(2)
    assert scene.lost == []


def test_a_queue_that_no_worker_consumes_waits_until_one_does(scene: Scene) -> None:
    scene.worker("a", queue="other")
    scene.drive(200)
    assert scene.lost == []
    scene.worker("b")
    assert scene.drive(60, until=lambda: scene.lost) < 40
    assert scene.lost == [0, 1, 2]


def test_nothing_is_missing_while_the_broker_does_not_say_how_long_its_queue_is(scene: Scene) -> None:
    scene.broker.length = None
    scene.worker("a")
    scene.drive(200)
    assert scene.lost == []


def test_what_has_not_left_the_outbox_is_not_lost(world: World) -> None:
    world.is_broker_away = True
    start(world)
    scene = Scene(world)
    scene.worker("a")
    scene.drive(200)
    assert world.sent == []
    world.is_broker_away = False
    assert scene.lost == []


@pytest.mark.parametrize("on_lost", ["resend", "wait"])
def test_more_tasks_than_one_check_reads_are_found(world: World, on_lost: str) -> None:
    start(world, 260, on_lost=on_lost)
    scene = Scene(world, page_size=200)
    scene.worker("a", *world.sent[:120])
    dead = scene.worker("b", *world.sent[120:240])
    scene.drive(2)
    scene.peers.remove(dead)
    scene.drive(DEAD_SECONDS + 20)
    assert scene.lost == (list(range(120, 260)) if on_lost == "resend" else [])
