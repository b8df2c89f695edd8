"""A kind of step from outside the package: nothing in the package knows it."""

from __future__ import annotations

from celery_durable import Step, WorkflowEvent
from celery_durable.cli.output.render import Times, describe_wait
from celery_durable.insight.explain import Code
from celery_durable.model import RunRef, StepStatus
from celery_durable.runner import Runner
from tests.runner.barrier import BarrierKind, barrier
from tests.support.flows import flow_of
from tests.support.world import World


def test_a_kind_of_another_package_waits_and_wakes_other_runs(world: World) -> None:
    woken: list[RunRef] = []
    kind = BarrierKind()
    runner = Runner(
        world.store,
        world.settings,
        world.registry,
        world.store.runtime,
        lambda runs: woken.extend(due.ref for due in runs),
        kinds=[kind],
    )

    @world.workflow
    def lorry(event: WorkflowEvent[str], step: Step) -> list[object]:
        loaded = step.do("load", lambda: f"{event.payload} is loaded")
        return [loaded, barrier(step, "all loaded", 2), step.do("leave", lambda: "gone")]

    first, second = lorry.create("north", id="north"), lorry.create("south", id="south")
    advance = [runner.advance(each.ref, task_id="t", node="n").summary for each in (first, second)]
    assert [summary.split(" until")[0] for summary in advance] == ["waiting", "released: due again"]
    assert woken == [first.ref, second.ref]
    for each in (first, second):
        assert runner.advance(each.ref, task_id="t", node="n").summary == "complete"
    assert [first.output, second.output] == [
        ["north is loaded", 2, "gone"],
        ["south is loaded", 2, "gone"],
    ]
    of_each = [[status for pk, status in kind.prepared if pk == each.row.id] for each in (first, second)]
    assert of_each == [[StepStatus.WAITING, StepStatus.COMPLETED]] * 2
    assert [each.type for each in first.steps()] == ["do", "barrier", "do"]


def test_a_run_that_waits_in_a_step_of_another_package_is_explained_and_shown(world: World) -> None:
    runner = Runner(
        world.store, world.settings, world.registry, world.store.runtime, lambda _: None, kinds=[BarrierKind()]
    )

    north = flow_of(world, lambda step: barrier(step, "all loaded", 2), name="lorry").create("north", id="north")
    runner.advance(north.ref, task_id="t", node="n")
    explain = world.operations.queries.explain
    diagnosis = explain("lorry", "north")
    assert (diagnosis.code, diagnosis.sentence) == (
        Code.WAITING_STEP,
        'Waits at step "all loaded", of kind "barrier"; times out in 1 h.',
    )
    [shown] = north.steps()
    assert describe_wait(shown, Times(world.now, exact=False)) == "barrier, times out in 1 h"
    north.pause()
    assert explain("lorry", "north").sentence.endswith('Unfinished: step "all loaded" waits for barrier.')
