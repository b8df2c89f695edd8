"""What is kept how long after its end, and what is deleted with it."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest
import sqlalchemy as sa

from celery_durable import Step, WorkflowEvent
from celery_durable.errors import ValueRefused
from celery_durable.model import Count, RunRef
from celery_durable.store.instances import instances, lifecycle, retention
from celery_durable.store.instances.retention import EndedFilter
from tests.support.world import World, on_one_database

everywhere = pytest.mark.parametrize("database", ["sqlite", "postgresql", "mariadb"], indirect=True)


def forget(world: World) -> None:
    """What was promised to be kept is deleted on purpose."""
    for promised in (world.accepted, world.accepted_events, world.prior_runs):
        promised.clear()


@pytest.fixture
def world(world: World) -> Iterator[World]:
    yield world
    forget(world)


def rows(world: World) -> dict[str, int]:
    """How many rows there are, by table, of those that belong to instances."""
    store = world.store

    def count(tx) -> dict[str, int]:
        tables = [tx.t.instance, *(t for t in tx.t.metadata.sorted_tables if "instance_pk" in t.c)]
        return {t.name: tx.execute(sa.select(sa.func.count()).select_from(t)).scalar_one() for t in tables}

    return {name: number for name, number in store.read(count).items() if number}


def busy(event: WorkflowEvent, step: Step) -> str:
    step.log.info("started")
    step.do("work", lambda: 1)
    return step.wait_for_event("approval", "approval", timeout="90 days").type


@everywhere
def test_an_ended_instance_is_deleted_when_its_retention_is_over_with_all_its_runs(world: World) -> None:
    order = world.workflow(busy, name="order", retention="30 days")
    gone, kept = order.run(id="gone"), order.run(id="kept")
    gone.restart()
    world.run_until_idle()
    for instance in (gone, kept):
        instance.send("approval")
    world.run_until_idle()
    assert (gone.status, kept.status) == ("complete", "complete")
    world.advance(timedelta(days=29, hours=23))
    assert world.delete_expired() == 0
    kept.restart()
    world.run_until_idle()
    world.advance(timedelta(hours=1))
    assert world.delete_expired() == 1
    assert [item.id for item in world.operations.queries.list("order").items] == ["kept"]
    assert rows(world)["workflow_instance"] == 1
    kept.terminate()
    world.advance(timedelta(days=30))
    assert (world.delete_expired(), rows(world)) == (1, {})


@everywhere
def test_a_message_that_is_not_delivered_yet_outlives_its_instance(world: World) -> None:
    def announce(event: WorkflowEvent, step: Step) -> None:
        step.do("announce", lambda tx: tx.send_outbound("OrderShipped", 7))

    world.workflow(announce, name="order", retention="1 hour").run()
    world.advance(timedelta(hours=1))
    assert world.delete_expired() == 1
    assert rows(world) == {"workflow_outbox": 1}


@on_one_database
def test_a_workflow_says_otherwise_than_the_app(make_world) -> None:
    world = make_world(retention_seconds=60.0)

    def nothing(event: WorkflowEvent, step: Step) -> None:
        return None

    world.workflow(nothing, name="as_the_app_says").run()
    world.workflow(nothing, name="longer", retention="4 minutes").run()
    world.workflow(nothing, name="for_ever", retention=None).run()
    left = []
    for _ in range(3):
        world.advance(120)
        world.delete_expired()
        left.append(sorted(item.workflow for item in world.operations.queries.list().items))
    forget(world)
    assert left == [["for_ever", "longer"], ["for_ever"], ["for_ever"]]


@on_one_database
def test_a_later_change_of_the_retention_applies_to_new_instances_only(world: World) -> None:
    early = world.workflow(busy, name="order", retention="1 day").run(id="early")
    world.run_until_idle()
    later = world.workflow(busy, name="order", retention="3 days").run(id="later")
    world.run_until_idle()
    for instance in (early, later):
        instance.send("approval")
    world.run_until_idle()
    assert (early.status, later.status) == ("complete", "complete")
    world.advance(timedelta(days=2))
    assert world.delete_expired() == 1
    assert [item.id for item in world.operations.queries.list("order").items] == ["later"]


@on_one_database
def test_without_a_retention_everything_is_kept(world: World) -> None:
    instance = world.workflow(lambda event, step: None, name="order").run()
    world.advance(timedelta(days=365 * 50))
    assert (world.delete_expired(), instance.status) == (0, "complete")


@on_one_database
def test_children_and_batches_keep_what_their_workflow_says(world: World) -> None:
    def nothing(event: WorkflowEvent, step: Step) -> None:
        return None

    child = world.workflow(nothing, name="child", retention=1)

    def parent(event: WorkflowEvent, step: Step) -> None:
        step.do("spawn", lambda tx: tx.create(child, id="c-1"))

    world.workflow(parent, name="parent").run()
    world.run_until_idle()
    world.advance(1)
    assert world.delete_expired() == 1
    assert [item.workflow for item in world.operations.queries.list().items] == ["parent"]


@everywhere
def test_pruning_deletes_what_ended_long_ago_and_nothing_else(world: World) -> None:
    order = world.workflow(busy, name="order")
    old, errored, live = order.run(id="old"), order.run(id="errored"), order.run(id="live")
    world.workflow(lambda event, step: None, name="other").run(id="other")
    old.send("approval")
    errored.terminate()
    world.run_until_idle()
    world.advance(timedelta(days=1))
    world.workflow(lambda event, step: None, name="young").run(id="young")
    operations = world.operations
    assert operations.retention.count_ended(older_than="1 day") == Count(3)
    assert operations.retention.count_ended(older_than="1 day", workflow="order") == Count(2)
    assert operations.retention.prune(older_than="1 day", workflow="order", statuses=["complete"]) == 1
    assert operations.retention.prune(older_than="1 day", workflow="no such\x00name") == 0
    assert operations.retention.prune(older_than="1 day") == 2
    assert {item.id for item in operations.queries.list().items} == {"live", "young"}
    assert operations.retention.prune(older_than="0 s") == 1
    assert live.status == "waiting"


@everywhere
def test_a_pass_whose_instance_is_deleted_before_it_is_loaded_stops_without_an_error(world: World) -> None:
    """Terminated and pruned between the claim and the load: there is no row to begin with."""
    instance = world.workflow(busy, name="order").create(id="o-1")
    web, worker = world.new_producer(), world.new_worker()

    def delete() -> None:
        web.operations.lifecycle.terminate("order", instance.id)
        assert web.operations.retention.prune(older_than="0 s") == 1

    worker.runtime.at["claimed"] = delete
    said = worker.advance(RunRef("order", instance.id, 1))
    assert said == "superseded: the instance was taken over, restarted or ended meanwhile"
    assert rows(world) == {}


@on_one_database
def test_pruning_refuses_what_has_not_ended(world: World) -> None:
    with pytest.raises(ValueRefused, match=r"^Instances that are waiting cannot be pruned: terminate them first\.$"):
        world.operations.retention.prune(older_than="1 day", statuses=["complete", "waiting"])


@on_one_database
def test_more_than_one_batch_is_pruned(world: World) -> None:
    order = world.workflow(lambda event, step: None, name="order")
    for number in range(60):
        order.run(id=f"o-{number}")
    world.advance(1)
    assert world.operations.retention.prune(older_than=1) == 60
    assert rows(world) == {}


@pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)
def test_an_instance_that_somebody_holds_is_left_for_another_time(world: World) -> None:
    """A restart that comes first keeps its instance; one that comes later finds none."""
    instance = world.workflow(lambda event, step: None, name="order").run(id="o-1")
    deleted, other = [], world.new_producer().store

    def restart(tx) -> None:
        row = instances.lock(tx, "order", "o-1")
        deleted.append(
            other.transact(lambda tx: retention.delete_ended(tx, EndedFilter(timedelta(0)), limit=5)).deleted
        )
        lifecycle.restart(tx, row, grace=timedelta(0), commit_id="again", reason=None)

    world.store.transact(restart)
    world.run_after(5)  # nobody has sent a hint of it
    assert (deleted, instance.status) == ([0], "complete")


@pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)
@pytest.mark.parametrize("delete", ["expired", "pruned"])
def test_what_is_restarted_between_the_search_and_the_lock_is_kept(world: World, delete: str) -> None:
    """The search reads without locks, so what it found is judged again by the statement that locks."""
    order = world.workflow(busy, name="order", retention="1 day")
    instance = order.run()
    instance.send("approval")
    world.run_until_idle()
    world.advance(timedelta(days=2))
    web, restarted = world.new_producer(), []

    def restart(connection, cursor, statement: str, *_: object) -> None:
        if "FOR UPDATE" in statement and not restarted:
            restarted.append(web.operations.rewind.restart("order", instance.id))

    def work(tx) -> int:
        if delete == "expired":
            return retention.delete_expired(tx, limit=10)
        return retention.delete_ended(tx, EndedFilter(timedelta(days=1)), limit=10).deleted

    sa.event.listen(world.store.engine, "before_cursor_execute", restart)
    try:
        deleted = world.store.transact(work)
    finally:
        sa.event.remove(world.store.engine, "before_cursor_execute", restart)
    assert (restarted, deleted) == ([2], 0)
    assert (instance.status, instance.row.run_number) == ("active", 2)
    assert [step.name for step in instance.steps(run=1)] == ["work", "approval"]


@everywhere
def test_what_began_long_ago_and_ended_just_now_is_not_pruned(world: World) -> None:
    order = world.workflow(busy, name="order")
    instance = order.run()
    world.advance(timedelta(days=80))
    instance.send("approval")
    world.run_until_idle()
    world.advance(timedelta(minutes=1))
    assert world.operations.retention.count_ended(older_than="30 days") == Count(0)
    assert world.operations.retention.prune(older_than="30 days") == 0
    assert instance.status == "complete"
    world.advance(timedelta(days=30))
    assert world.operations.retention.prune(older_than="30 days") == 1
