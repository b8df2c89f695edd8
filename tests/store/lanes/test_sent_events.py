"""The one statement that sends an event."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
import sqlalchemy as sa

from celery_durable.model import Claim, DueRun, RunRef, StepStatus, StepType, to_us
from celery_durable.store.engine import Tx
from celery_durable.store.instances import instances, lifecycle
from celery_durable.store.lanes import sent_events
from celery_durable.store.lanes.sent_events import SentEvent
from tests.store.world import GRACE, World, seconds, send_in, step, wait_in

pytestmark = pytest.mark.parametrize("database", ["postgresql"], indirect=True)

_numbers = count(1)


def send(world: World, ref: RunRef, type_: str = "approval", id: str | None = None) -> SentEvent | None:
    event = {"type_": type_, "payload": "{}", "event_id": id or f"sent-{next(_numbers)}", "grace": GRACE}
    return world.store.run_statement(lambda tx: sent_events.send(tx, ref.workflow, ref.instance_id, **event))


def wait(world: World, ref: RunRef, *, for_: float = 3600) -> Claim:
    claim = world.claim(ref)
    world.wait(claim, for_=for_)
    return claim


def start_later(world: World, ref: RunRef) -> None:
    """Make it wait for its start."""
    world.pause(ref)
    later = to_us(world.now + seconds(60))
    i = world.store.tables.instance
    with world.store.engine.begin() as connection:
        connection.execute(
            sa.update(i).where(i.c.instance_id == ref.instance_id).values(status="waiting", next_check_at=later)
        )


STATES: dict[str, Any] = {
    "due": lambda world, ref: None,
    "runs": lambda world, ref: world.claim(ref),
    "waits": wait,
    "waits for another type": lambda world, ref: world.wait(world.claim(ref), event="refusal"),
    "sleeps": lambda world, ref: world.wait(world.claim(ref), event=None),
    "waits and is paused": lambda world, ref: (wait(world, ref), world.pause(ref)),
    "woken already": lambda world, ref: (wait(world, ref), world.send(ref, id="earlier")),
    "waits for its start": start_later,
    "waits no longer": lambda world, ref: wait(world, ref, for_=60),
    "waits in its second run": lambda world, ref: wait(world, world.restart(ref).ref),
}


@pytest.mark.parametrize("bring", STATES.values(), ids=STATES)
def test_it_leaves_the_rows_that_a_transaction_leaves(world: World, bring: Any) -> None:
    refs = [world.create(name, commit_id="created") for name in ("o-1", "o-2")]
    for ref in refs:
        bring(world, ref)
    world.advance(60)
    version = world.row(refs[0]).version
    sent = send(world, refs[0], id="mine")
    assert sent is not None
    assert sent.inserted.seq == world.row(refs[0]).version == version + 1
    is_woken = world.store.transact(lambda tx: send_in(tx, refs[1], id="mine"))
    assert (sent.due_run is not None) is is_woken
    if sent.due_run is not None:
        assert sent.due_run == DueRun(world.row(refs[0]).ref, "durable")
    assert read_rows(world, refs[0]) == read_rows(world, refs[1])


def read_rows(world: World, ref: RunRef) -> list[dict[str, Any]]:
    """Return the rows of an instance and its events, without what names the instance or its claim.

    Also without its version, which a transaction increments twice if it wakes the run.
    """
    t = world.store.tables
    own = {"id", "instance_id", "instance_pk", "claim_token", "version"}
    with world.store.engine.connect() as connection:
        instance = connection.execute(sa.select(t.instance).where(t.instance.c.instance_id == ref.instance_id))
        rows = [instance.mappings().one()]
        events = sa.select(t.event).where(t.event.c.instance_pk == rows[0]["id"]).order_by(t.event.c.seq)
        rows += connection.execute(events).mappings()
    return [{name: value for name, value in row.items() if name not in own} for row in rows]


def test_it_says_what_it_has_inserted(world: World) -> None:
    ref = world.create()
    first, second = send(world, ref), send(world, ref)
    assert first is not None
    assert second is not None
    assert (first.inserted.run_number, first.inserted.created_at) == (1, world.now)
    assert second.inserted.seq == first.inserted.seq + 1


def test_the_wait_of_a_linear_step_is_woken(world: World) -> None:
    ref = world.create()
    claim = world.claim(ref)
    write = step("approved", StepStatus.LINEAR_WAITING, type=StepType.LINEAR, event_type="approval", wake_in=GRACE)
    world.store.transact(lambda tx: wait_in(tx, claim, write))
    sent = send(world, ref)
    assert sent is not None
    assert sent.due_run == DueRun(ref, "durable")


def wait_for_checked(world: World, ref: RunRef) -> None:
    given = {"type": StepType.WAIT, "event_type": "approval", "payload_type": "shop:Approval", "wake_in": GRACE}
    claim, write = world.claim(ref), step("approved", StepStatus.WAITING, **given)
    world.store.transact(lambda tx: wait_in(tx, claim, write))


@pytest.mark.parametrize(
    "bring", [None, World.terminate, wait_for_checked], ids=["unknown", "ended", "checks the payload"]
)
def test_an_instance_that_takes_no_such_event_is_left_to_the_transaction(world: World, bring: Any) -> None:
    ref = RunRef("order", "o-2", 1)
    world.create()
    if bring is not None:
        bring(world, world.create("o-2"))
    before = world.read_all_rows()
    assert send(world, ref) is None
    assert world.read_all_rows() == before


# --- what happens while it waits for the lock (LAW 2b) --------------------------------------------


def test_it_does_not_overlook_the_wait_that_began_meanwhile(world: World) -> None:
    """Its snapshot shows no wait, and the wait has found no event. So without the check, the run would not be woken."""
    ref = world.create()
    claim = world.claim(ref)
    write = step("approved", StepStatus.WAITING, type=StepType.WAIT, event_type="approval", wake_in=seconds(3600))
    with world.hold_transaction() as tx:
        wait_in(tx, claim, write)
        sender = world.start_blocked(send, world, ref)
    assert sender.result() is None
    assert world.send(ref) is True


def test_it_does_not_wake_the_run_that_another_event_has_woken(world: World) -> None:
    ref = world.create()
    wait(world, ref)
    with world.hold_transaction() as tx:
        assert send_in(tx, ref)
        sender = world.start_blocked(send, world, ref)
    assert sender.result() is None


@pytest.mark.parametrize("change", ["pause", "restart", "terminate"])
def test_it_changes_nothing_if_the_instance_has_changed(world: World, change: str) -> None:
    ref = world.create()
    wait(world, ref)
    changes: dict[str, Any] = {
        "pause": lifecycle.pause,
        "restart": lambda tx, row: lifecycle.restart(tx, row, grace=GRACE, commit_id="again", reason=None),
        "terminate": lambda tx, row: lifecycle.terminate(tx, row, reason=None),
    }
    with world.hold_transaction() as tx:
        changes[change](tx, instances.lock(tx, ref.workflow, ref.instance_id))
        sender = world.start_blocked(send, world, ref)
    before = world.read_all_rows()
    assert sender.result() is None
    assert world.read_all_rows() == before


def test_it_goes_on_behind_a_lock_that_changed_nothing(live: World) -> None:
    """All times are after the wait for the lock (LAW 4)."""
    ref = live.create()
    wait(live, ref)

    def hold(tx: Tx) -> int:
        instances.lock(tx, ref.workflow, ref.instance_id)
        sender.append(live.start_blocked(send, live, ref))
        return int(tx.execute(sa.select(tx.store.clock())).scalar_one())

    sender: list[Any] = []
    with live.hold_transaction() as tx:
        released_us = hold(tx)
    sent = sender[0].result()
    assert sent.due_run == DueRun(ref, "durable")
    row = live.row(ref)
    assert row.run_at == row.updated_at == sent.inserted.created_at
    assert sent.inserted.created_us >= released_us
