"""Transactions that lock two instances lock the older one first, so that they cannot deadlock.

The first transaction is held open after its first lock and still needs the other row. If the second transaction had
locked that row, both would wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from celery_durable import Step, StepConfig, StepTx, WorkflowEvent
from celery_durable.errors import InstanceTerminal
from celery_durable.model import RunRef
from tests.pairs.environment import Environment, PairProcess
from tests.pairs.pausable_job import START, HoldAt, PausableJob, pass_gate
from tests.support import invariants

PARENT, KID = RunRef("parent", "p-1", 1), RunRef("kid", "k-1", 1)


@dataclass(frozen=True)
class LocksBoth:
    """An operation that locks parent and child. ``after`` is how many transactions with locks it commits before."""

    name: str
    work: Callable[[PairProcess], Any]
    gate: str = START
    naps: bool = False
    after: int = 0


PARENT_SENDS = LocksBoth("a parent that tells its child", lambda process: process.advance(PARENT), gate="say")
OTHERS = (
    LocksBoth("a child that tells its parent", lambda process: process.advance(KID), gate="reply"),
    LocksBoth("a child that ends", lambda process: process.advance(KID), gate="end"),
    LocksBoth("the termination of a child", lambda process: process.operations.lifecycle.terminate("kid", "k-1")),
    LocksBoth("a child that overstays", lambda process: process.advance(KID), naps=True, after=1),
)


def register(environment: Environment, *, naps: bool) -> None:
    """Register a parent and its child, which send each other events."""

    @environment.world.workflow(max_run_duration="1 hour")
    def kid(event: WorkflowEvent, step: Step) -> str:
        if naps:
            step.sleep("nap", "1 day")
        step.do("reply", reply)
        pass_gate("end")
        return "grown up"

    def reply(tx: StepTx) -> None:
        pass_gate("reply")
        tx.send_event(parent, "p-1", "reply", "yes")

    def say(tx: StepTx) -> None:
        pass_gate("say")
        tx.send_event(kid, "k-1", "say", "go")

    @environment.world.workflow
    def parent(event: WorkflowEvent, step: Step) -> Any:
        both = (step.submit_child("kid", kid, id="k-1"), step.submit("say", StepConfig(retries=0), say))
        return [str(each) for each in step.gather(*both, return_exceptions=True)]


@pytest.mark.parametrize("is_parent_first", [True, False], ids=["parent first", "child first"])
@pytest.mark.parametrize("other", OTHERS, ids=lambda other: other.name)
def test_rows_of_two_instances_are_locked_in_one_order(
    environment: Environment, other: LocksBoth, is_parent_first: bool
) -> None:
    environment.clear()
    world = environment.world
    register(environment, naps=other.naps)
    world.operations.create.instance("parent", id="p-1")
    parent_sends = environment.start(lambda: PARENT_SENDS.work(environment.first), gate=PARENT_SENDS.gate)
    if other.naps:
        environment.second.advance(KID)
        environment.advance(3601)
    jobs = [parent_sends, environment.start(lambda: other.work(environment.second), gate=other.gate)]
    first, second = jobs if is_parent_first else reversed(jobs)
    first.hold(HoldAt.LOCK, after=0 if first is parent_sends else other.after)
    first.proceed()
    first.wait()
    assert first.is_held
    second.proceed()
    has_met = environment.wait_until_blocked(second)
    first.proceed()
    assert [job.future.result(30) for job in jobs]
    assert has_met
    assert environment.repeats() == 0, "a deadlock: a transaction was repeated"
    invariants.check(world)
    environment.advance(61)
    world.run_until_idle()
    assert str(world.instance("parent", "p-1").status) == "complete"
    invariants.check(world)


@pytest.mark.parametrize("at", HoldAt)
def test_a_run_that_exceeds_its_duration_does_not_deadlock_with_an_event(environment: Environment, at: HoldAt) -> None:
    """The two statements find the row by different indexes, and MariaDB locks the index entries too."""
    environment.clear()
    register(environment, naps=True)
    environment.world.operations.create.instance("kid", id="k-1")
    environment.second.advance(KID)
    environment.advance(3601)
    overstays = environment.start(lambda: environment.first.advance(KID))
    overstays.hold(at, after=1)
    sends = send_event_while_held(environment, overstays, KID)
    assert overstays.future.result(30).startswith("terminated")
    with pytest.raises(InstanceTerminal):
        sends.future.result(30)
    assert environment.repeats() == 0, "a deadlock: a transaction was repeated"


@pytest.mark.parametrize("at", HoldAt)
def test_a_step_that_sends_an_event_to_its_own_instance_does_not_deadlock(environment: Environment, at: HoldAt) -> None:
    environment.clear()

    @environment.world.workflow
    def alone(event: WorkflowEvent, step: Step) -> Any:
        step.do("note", note)
        return [step.wait_for_event(name, "note").payload for name in ("read", "read the other")]

    def note(tx: StepTx) -> None:
        pass_gate("note")
        tx.send_event(alone, "a-1", "note", "to myself")

    ref = RunRef("alone", environment.world.operations.create.instance("alone", id="a-1"), 1)
    notes = environment.start(lambda: environment.first.advance(ref), gate="note")
    notes.hold(at)
    sends = send_event_while_held(environment, notes, ref)
    assert sends.future.result(30) is True
    assert notes.future.result(30)
    assert environment.repeats() == 0, "a deadlock: a transaction was repeated"
    environment.first.advance(ref)  # the pass may have ended before the event of the other process
    assert environment.world.instance("alone", "a-1").output == ["to myself", None]
    invariants.check(environment.world)


def send_event_while_held(environment: Environment, holder: PausableJob, ref: RunRef) -> PausableJob:
    """Send an event while ``holder`` holds the lock, and then let the holder proceed."""
    sends = environment.start(
        lambda: environment.second.operations.events.send(ref.workflow, ref.instance_id, "note", id="e-1")
    )
    holder.proceed()
    holder.wait()
    assert holder.is_held
    sends.proceed()
    assert environment.wait_until_blocked(sends)
    holder.proceed()
    return sends


@pytest.mark.parametrize("at", HoldAt)
@pytest.mark.parametrize("is_parent_first", [True, False], ids=["parent first", "child first"])
def test_a_parent_that_waits_for_a_child_again_gets_its_outcome_although_the_child_ends_now(
    environment: Environment, at: HoldAt, is_parent_first: bool
) -> None:
    environment.clear()
    world = environment.world

    @world.workflow
    def kid(event: WorkflowEvent, step: Step) -> str:
        step.sleep("nap", "2 minutes")
        pass_gate("end")
        return "grown up"

    @world.workflow
    def parent(event: WorkflowEvent, step: Step) -> str:
        return step.child("kid", kid, id="k-1", timeout="1 minute")

    world.operations.create.instance("parent", id="p-1")
    for ref in (PARENT, KID):
        environment.first.advance(ref)
    environment.advance(61)
    assert environment.first.advance(PARENT).startswith("errored: StepTimeout")
    environment.advance(61)
    ends = environment.start(lambda: environment.first.advance(KID), gate="end")
    retries = environment.start(lambda: environment.second.operations.families.retry("parent", "p-1"))
    first, second = (retries, ends) if is_parent_first else (ends, retries)
    first.hold(at)
    first.proceed()
    first.wait()
    assert first.is_held
    second.proceed()
    environment.wait_until_blocked(second)
    first.proceed()
    assert [ends.future.result(30), retries.future.result(30)] == ["complete", 2]
    assert environment.repeats() == 0, "a deadlock: a transaction was repeated"
    assert environment.first.advance(RunRef("parent", "p-1", 2)) == "complete"
    assert world.instance("parent", "p-1").output == "grown up"
    invariants.check(world)
