"""Reading instances: one by its id, lists, the history."""

from __future__ import annotations

from datetime import timedelta

import pydantic
import pytest

from celery_durable import CreateOptions, Step, WorkflowEvent
from celery_durable.errors import CursorInvalid, InstanceNotFound, ValueRefused
from celery_durable.model import Scope, Status
from celery_durable.store.engine import Tx
from celery_durable.testing import START
from tests.support.world import World, on_one_database


class OrderIn(pydantic.BaseModel):
    order_id: str
    cents: int = 5


@pytest.fixture
def order(world: World):
    @world.workflow
    def order(event: WorkflowEvent[OrderIn], step: Step):
        return f"{event.payload.order_id}: {event.payload.cents}"

    return order


GOOD = {"order_id": "42"}


def test_an_id_that_no_instance_has_or_can_have_is_not_found_on_any_database(world: World, order) -> None:
    for method in (
        world.operations.queries.get,
        world.operations.history.read,
        world.operations.history.logs,
        world.operations.lifecycle.pause,
        world.operations.lifecycle.resume,
        world.operations.lifecycle.terminate,
        world.operations.rewind.restart,
        lambda workflow, id_: world.operations.events.send(workflow, id_, "approval"),
    ):
        with pytest.raises(InstanceNotFound) as caught:
            method("order", "missing")
        assert str(caught.value) == (
            "Workflow 'order' has no instance 'missing'. Check the id, or list the workflow's instances."
        )
        for id_ in ("", "NUL \x00", "half \ud800", "x" * 300, "no spaces", 5, None):
            with pytest.raises(InstanceNotFound):
                method("order", id_)
        with pytest.raises(InstanceNotFound):
            method("NUL \x00", "i-1")


def create_many(world: World, count: int) -> None:
    world.operations.create.batch("order", [CreateOptions(f"o-{n}", GOOD) for n in range(count)])


def test_instances_are_listed_newest_first_a_page_at_a_time(world: World, order) -> None:
    create_many(world, 7)
    seen, cursor = [], None
    for _ in range(4):
        page = world.operations.queries.list("order", cursor=cursor, limit=3)
        seen.append([item.id for item in page.items])
        cursor = page.cursor
        if cursor is None:
            break
        order.create(GOOD, id=f"newer-{len(seen)}")  # comes before every page that is still to be read
    assert seen == [["o-6", "o-5", "o-4"], ["o-3", "o-2", "o-1"], ["o-0"]]


def test_a_page_that_is_just_full_is_the_last(world: World, order) -> None:
    create_many(world, 3)
    page = world.operations.queries.list("order", limit=3)
    assert (len(page.items), page.cursor) == (3, None)


def test_instances_are_listed_by_workflow_and_status(world: World, order) -> None:
    @world.workflow
    def invoice(event: WorkflowEvent, step: Step):
        raise ValueError("no")

    order.run(GOOD, id="done")
    invoice.run(id="failed")
    order.create(GOOD, id="new", run_at=START + timedelta(days=1))

    def found(*args, **options) -> list[str]:
        return [item.id for item in world.operations.queries.list(*args, **options).items]

    assert found() == ["new", "failed", "done"]
    assert found("order") == ["new", "done"]
    assert found("order", status=Status.WAITING) == ["new"]
    assert found(status=Status.ERRORED) == ["failed"]
    assert found("unknown") == []
    failed = world.operations.queries.list(status=Status.ERRORED).items[0]
    assert (failed.workflow, failed.error.name, failed.error.message) == ("invoice", "ValueError", "no")


@on_one_database
def test_a_cursor_of_another_make_and_a_page_of_an_impossible_size_are_refused(world: World, order) -> None:
    for cursor in ("", "x", "bm90IGpzb24", "WyJ4IiwgMV0", "WyJpIiwgIjEiXQ", "ü"):
        with pytest.raises(CursorInvalid) as caught:
            world.operations.queries.list("order", cursor=cursor)
        assert str(caught.value) == (
            f"Cursor {cursor!r} was not made by this list with this filter, for this caller. Start again without a "
            "cursor."
        )
    for limit in (0, -1, 1001, "5", 2.5, None, True):
        with pytest.raises(ValueRefused) as refused:
            world.operations.queries.list("order", limit=limit)
        assert str(refused.value) == f"A page of {limit!r} items is not possible: ask for 1 to 1000."


def test_an_id_is_found_in_several_workflows(world: World, order) -> None:
    @world.workflow
    def refund(event: WorkflowEvent[None], step: Step) -> None: ...

    queries = world.operations.queries
    world.operations.create.instance("order", GOOD, id="a-1", labels={"tenant": "acme"})
    world.operations.create.instance("refund", id="a-1", labels={"tenant": "other"})
    world.operations.create.instance("refund", id="a-2")
    assert [each.workflow for each in queries.find("a-1", ["order", "refund", "\0"])] == ["refund", "order"]
    assert [each.labels for each in queries.find("a-1", ["order"])] == [{"tenant": "acme"}]
    assert queries.find("a-1", []) == []
    assert queries.find("a\0", ["order"]) == queries.find("\ud800", ["order"]) == []
    for scope, found in (
        (Scope(labels={"tenant": "acme"}), ["order"]),
        (Scope(id_prefix="a-"), ["refund", "order"]),
        (Scope(id_prefix="b-"), []),
    ):
        restricted = world.operations.restrict_to(scope).queries
        assert [each.workflow for each in restricted.find("a-1", ["order", "refund"])] == found
    with pytest.raises(ValueRefused) as refused:
        queries.find("a-1", [str(number) for number in range(201)])
    assert str(refused.value) == "There are 201 workflows: choose one, or search for workflow/id."


def test_the_history_tells_what_a_run_was_given_and_when_it_began_and_ended(world: World, order) -> None:
    order.create(GOOD, id="o-1")
    world.advance(5)
    world.run_until_idle()
    history = world.operations.history.read("order", "o-1")
    assert (history.params, history.created_at) == ({"order_id": "42", "cents": 5}, START)
    assert (history.started_at, history.completed_at) == (world.now, world.now)
    assert (history.status.status, history.status.output) == ("complete", "42: 5")


def test_a_status_is_read_without_building_a_statement(world: World, order, monkeypatch: pytest.MonkeyPatch) -> None:
    instance = order.run(GOOD)
    with monkeypatch.context() as patch:
        patch.setattr(Tx, "execute", None)  # runs statements that are built for one call
        assert instance.output == "42: 5"
