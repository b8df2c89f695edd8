"""Many new instances at once are the same rows as one after the other."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa

from celery_durable.model import PlannedStep, RunPlan, RunRef, WorkflowKind
from celery_durable.store.engine import Tx
from celery_durable.store.instances import batches, instances
from celery_durable.store.instances.batches import NewInstance
from celery_durable.store.schema import dialects
from tests.store.world import GRACE, World

LINEAR = RunPlan(WorkflowKind.LINEAR, (PlannedStep("PAY", 3, None), PlannedStep("SHIP", None, None)), version=4)
START: dict[str, Any] = {"queue": "slow", "grace": GRACE, "plan": RunPlan(), "retention": None}
HARD = '{"text":"it\'s \\"%s\\" :p_rows \\\\ \\u0000 \\ud800 ż 😀 \\n","big":9007199254740993,"none":null}'


def insert(world: World, *batch: NewInstance, commit_id: str = "batch", **given: Any) -> set[str]:
    return world.store.transact(lambda tx: batches.insert(tx, "order", batch, commit_id=commit_id, **START | given))


def new(id: str, params: str = "{}", **labels: str) -> NewInstance:
    return NewInstance(id, params, labels)


def rows(world: World, instance_id: str) -> dict[str, list[Any]]:
    """All rows of an instance but for its keys and its commit."""
    t = world.store.tables
    pk = world.store.read(lambda tx: instances.find_pk(tx, "order", instance_id))
    hidden = {"id", "instance_id", "instance_pk", "commit_id"}
    found = {}
    for table in (t.instance, t.run, t.step, t.label):
        shown = [column for column in table.c if column.name not in hidden]
        key = table.c.id if table is t.instance else table.c.instance_pk
        query = sa.select(*shown).where(key == pk).order_by(*shown)
        found[table.name] = [tuple(row) for row in world.store.read(lambda tx, query=query: tx.execute(query).all())]
    return found


@pytest.mark.parametrize("plan", [RunPlan(), LINEAR], ids=["replay", "linear"])
def test_a_batch_writes_the_rows_that_single_inserts_write(world: World, plan: RunPlan) -> None:
    given = START | {"plan": plan, "retention": GRACE}
    labels = {"tenant": "acme", "stage": "new"}
    single = {"params": HARD, "commit_id": "c", "initial_labels": labels}
    world.store.transact(lambda tx: instances.insert(tx, workflow="order", instance_id="one", **given, **single))
    assert insert(world, new("a"), new("b", HARD, **labels), **given) == {"a", "b"}
    assert rows(world, "b") == rows(world, "one")
    assert [len(found) for found in rows(world, "b").values()] == [1, 1, len(plan.steps), 2]


def test_a_batch_skips_the_ids_that_are_taken(world: World) -> None:
    world.create("b", params='"old"')
    before = rows(world, "b")
    assert insert(world, new("a"), new("b", '"new"', tenant="acme"), new("c")) == {"a", "c"}
    assert insert(world, new("a"), new("c")) == set()
    assert rows(world, "b") == before


def test_an_empty_batch_writes_nothing(world: World) -> None:
    assert insert(world) == set()


def test_a_batch_of_more_rows_or_text_than_one_statement_takes_is_divided(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dialects, "_MAX_ROWS", 3)
    monkeypatch.setattr(dialects, "_MAX_CHARACTERS", 10)
    batch = [new("a", "1"), new("b", "2"), new("c", "3"), new("d", '"12345678"'), new("e", "4"), new("f", "5")]
    assert [[each.instance_id for each in part] for part in dialects.divide(batch, lambda each: len(each.params))] == [
        ["a", "b", "c"],
        ["d"],
        ["e", "f"],
    ]
    assert insert(world, *batch) == set("abcdef")
    assert rows(world, "d")["workflow_run"][0][1] == '"12345678"'


def test_a_claim_finds_the_runs_of_a_batch(world: World) -> None:
    insert(world, *(new(f"o-{n}", f"{n}") for n in range(1_000)))
    claim = world.claim(RunRef("order", "o-999", 1))
    assert claim.new_run is not None
    assert claim.new_run.params == "999"


def test_what_a_commit_in_doubt_has_created_is_found_by_its_commit_id(world: World) -> None:
    world.create("b")
    insert(world, new("a"), new("b"), new("c"))

    def find(commit_id: str) -> set[str]:
        return world.store.read(lambda tx: batches.find_created(tx, "order", ["a", "b", "d"], commit_id=commit_id))

    assert (find("batch"), find("another")) == ({"a"}, set())


@pytest.mark.parametrize("ends", ["commits", "rolls back"])
@pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)
def test_a_batch_waits_for_another_one_with_common_ids(world: World, ends: str) -> None:
    with world.store.engine.connect() as connection:
        transaction = connection.begin()
        first = batches.insert(Tx(connection, world.store), "order", [new("a"), new("b")], commit_id="first", **START)
        second = world.start_blocked(lambda: insert(world, new("b"), new("c"), commit_id="second"))
        transaction.commit() if ends == "commits" else transaction.rollback()
    assert first == {"a", "b"}
    assert second.result(10) == ({"c"} if ends == "commits" else {"b", "c"})
