"""Creating under an id that may exist: debounced starts, and runs that do not overlap."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import pytest
import sqlalchemy as sa

from celery_durable import NonRetryableError, Step, WorkflowEvent
from celery_durable.errors import InstanceAlreadyExists, StartTooFar
from celery_durable.model import Scope, Status
from celery_durable.signals import ignore, listen, workflow_created, workflow_restarted
from tests.store.world import has_lock_wait
from tests.support.instances import Instance
from tests.support.lines import Line
from tests.support.lost_connections import cut_commit
from tests.support.world import World, on_one_database

everywhere = pytest.mark.parametrize("database", ["sqlite", "postgresql", "mariadb"], indirect=True)
DEBOUNCE: dict[str, Any] = {"if_exists": "postpone", "run_at": "30 seconds", "at_latest": "5 min"}
QUEUE: dict[str, Any] = {"if_running": "queue"}
SKIP: dict[str, Any] = {"if_running": "skip"}
SECOND = timedelta(seconds=1)


@pytest.fixture
def sync(world: World) -> Any:
    @world.workflow
    def sync(event: WorkflowEvent[str], step: Step) -> str:
        if event.payload == "fail":
            raise NonRetryableError("no")
        if event.payload.startswith("long"):
            step.sleep("work", 60)
        return event.payload

    return sync


def outputs(instance: Instance) -> list[str | None]:
    """The outputs of all runs, in their order."""
    r = instance.world.store.tables.run.c
    query = sa.select(r.output).where(r.instance_pk == instance.row.id).order_by(r.run_number)
    texts = instance.world.store.read(lambda tx: tx.execute(query).scalars().all())
    return [None if text is None else json.loads(text) for text in texts]


# --- debounce -------------------------------------------------------------------------------------


@everywhere
def test_of_a_burst_only_the_last_parameters_run_after_the_delay(world: World, sync) -> None:
    for number in range(5):
        instance = sync.create(f"p{number}", **DEBOUNCE)
        assert instance.run_at == world.now + 30 * SECOND
        world.run_after(20)
    assert (instance.status, instance.row.run_number) == (Status.WAITING, 1)
    world.run_after(10)
    assert outputs(instance) == ["p4"]


@everywhere
def test_a_burst_that_does_not_end_runs_at_the_latest(world: World, sync) -> None:
    created = world.now
    for number in range(15):
        instance = sync.create(f"p{number}", **DEBOUNCE)
        assert instance.run_at == min(world.now + 30 * SECOND, created + 300 * SECOND)
        world.run_after(20)
    assert outputs(instance) == ["p14"]


@on_one_database
def test_the_start_does_not_move_forward(world: World, sync) -> None:
    instance = sync.create("p0", **DEBOUNCE)
    sync.create("p1", **DEBOUNCE | {"run_at": "1 second"})
    assert instance.run_at == world.now + 30 * SECOND
    world.run_after(30)
    assert outputs(instance) == ["p1"]


@on_one_database
def test_an_instant_may_be_postponed_too(world: World, sync) -> None:
    instance = sync.create("p0", **DEBOUNCE | {"run_at": world.now + 10 * SECOND})
    sync.create("p1", **DEBOUNCE | {"run_at": world.now + 400 * SECOND})
    assert instance.run_at == world.now + 300 * SECOND


@on_one_database
@pytest.mark.parametrize("has_run", [False, True])
def test_the_bound_counts_also_for_the_first_start_of_a_run(world: World, sync, has_run: bool) -> None:
    if has_run:
        sync.run("p0")
    instance = sync.create("p1", **DEBOUNCE | {"run_at": "10 min"})
    assert instance.run_at == world.now + 300 * SECOND


@everywhere
def test_a_bound_that_has_passed_starts_the_run_now(world: World, sync) -> None:
    instance = sync.create("p0", if_exists="postpone", run_at="1 hour")
    world.run_after(600)
    sync.create("p1", **DEBOUNCE)
    assert [due.ref for due in world.messages] == [instance.ref]
    world.run_until_idle()
    assert outputs(instance) == ["p1"]


@everywhere
def test_a_run_that_is_due_but_has_not_begun_is_postponed(world: World, sync) -> None:
    instance = sync.create("p0", run_at="10 seconds")
    world.advance(10)
    world.sweeper.sweep()
    sync.create("p1", **DEBOUNCE)
    assert [world.worker.advance(each.ref) for each in world.messages] == [
        "noop: not due, or claimed by another worker"
    ]
    world.messages.clear()
    world.run_after(30)
    assert outputs(instance) == ["p1"]


@everywhere
def test_while_it_runs_one_more_run_follows_however_often_it_is_asked(world: World, sync) -> None:
    instance = sync.run("long 0")
    for number in range(3):
        sync.create(f"p{number}", **DEBOUNCE)
        world.run_after(15)
    assert (instance.status, instance.row.run_number) == (Status.WAITING, 1)
    world.run_after(15)
    assert (instance.status, instance.row.run_number) == (Status.COMPLETE, 2)
    assert outputs(instance) == ["long 0", "p2"]


@everywhere
def test_the_run_that_follows_waits_for_its_start_and_can_be_postponed(world: World, sync) -> None:
    instance = sync.run("long 0")
    world.run_after(50)
    sync.create("p0", **DEBOUNCE)
    world.run_after(10)
    assert (instance.row.run_number, instance.run_at) == (2, world.now + 20 * SECOND)
    sync.create("p1", **DEBOUNCE)
    assert instance.run_at == world.now + 30 * SECOND
    world.run_after(30)
    assert outputs(instance) == ["long 0", "p1"]


@on_one_database
def test_the_run_that_follows_starts_at_the_latest_after_it_was_asked_for(world: World, sync) -> None:
    instance = sync.run("long 0")
    for number in range(3):
        sync.create(f"p{number}", if_exists="postpone", run_at="100 seconds", at_latest="110 seconds")
        world.run_after(15)
    world.run_after(15)
    assert (instance.row.run_number, instance.run_at) == (2, world.now + 50 * SECOND)


@everywhere
@pytest.mark.parametrize("first", ["p0", "fail"])
def test_an_instance_that_has_ended_runs_again_after_the_delay(world: World, sync, first: str) -> None:
    instance = sync.run(first)
    sync.create("p1", **DEBOUNCE)
    assert (instance.status, instance.row.run_number) == (Status.WAITING, 2)
    assert instance.row.retention_until is None
    sync.create("p2", **DEBOUNCE)
    world.run_after(30)
    assert outputs(instance) == [None if first == "fail" else "p0", "p2"]


# --- the other options ----------------------------------------------------------------------------


@everywhere
def test_skip_does_nothing_until_the_run_has_ended(world: World, sync) -> None:
    instance = sync.create("long 0", **SKIP)
    sync.create("p1", **SKIP)
    world.run_until_idle()
    sync.create("p2", **SKIP)
    world.run_after(60)
    assert outputs(instance) == ["long 0"]
    sync.create("p3", **SKIP)
    assert [due.ref for due in world.messages] == [instance.ref]
    world.run_until_idle()
    assert outputs(instance) == ["long 0", "p3"]


@everywhere
def test_queue_runs_once_more_with_the_newest_parameters(world: World, sync) -> None:
    instance = sync.create("long 0", **QUEUE)
    sync.create("long 1", **QUEUE)
    world.run_until_idle()
    sync.create("p2", **QUEUE)
    sync.create("p3", **QUEUE)
    world.run_after(60)
    assert outputs(instance) == ["long 1", "p3"]
    sync.create("p4", **QUEUE)
    world.run_until_idle()
    assert outputs(instance) == ["long 1", "p3", "p4"]


@on_one_database
def test_queue_leaves_a_later_start_as_it_is(world: World, sync) -> None:
    instance = sync.create("p0", run_at="10 seconds")
    sync.create("p1", **QUEUE, run_at="40 seconds")
    assert instance.run_at == world.now + 10 * SECOND
    world.run_after(10)
    assert outputs(instance) == ["p1"]


@on_one_database
@pytest.mark.parametrize("ask", [DEBOUNCE, QUEUE, SKIP])
def test_labels_and_the_limit_stay_those_of_the_creation(world: World, sync, ask: Any) -> None:
    instance = sync.run("p0", labels={"of": "first"}, max_run="1 hour")
    sync.create("p1", labels={"of": "second"}, max_run="2 hours", **ask)
    world.run_after(30)
    assert outputs(instance) == ["p0", "p1"]
    assert world.operations.history.read("sync", "i-1").labels == {"of": "first"}
    assert instance.row.max_run_us == timedelta(hours=1) // timedelta(microseconds=1)


@everywhere
def test_a_request_with_an_id_starts_one_run(world: World, sync) -> None:
    """Two beats, or a message that comes twice."""
    instance = sync.run("long 0")
    for _ in range(2):
        sync.create("long 1", **QUEUE, request_id="slot 1")
    world.run_after(60)
    assert instance.row.run_number == 2
    sync.create("long 1", **QUEUE, request_id="slot 1")
    assert instance.row.next_run is None
    world.run_after(60)
    sync.create("p1", **QUEUE, request_id="slot 1")
    world.run_until_idle()
    assert outputs(instance) == ["long 0", "long 1"]


@on_one_database
def test_a_request_that_comes_twice_postpones_the_run_that_follows_once(world: World, sync) -> None:
    instance = sync.run("long 0")
    asked_at = world.now
    for _ in range(2):
        sync.create("p1", **DEBOUNCE | {"run_at": "80 seconds"}, request_id="slot 1")
        world.run_after(30)
    assert (instance.row.run_number, instance.run_at) == (2, asked_at + 80 * SECOND)


@everywhere
@pytest.mark.parametrize("ask", [DEBOUNCE, QUEUE, SKIP], ids=["postpone", "queue", "skip"])
@pytest.mark.parametrize("first", ["waits", "runs"])
def test_a_request_that_changed_a_waiting_start_or_run_starts_no_other_when_it_comes_again(
    world: World, sync, ask: dict[str, Any], first: str
) -> None:
    """As Redis delivers a message again after an hour."""
    instance = sync.create("p0", run_at="30 seconds") if first == "waits" else sync.run("long 0")
    sync.create("p1", **ask, request_id="slot 1")
    world.run_after(120)
    before = outputs(instance)
    sync.create("p1", **ask, request_id="slot 1")
    world.run_after(120)
    assert outputs(instance) == before


@everywhere
@pytest.mark.parametrize("first", ["waits", "runs"])
def test_an_older_request_that_comes_again_replaces_no_newer_one(world: World, sync, first: str) -> None:
    instance = sync.create("p0", run_at="30 seconds") if first == "waits" else sync.run("long 0")
    for request in ("1", "2", "1"):
        sync.create(f"p{request}", **DEBOUNCE, request_id=f"slot {request}")
    world.run_after(120)
    assert outputs(instance)[-1] == "p2"


@everywhere
def test_a_request_whose_run_was_discarded_starts_none_when_it_comes_again(world: World, sync) -> None:
    instance = sync.run("long 0")
    sync.create("p1", **QUEUE, request_id="slot 1")
    world.operations.lifecycle.terminate("sync", "i-1")
    sync.create("p1", **QUEUE, request_id="slot 1")
    world.run_after(60)
    assert (instance.status, instance.row.run_number) == (Status.TERMINATED, 1)


@on_one_database
def test_each_new_run_has_its_signal(world: World, sync) -> None:
    seen: list[Any] = []

    def note(signal: Any, run_number: int, **_: Any) -> None:
        seen.append((signal, run_number))

    for signal in (workflow_created, workflow_restarted):
        listen(signal, note)
    try:
        sync.run("long 0", **QUEUE)
        sync.create("p1", **QUEUE)
        world.run_after(60)
        sync.create("p2", **QUEUE)
        sync.create("p2", **SKIP)
    finally:
        for signal in (workflow_created, workflow_restarted):
            ignore(signal, note)
    assert seen == [(workflow_created, 1), (workflow_restarted, 2), (workflow_restarted, 3)]


# --- with other operations ------------------------------------------------------------------------


@everywhere
@pytest.mark.parametrize("stop", ["terminate", "cancel"])
def test_stopping_an_instance_discards_the_run_that_would_follow(world: World, sync, stop: str) -> None:
    instance = sync.run("long 0")
    sync.create("p1", **QUEUE)
    getattr(world.operations.lifecycle, stop)("sync", "i-1")
    world.run_after(60)
    assert (instance.status, instance.row.run_number) == (Status.TERMINATED, 1)
    sync.create("p2", **QUEUE)
    world.run_until_idle()
    assert (instance.status, outputs(instance)) == (Status.COMPLETE, [None, "p2"])


@on_one_database
def test_a_cancel_of_a_run_that_a_worker_holds_discards_it_too(world: World) -> None:
    def ask_and_cancel() -> None:
        sync.create("p1", **QUEUE)
        world.operations.lifecycle.cancel("sync", "i-1")

    @world.workflow
    def sync(event: WorkflowEvent[str], step: Step) -> None:
        step.do("first", ask_and_cancel)
        step.do("second", lambda: None)

    instance = sync.run("p0")
    assert (instance.status, instance.row.run_number) == (Status.TERMINATED, 1)


@everywhere
def test_a_run_that_is_asked_for_after_a_cancel_follows_the_cleanup(world: World, sync) -> None:
    instance = sync.run("long 0")
    world.operations.lifecycle.cancel("sync", "i-1")
    sync.create("p1", **QUEUE)
    world.run_until_idle()
    assert outputs(instance) == [None, "p1"]


@everywhere
@pytest.mark.parametrize("again", ["restart", "rewind"])
def test_a_restart_keeps_the_run_that_follows(world: World, sync, again: str) -> None:
    instance = sync.run("long 0")
    sync.create("p1", **QUEUE)
    world.operations.rewind.restart("sync", "i-1", from_step="work" if again == "rewind" else None)
    world.run_until_idle()
    world.run_after(60)
    assert outputs(instance) == [None, "long 0", "p1"]


@everywhere
def test_a_rewound_run_keeps_its_parameters(world: World) -> None:
    """Its kept steps fit no others."""

    @world.workflow
    def sync(event: WorkflowEvent[str], step: Step) -> str:
        return step.do("first", lambda: event.payload) + step.do("second", lambda: event.payload)

    instance = sync.run("a")
    world.operations.rewind.restart("sync", "i-1", from_step="second")
    sync.create("b", **QUEUE)
    world.run_until_idle()
    assert outputs(instance) == ["aa", "aa", "bb"]


@everywhere
def test_a_failed_run_and_one_beyond_its_limit_are_followed(world: World, sync) -> None:
    @world.workflow
    def slow(event: WorkflowEvent[str], step: Step) -> str:
        if event.payload == "short":
            return "short"
        step.sleep("rest", "1 day")
        raise NonRetryableError("no")

    failing, late = slow.run("long", id="failing"), slow.run("long", id="late", max_run="1 hour")
    for each in (failing, late):
        slow.create("short", id=each.id, **QUEUE)
    world.run_after(3600)
    assert (late.status, late.row.run_number) == (Status.COMPLETE, 2)
    world.run_after(timedelta(days=1))
    assert (failing.status, failing.row.run_number) == (Status.COMPLETE, 2)


@everywhere
def test_a_paused_instance_takes_the_parameters_and_stays_paused(world: World, sync) -> None:
    instance = sync.create("p0", **DEBOUNCE)
    instance.pause()
    sync.create("p1", **DEBOUNCE | {"run_at": "40 seconds"})
    world.run_after(60)
    assert instance.status == Status.PAUSED
    instance.resume()
    world.run_until_idle()
    assert outputs(instance) == ["p1"]


@everywhere
def test_a_linear_workflow_is_debounced_too(world: World) -> None:
    line = Line(world)
    instance = line.flow.create("p0", **DEBOUNCE)
    line.flow.create("p1", **DEBOUNCE)
    world.run_after(29)
    assert line.calls == []
    world.run_after(1)
    line.flow.create("p2", **QUEUE)
    world.run_until_idle()
    assert [each.params for each in line.calls] == ["p1"] * 3 + ["p2"] * 3
    assert (instance.status, instance.row.run_number) == (Status.COMPLETE, 2)


@on_one_database
def test_deleting_an_instance_deletes_the_run_that_would_follow(world: World, sync) -> None:
    instance = sync.run("long 0", id="i-1")
    sync.create("p1", **QUEUE)
    world.operations.lifecycle.terminate("sync", "i-1")
    world.advance(1)
    world.operations.retention.prune(older_than=0)
    world.accepted.remove(("sync", "i-1"))
    world.run_after(60)
    assert sync.run("p2", **QUEUE).row.run_number == 1
    assert outputs(instance) == ["p2"]


@on_one_database
def test_an_instance_outside_the_scope_is_neither_shown_nor_changed(world: World, sync) -> None:
    instance = sync.run("long 0", id="bob-1")
    before = instance.row
    for ask in (DEBOUNCE, QUEUE, SKIP):
        with pytest.raises(InstanceAlreadyExists):
            world.operations.restrict_to(Scope({"of": "ann"})).create.instance("sync", "p1", id="bob-1", **ask)
    assert instance.row == before


@on_one_database
def test_an_error_changes_nothing_of_the_instance(world: World, sync) -> None:
    instance = sync.run("long 0")
    before = instance.row
    with pytest.raises(StartTooFar):
        sync.create("p1", **DEBOUNCE | {"run_at": datetime(9000, 1, 1, tzinfo=UTC)})
    assert instance.row == before


# --- in a session of the caller --------------------------------------------------------------------


@everywhere
def test_a_transaction_that_rolls_back_asks_for_nothing(world: World, sync) -> None:
    instance = sync.run("long 0")
    with world.session() as session:
        sync.create("p1", **QUEUE, session=session)
        session.rollback()
    assert instance.row.next_run is None
    with world.session() as session:
        sync.create("p2", **QUEUE, session=session)
        session.commit()
    world.run_after(60)
    assert outputs(instance) == ["long 0", "p2"]


@pytest.mark.parametrize("database", ["mariadb"], indirect=True)
@pytest.mark.parametrize("ask", [DEBOUNCE, QUEUE])
def test_a_session_with_an_old_snapshot_sees_the_run_as_it_is(world: World, sync, ask: Any) -> None:
    """InnoDB's REPEATABLE READ: other reads show the rows of the snapshot."""
    instance = sync.run("p0")
    with world.session() as session:
        session.connection(execution_options={"isolation_level": "REPEATABLE READ"})
        session.execute(sa.text("SELECT * FROM workflow_run")).all()
        sync.create("p1", **QUEUE, run_at="10 seconds")
        sync.create("p2", **ask, session=session)
        session.commit()
    world.run_after(60)
    assert outputs(instance) == ["p0", "p2"]


# --- at the same time ------------------------------------------------------------------------------

rows_are_locked = pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)


def finish_while_held(world: World, hold: Callable[[Any], Any], work: Callable[[], Any]) -> Any:
    """Call ``hold`` with a session, start ``work``, which waits for the lock of the session, and commit."""
    with world.session() as session, world.store.engine.connect() as watching, ThreadPoolExecutor(1) as pool:
        hold(session)
        other = pool.submit(work)
        while not (other.done() or has_lock_wait(watching)):
            watching.rollback()
        session.commit()
        return other.result(timeout=30)


@rows_are_locked
@pytest.mark.parametrize(("ask", "first"), [(QUEUE, 1), (DEBOUNCE, 0)])
def test_a_first_claim_that_waits_for_the_request_has_the_new_parameters(
    world: World, sync, ask: Any, first: int
) -> None:
    """The claim of a new run returns its parameters, as it saw them before it waited (LAW 2b)."""
    instance = sync.create("p0")
    advance = partial(world.worker.advance, instance.ref)
    finish_while_held(world, lambda session: sync.create("p1", **ask, session=session), advance)
    assert [each for each in outputs(instance) if each is not None] == ["p1"] * first
    world.messages.clear()
    world.run_after(30)
    assert outputs(instance) == ["p1"]


@rows_are_locked
def test_a_run_whose_end_waits_for_the_request_is_followed(world: World) -> None:
    """Its one statement began before the request was committed."""
    sessions: list[Any] = []

    @world.workflow
    def sync(event: WorkflowEvent[str], step: Step) -> str:
        if sessions:
            sync.create("p1", **QUEUE, session=sessions.pop())
        return event.payload

    instance = sync.create("p0")
    with world.session() as session, world.store.engine.connect() as watching, ThreadPoolExecutor(1) as pool:
        sessions.append(session)
        other = pool.submit(world.worker.advance, instance.ref)
        while not (other.done() or has_lock_wait(watching)):
            watching.rollback()
        session.commit()
        other.result(timeout=30)
    world.run_until_idle()
    assert outputs(instance) == ["p0", "p1"]


@everywhere
@pytest.mark.parametrize("ask", [DEBOUNCE, QUEUE, SKIP])
@pytest.mark.parametrize("exists", [False, True])
def test_of_creates_at_once_each_is_done(world: World, sync, ask: Any, exists: bool) -> None:
    producers = [world.new_producer() for _ in range(4)]
    if exists:
        sync.run("p")
    with ThreadPoolExecutor(4) as pool:
        create = [partial(each.operations.create.instance, "sync", "p", id="i-1", **ask) for each in producers]
        list(pool.map(lambda call: call(), create * 3))
    world.accepted.append(("sync", "i-1"))
    world.run_after(30)
    assert outputs(world.instance("sync", "i-1")) == ["p"] * (1 + exists)


@rows_are_locked
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("ask", [QUEUE, SKIP])
def test_a_request_in_doubt_has_one_run_follow(world: World, sync, when: str, ask: Any) -> None:
    instance = sync.run("p0")
    with cut_commit(world.store, when=when, then=world.run_until_idle):
        sync.create("p1", **ask)
    world.run_until_idle()
    assert outputs(instance) == ["p0", "p1"]


@on_one_database
def test_a_worker_that_dies_at_the_end_of_the_run_loses_nothing(world: World, sync) -> None:
    scout = world.new_worker()
    sync.run("p0", id="scout")
    scout.runtime.is_dead = True
    begun = scout.runtime.passed.index("claimed")
    for number in range(begun + 1, len(scout.runtime.passed)):
        instance = sync.create("p0", id=f"at-{number}")
        victim = world.new_worker()
        victim.runtime.at[begun] = partial(sync.create, "p1", id=instance.id, **QUEUE)
        victim.runtime.crash_at = number
        world.run_until_idle()
        world.run_after(60)
        assert victim.runtime.is_dead
        assert outputs(instance) == ["p0", "p1"], number
