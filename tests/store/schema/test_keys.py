"""Names are compared byte by byte on every database: case, accents and trailing blanks tell them apart."""

from __future__ import annotations

import pytest

from celery_durable.model import RunRef
from celery_durable.store.events import run_events
from tests.store.world import World, step

LOOK_ALIKES = ["Order-1", "order-1", "ORDER-1", "é", "e", "e\u0301", "a", "a ", "a  ", "ß", "ss", "😀", "😁"]


def test_look_alike_ids_are_different_instances(world: World) -> None:
    refs = {name: world.create(name) for name in LOOK_ALIKES}
    assert len({world.row(ref).pk for ref in refs.values()}) == len(LOOK_ALIKES)
    for name, ref in refs.items():
        assert world.row(ref).instance_id == name
        assert world.claim(ref).ref == RunRef("order", name, 1)


def test_look_alike_workflows_are_different(world: World) -> None:
    for name in LOOK_ALIKES:
        world.create("o-1", workflow=name)
    for name in LOOK_ALIKES:
        assert world.row(RunRef(name, "o-1", 1)).workflow == name


def test_look_alike_steps_are_different(world: World) -> None:
    claim = world.claim(world.create())
    for seq, name in enumerate(LOOK_ALIKES):
        world.commit(claim, step(name, seq=seq, result=f"{seq}"))
    assert [row.step_key for row in world.steps(claim)] == LOOK_ALIKES
    for name in LOOK_ALIKES:
        world.commit(claim, step(name, replaces=f"commit-{name}", result=f'"{name}"'))
    assert {row.step_key: row.result for row in world.steps(claim)} == {name: f'"{name}"' for name in LOOK_ALIKES}


@pytest.mark.parametrize("sent", ["Approval", "approval "])
def test_a_look_alike_event_type_does_not_end_a_wait(world: World, sent: str) -> None:
    ref = world.create()
    claim = world.claim(ref)
    world.send(ref, sent)
    found = world.store.transact(
        lambda tx: run_events.find_oldest_event(tx, claim, "approval", key="w", deadline=world.now)
    )
    assert found is None
    world.wait(claim, event="approval")
    assert world.send(ref, sent) is False


def test_look_alike_event_ids_are_different_events(world: World) -> None:
    ref = world.create()

    def send(id: str) -> bool:
        given = {"type_": "a", "payload": "1", "event_id": id}
        return world.change(ref, lambda tx, row: run_events.insert_event(tx, row, **given) is not None)

    assert [send(name) for name in LOOK_ALIKES] == [True] * len(LOOK_ALIKES)
    assert [send(name) for name in LOOK_ALIKES] == [False] * len(LOOK_ALIKES)


def test_a_claim_is_held_only_by_exactly_its_token(world: World) -> None:
    ref = world.create()
    claim = world.claim(ref)
    i = world.store.tables.instance
    world.store.transact(lambda tx: tx.execute(i.update().values(claim_token=claim.token.upper())))
    with pytest.raises(BaseException, match=r"order/o-1#1"):
        world.commit(claim, step())
