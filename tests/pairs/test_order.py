"""Two instances at once: whoever wants both locks the older one first, so that nobody waits in a circle.

The first one is held open after its first lock and still wants the other row, which the second one then must not have.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from celery_durable import Step, StepConfig, StepTx, WorkflowEvent
from celery_durable.errors import InstanceTerminal
from celery_durable.model import RunRef
from tests.engine import invariants
from tests.pairs.acts import START, Act, HoldAt, pass_gate
from tests.pairs.stage import Party, Stage

PARENT, KID = RunRef("parent", "p-1", 1), RunRef("kid", "k-1", 1)


@dataclass(frozen=True)
class Both:
    """What locks parent and child. ``after``: so many transactions with locks come before the one that does."""

    name: str
    work: Callable[[Party], Any]
    gate: str = START
    naps: bool = False
    after: int = 0


TELLS = Both("a parent that tells its child", lambda party: party.advance(PARENT), gate="say")
OTHERS = (
    Both("a child that tells its parent", lambda party: party.advance(KID), gate="reply"),
    Both("a child that ends", lambda party: party.advance(KID), gate="end"),
    Both("the termination of a child", lambda party: party.operations.terminate("kid", "k-1")),
    Both("a child that overstays", lambda party: party.advance(KID), naps=True, after=1),
)


def register(stage: Stage, *, naps: bool) -> None:
    """A parent and its child, which tell each other something."""

    @stage.world.workflow(max_run_duration="1 hour")
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

    @stage.world.workflow
    def parent(event: WorkflowEvent, step: Step) -> Any:
        both = (step.submit_child("kid", kid, id="k-1"), step.submit("say", StepConfig(retries=0), say))
        return [str(each) for each in step.gather(*both, return_exceptions=True)]


@pytest.mark.parametrize("is_parent_first", [True, False], ids=["parent first", "child first"])
@pytest.mark.parametrize("other", OTHERS, ids=lambda other: other.name)
def test_rows_of_two_instances_are_locked_in_one_order(stage: Stage, other: Both, is_parent_first: bool) -> None:
    stage.clear()
    world = stage.world
    register(stage, naps=other.naps)
    world.operations.create("parent", id="p-1")
    tells = stage.start(lambda: TELLS.work(stage.first), gate=TELLS.gate)
    if other.naps:
        stage.second.advance(KID)
        stage.advance(3601)
    acts = [tells, stage.start(lambda: other.work(stage.second), gate=other.gate)]
    first, second = acts if is_parent_first else reversed(acts)
    first.hold(HoldAt.LOCK, after=0 if first is tells else other.after)
    first.go()
    first.wait()
    assert first.is_held
    second.go()
    has_met = stage.let_meet(second)
    first.go()
    assert [act.future.result(30) for act in acts]
    assert has_met
    assert stage.repeats() == 0, "a deadlock: a transaction had to begin again"
    invariants.check(world)
    stage.advance(61)
    world.run_until_idle()
    assert str(world.instance("parent", "p-1").status) == "complete"
    invariants.check(world)


@pytest.mark.parametrize("at", HoldAt)
def test_the_end_of_a_run_that_overstays_and_an_event_for_it_do_not_wait_for_each_other(
    stage: Stage, at: HoldAt
) -> None:
    """They find the row by different indexes, and MariaDB locks the entries of both."""
    stage.clear()
    register(stage, naps=True)
    stage.world.operations.create("kid", id="k-1")
    stage.second.advance(KID)
    stage.advance(3601)
    overstays = stage.start(lambda: stage.first.advance(KID))
    overstays.hold(at, after=1)
    sends = meet_an_event(stage, overstays, KID)
    assert overstays.future.result(30).startswith("terminated")
    with pytest.raises(InstanceTerminal):
        sends.future.result(30)
    assert stage.repeats() == 0, "a deadlock: a transaction had to begin again"


@pytest.mark.parametrize("at", HoldAt)
def test_a_step_that_sends_its_own_instance_an_event_does_not_wait_for_another_sender(stage: Stage, at: HoldAt) -> None:
    stage.clear()

    @stage.world.workflow
    def alone(event: WorkflowEvent, step: Step) -> Any:
        step.do("note", note)
        return step.wait_for_event("read", "note").payload

    def note(tx: StepTx) -> None:
        pass_gate("note")
        tx.send_event(alone, "a-1", "note", "to myself")

    ref = RunRef("alone", stage.world.operations.create("alone", id="a-1"), 1)
    notes = stage.start(lambda: stage.first.advance(ref), gate="note")
    notes.hold(at)
    sends = meet_an_event(stage, notes, ref)
    assert sends.future.result(30) is True
    assert notes.future.result(30)
    assert stage.repeats() == 0, "a deadlock: a transaction had to begin again"
    assert stage.world.instance("alone", "a-1").output == "to myself"
    invariants.check(stage.world)


def meet_an_event(stage: Stage, holder: Act, ref: RunRef) -> Act:
    """An event that is sent while somebody holds the lock, who then goes on."""
    sends = stage.start(lambda: stage.second.operations.send_event(ref.workflow, ref.instance_id, "note", id="e-1"))
    holder.go()
    holder.wait()
    assert holder.is_held
    sends.go()
    assert stage.let_meet(sends)
    holder.go()
    return sends
