"""A linear run follows its rows, whatever a deploy makes of the list."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from celery_durable import Dead, LinearStep
from celery_durable.errors import WorkflowNotFound
from tests.support.lines import Line, rows, state, waits_for
from tests.support.world import World


def test_a_run_follows_its_rows_whatever_a_deploy_makes_of_the_plan(world: World) -> None:
    line = Line(world, VALIDATE=waits_for("go"))
    instance = line.flow.run()
    old = dict(line.flow.definition.handlers)
    line.deploy([LinearStep("SHIP"), LinearStep("AUDIT"), LinearStep("VALIDATE", max_attempts=1)], version=2)
    line.flow.definition.handlers["PAY"] = old["PAY"]  # a handler that only runs in flight have
    instance.send("go")
    world.run_until_idle()
    assert [ctx.step for ctx in line.calls[1:]] == ["VALIDATE", "PAY", "SHIP"]
    assert {ctx.version for ctx in line.calls} == {1}
    assert (state(instance), instance.steps()[0].max_attempts) == ("COMPLETED", 3)
    assert [step.name for step in line.flow.run(id="new").steps()] == ["SHIP", "AUDIT", "VALIDATE"]


def test_restart_begins_a_run_of_the_deployed_plan(world: World) -> None:
    line = Line(world, VALIDATE=lambda _: Dead("no"))
    instance = line.flow.run(7)
    line.deploy([LinearStep("CHECK"), LinearStep("SHIP")], version=2)
    assert instance.restart() == 2
    assert rows(instance) == ["READY", "PENDING"]
    world.run_until_idle()
    assert (state(instance), [step.name for step in instance.steps()]) == ("COMPLETED", ["CHECK", "SHIP"])
    assert rows(instance, 1) == ["DEAD", "PENDING", "PENDING"]
    assert (line.calls[-1].params, line.calls[-1].version, line.calls[-1].run_number) == (7, 2, 2)


def test_restart_where_the_code_is_not_known_is_refused(world: World) -> None:
    instance = Line(world).flow.run()
    world.registry.withdraw("order")
    with pytest.raises(WorkflowNotFound):
        instance.restart()
    assert instance.row.run_number == 1


def test_restart_or_create_begins_a_run_of_the_deployed_plan(world: World) -> None:
    line = Line(world)
    instance = line.flow.run()
    line.deploy([LinearStep("CHECK")], version=2)
    assert world.operations.create.restart_or_create("order", id="i-1").outcome == "restarted"
    assert (rows(instance), rows(instance, 1)) == (["READY"], ["DONE", "DONE", "DONE"])
    world.run_until_idle()
    assert (state(instance), line.calls[-1].version) == ("COMPLETED", 2)


def test_an_ended_instance_is_kept_as_long_as_its_list_says(world: World) -> None:
    line = Line(world, retention="1 hour")
    instance = line.flow.run()
    world.advance(timedelta(minutes=59))
    assert (world.delete_expired(), state(instance)) == (0, "COMPLETED")
    world.advance(timedelta(minutes=1))
    assert world.delete_expired() == 1
    assert not world.operations.queries.list("order").items
    for promised in (world.accepted, world.accepted_events, world.prior_runs):  # it was deleted on purpose
        promised.clear()


def test_a_worker_without_the_handler_leaves_the_step_for_one_that_has_it(world: World) -> None:
    line = Line(world)
    handler = line.flow.definition.handlers.pop("PAY")
    instance = line.flow.run()
    assert rows(instance) == ["DONE", "READY", "PENDING"]
    said = world.operations.queries.explain("order", "i-1")
    assert (said.code, said.sentence) == (
        "NOT_REGISTERED",
        'Step "PAY" is ready, but the last worker that checked has no handler for it; the next check is in 5.0 s.',
    )
    line.flow.definition.handlers["PAY"] = handler
    world.run_after(5)
    assert state(instance) == "COMPLETED"
    assert [step.attempts for step in instance.steps()] == [0, 0, 0]


def test_a_worker_whose_code_is_a_function_leaves_the_rows_alone(world: World) -> None:
    line = Line(world)
    instance = line.flow.create()

    @world.workflow(name="order")
    def order(event: Any, step: Any) -> str:
        return "another"

    world.run_until_idle()
    assert rows(instance) == ["READY", "PENDING", "PENDING"]
    world.registry.replace(line.flow.definition)
    world.run_after(15)
    assert state(instance) == "COMPLETED"
