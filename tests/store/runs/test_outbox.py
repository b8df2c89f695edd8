"""The outbox: what is taken to be sent, and who has an event in hand. Two transactions where two may come."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from celery_durable.model import OutboxKind, OutboxMessage, to_us
from celery_durable.store.engine import Tx
from celery_durable.store.runs import outbox
from celery_durable.store.runs.outbox import Delivery
from tests.store.world import GRACE, REDISPATCH, World, seconds

SERVERS = pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)
LEASE = timedelta(minutes=5)


def message(id_: str = "m-1", kind: OutboxKind = OutboxKind.EVENT) -> OutboxMessage:
    return OutboxMessage(id_, kind, "OrderShipped", "{}")


def insert(world: World, *messages: OutboxMessage) -> None:
    world.store.transact(lambda tx: outbox.insert(tx, messages, pk=1, run_number=1, step_key="announce", grace=GRACE))


def begin_in(tx: Tx, token: str) -> Delivery | None:
    return outbox.begin_delivery(tx, "m-1", token=token, lease=LEASE)


def begin(world: World, token: str) -> Delivery | None:
    return world.store.transact(lambda tx: begin_in(tx, token))


def started(world: World, token: str) -> Delivery:
    delivery = begin(world, token)
    assert delivery is not None
    return delivery


def finish(world: World, delivery: Delivery) -> None:
    world.store.transact(lambda tx: outbox.finish_delivery(tx, delivery))


def give_back(world: World, delivery: Delivery, **how: Any) -> None:
    how = {"retry_in": seconds(0), "error": None} | how
    world.store.transact(lambda tx: outbox.release_delivery(tx, delivery, **how))


def take(world: World, limit: int = 10) -> list[str]:
    found = world.store.transact(lambda tx: outbox.lock_due(tx, limit=limit, redispatch=REDISPATCH))
    return [each.id for each in found]


def rows(world: World) -> list[Any]:
    o = world.store.tables.outbox
    return world.store.read(lambda tx: list(tx.execute(sa.select(o).order_by(o.c.id))))


def due_at(world: World) -> int:
    (row,) = rows(world)
    return row.run_at


# --- outbound events ----------------------------------------------------------------------------


@SERVERS
@pytest.mark.parametrize("first", ["commits", "rolls back"])
def test_of_two_workers_at_once_one_gets_the_event(world: World, first: str) -> None:
    insert(world, message())
    with world.store.engine.connect() as connection:
        transaction = connection.begin()
        assert begin_in(Tx(connection, world.store), "first") is not None
        second = world.start_blocked(begin, world, "second")
        transaction.commit() if first == "commits" else transaction.rollback()
    got = second.result()
    assert (got is None) == (first == "commits")
    assert [(row.claim_token, row.attempts) for row in rows(world)] == [("first" if got is None else "second", 1)]


def test_a_task_in_the_outbox_is_not_delivered_as_an_event(world: World) -> None:
    insert(world, message(kind=OutboxKind.TASK))
    assert begin(world, "first") is None


def test_only_the_token_that_began_finds_its_delivery(world: World) -> None:
    insert(world, message())
    delivery = started(world, "first")
    found = [
        world.store.transact(lambda tx, token=token: outbox.find_delivery(tx, "m-1", token=token))
        for token in ("first", "second")
    ]
    assert found == [delivery, None]


@pytest.mark.parametrize("end", [finish, give_back])
def test_a_worker_whose_lease_expired_does_not_end_the_delivery_of_another(world: World, end: Any) -> None:
    insert(world, message())
    late = started(world, "late")
    world.advance(LEASE.total_seconds())
    assert started(world, "other").attempt == 2
    before = rows(world)
    end(world, late)
    assert rows(world) == before


@SERVERS
@pytest.mark.parametrize("end", [finish, give_back])
def test_a_worker_that_ends_while_another_takes_over_ends_nothing(world: World, end: Any) -> None:
    insert(world, message())
    late = started(world, "late")
    world.advance(LEASE.total_seconds())
    with world.hold_transaction() as tx:
        assert begin_in(tx, "other") is not None
        run_outcome = world.start_blocked(end, world, late)
    run_outcome.result()
    assert [(row.claim_token, row.attempts, row.run_at) for row in rows(world)] == [
        ("other", 2, to_us(world.now + LEASE))
    ]


@SERVERS
@pytest.mark.parametrize("first", ["commits", "rolls back"])
def test_a_takeover_of_a_delivery_that_is_just_finishing_finds_no_row(world: World, first: str) -> None:
    insert(world, message())
    late = started(world, "late")
    world.advance(LEASE.total_seconds())
    with world.store.engine.connect() as connection:
        transaction = connection.begin()
        outbox.finish_delivery(Tx(connection, world.store), late)
        taking = world.start_blocked(begin, world, "other")
        transaction.commit() if first == "commits" else transaction.rollback()
    assert (taking.result() is None) == (first == "commits")


def test_a_delivery_that_was_given_back_does_not_count_as_an_attempt(world: World) -> None:
    insert(world, message())
    give_back(world, started(world, "first"), counts_as_attempt=False)
    assert started(world, "second").attempt == 1


def test_an_event_that_an_operator_retries_has_all_its_attempts(world: World) -> None:
    insert(world, message())
    give_back(world, started(world, "first"), retry_in=None, error="OSError: away")
    world.store.transact(lambda tx: outbox.retry(tx, ["m-1"]))
    assert take(world) == ["m-1"]
    assert started(world, "second").attempt == 1


def test_an_event_that_an_operator_retries_is_taken_from_its_worker(world: World) -> None:
    insert(world, message())
    late = started(world, "late")
    world.store.transact(lambda tx: outbox.retry(tx, ["m-1"]))
    finish(world, late)
    assert started(world, "second").attempt == 1


# --- sending ------------------------------------------------------------------------------------


def test_no_message_is_taken_before_its_grace_time_is_over(world: World) -> None:
    insert(world, message())
    world.advance(1.9)
    assert take(world) == []
    world.advance(0.1)
    assert take(world) == ["m-1"]


def test_the_oldest_messages_are_taken_first(world: World) -> None:
    for number in (2, 0, 1):
        insert(world, message(f"m-{number}"))
        world.advance(1)
    world.advance(2)
    assert [take(world, limit=1) for _ in range(4)] == [["m-2"], ["m-0"], ["m-1"], []]


def test_a_message_that_was_taken_but_not_sent_is_taken_again_after_longer_and_longer_times(world: World) -> None:
    insert(world, message())
    pauses = []
    for _ in range(10):
        (row,) = rows(world)
        pauses.append((row.next_check_at - to_us(world.now)) // 1_000_000)
        world.advance(pauses[-1])
        assert take(world) == ["m-1"]
    assert pauses == [2, 15, 17, 34, 68, 136, 272, 544, 600, 600]


@SERVERS
@pytest.mark.parametrize("first", ["commits", "rolls back"])
def test_two_sweeps_at_once_take_different_messages(world: World, first: str) -> None:
    insert(world, *(message(f"m-{n}") for n in range(4)))
    world.advance(3)
    with world.store.engine.connect() as connection:
        transaction = connection.begin()
        held = outbox.lock_due(Tx(connection, world.store), limit=2, redispatch=REDISPATCH)
        assert len(held) == 2
        others = world.start(take, world).result()
        transaction.commit() if first == "commits" else transaction.rollback()
    ids = {each.id for each in held}
    assert set(others) == {f"m-{n}" for n in range(4)} - ids
    assert set(take(world)) == (set() if first == "commits" else ids)


def test_messages_that_the_broker_did_not_accept_are_offered_again_soon(world: World) -> None:
    insert(world, message())
    world.advance(3)
    take(world)
    world.store.transact(lambda tx: outbox.postpone(tx, [message()], delay=seconds(1)))
    world.advance(1)
    assert take(world) == ["m-1"]


def test_a_message_that_was_given_up_meanwhile_is_not_offered_again(world: World) -> None:
    insert(world, message())
    give_back(world, started(world, "first"), retry_in=None, error="OSError: away")
    world.store.transact(lambda tx: outbox.postpone(tx, [message()], delay=seconds(1)))
    world.advance(10)
    assert take(world) == []


def test_only_the_named_messages_are_deleted(world: World) -> None:
    insert(world, *(message(f"m-{n}") for n in range(3)))
    world.store.transact(lambda tx: outbox.delete(tx, ["m-0", "m-2"]))
    assert [row.id for row in rows(world)] == ["m-1"]
    world.store.transact(lambda tx: outbox.delete(tx, [f"m-{n}" for n in reversed(range(1200))]))
    assert rows(world) == []


def test_the_messages_that_exist_are_found(world: World) -> None:
    insert(world, message("m-0"), message("m-1"))
    present = world.store.read(lambda tx: outbox.find_existing(tx, ["m-1", "m-7"]))
    assert present == frozenset({"m-1"})


def test_a_sweep_leaves_each_further_part_of_a_batch_to_its_sender_for_longer(world: World) -> None:
    insert(world, *(message(f"m-{number:04}", OutboxKind.TASK) for number in range(2 * outbox.PART_SIZE + 1)))
    due_at = [row.next_check_at - row.created_at for row in rows(world)]
    grace, more = to_us(world.now + GRACE) - to_us(world.now), 50_000
    assert due_at == [grace] * outbox.PART_SIZE + [grace + more] * outbox.PART_SIZE + [grace + 2 * more]


def test_a_late_sender_keeps_the_messages_that_no_sweep_has_taken(world: World) -> None:
    taken, left = message("m-1", OutboxKind.TASK), message("m-2", OutboxKind.TASK)
    insert(world, taken)
    world.advance(GRACE.total_seconds())
    insert(world, left)
    assert take(world) == ["m-1"]
    kept = world.store.transact(lambda tx: outbox.keep(tx, [taken, left], grace=GRACE))
    assert kept == [left]
    world.advance(GRACE.total_seconds() / 2)
    assert take(world) == []


@SERVERS
def test_a_late_sender_waits_for_a_sweep_that_takes_its_messages(world: World) -> None:
    sent = message("m-1", OutboxKind.TASK)
    insert(world, sent)
    world.advance(GRACE.total_seconds())

    def take_first(tx: Tx) -> Any:
        assert outbox.lock_due(tx, limit=10, redispatch=REDISPATCH) == [sent]
        return world.start_blocked(world.store.transact, lambda tx: outbox.keep(tx, [sent], grace=GRACE))

    assert world.store.transact(take_first).result() == []
