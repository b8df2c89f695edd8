"""Limits of workflows: a run holds them from before its first step until it ends, sleeps included."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from celery_durable import Cancelled, Limit, Retries, Step, StepConfig, WorkflowEvent
from celery_durable.errors import ConfigInvalid
from celery_durable.insight.explain import explain
from celery_durable.insight.recorded_run import read_run
from celery_durable.insight.replay_check import check_replay
from tests.support.databases import on_databases
from tests.support.limits import holds, serve
from tests.support.world import World

database = on_databases("sqlite", "postgresql", "mariadb")


@pytest.fixture
def importing(world: World) -> Callable[..., object]:
    """Defines a workflow that sleeps in between, with a limit of one run per account."""

    def define(**limit: object):
        account = Limit("import", **({"at_once": 1, "by": lambda event: event.payload} | limit))

        @world.workflow(limits=[account])
        def imports(event: WorkflowEvent, step: Step):
            step.do("begin", lambda: None)
            step.sleep("pause", 60)
            step.do("end", lambda: None)
            return "imported"

        return imports

    return define


def test_a_run_holds_its_limit_while_it_sleeps_and_gives_it_back_when_it_ends(world: World, importing) -> None:
    imports = importing()
    first, second, other = imports.run("acme", id="a"), imports.run("acme", id="b"), imports.run("bolt", id="c")
    assert (first.statuses(), second.statuses()) == (
        {"\x1flimits": "completed", "begin": "completed", "pause": "waiting"},
        {"\x1flimits": "waiting"},
    )
    assert holds(world) == [("a", "held"), ("c", "held"), ("b", "waiting")]
    assert second.status == "waiting"
    world.run_after(60)
    assert (first.output, other.output) == ("imported", "imported")
    assert second.statuses()["pause"] == "waiting"
    world.run_after(60)
    assert second.output == "imported"
    assert holds(world) == []


def test_a_run_that_fails_gives_back_its_limit(world: World) -> None:
    @world.workflow(limits=[Limit("import", at_once=1)])
    def imports(event: WorkflowEvent, step: Step):
        step.sleep("pause", 60)
        if event.payload:
            raise ValueError("declined")

    first, second = imports.run(True, id="a"), imports.run(False, id="b")
    world.run_after(60)
    assert first.error == "ValueError: declined"
    world.run_after(60)
    assert second.status == "complete"
    assert holds(world) == []


@pytest.mark.parametrize("end", ["terminate", "restart"])
def test_a_run_that_is_ended_gives_back_its_limit(world: World, importing, end: str) -> None:
    imports = importing()
    first, second = imports.run("acme", id="a"), imports.run("acme", id="b")
    if end == "restart":
        world.restart(first)
    else:
        world.operations.lifecycle.terminate(first.workflow, first.id)
    serve(world)
    world.run_until_idle()
    assert "pause" in second.statuses()
    world.run_after(60)
    world.run_after(60)
    assert second.output == "imported"
    assert first.status == ("complete" if end == "restart" else "terminated")
    assert holds(world) == []


def test_a_run_keeps_its_limit_when_its_worker_dies(world: World, importing) -> None:
    imports = importing()
    world.worker.runtime.crash_at = "before-body"
    first = imports.create("acme", id="a")
    world.run_until_idle()
    second = imports.run("acme", id="b")
    assert holds(world) == [("a", "held"), ("b", "waiting")]
    world.run_after(2 * world.settings.lease)
    assert "pause" in first.statuses()
    assert holds(world) == [("a", "held"), ("b", "waiting")]
    world.run_after(60)
    world.run_after(60)
    assert (first.output, second.output) == ("imported", "imported")


def test_a_run_that_is_cancelled_while_it_waits_calls_nothing(world: World, importing) -> None:
    imports = importing()
    imports.run("acme", id="a")
    second = imports.run("acme", id="b")
    second.cancel("sold twice")
    world.run_until_idle()
    assert second.status == "terminated"
    assert holds(world) == [("a", "held")]
    world.run_after(60)


def test_a_cancelled_run_cleans_up_with_its_limit(world: World) -> None:
    seen = []

    @world.workflow(limits=[Limit("import", at_once=1)])
    def imports(event: WorkflowEvent, step: Step):
        try:
            step.sleep("pause", 60)
        except Cancelled:
            step.do("clean up", lambda: seen.append(holds(world)))
            raise

    first = imports.run(id="a")
    first.cancel()
    world.run_until_idle()
    assert seen == [[("a", "held")]]
    assert first.status == "terminated"
    assert holds(world) == []


def test_a_run_that_continues_another_one_takes_the_limit_again(world: World, importing) -> None:
    imports = importing()
    first = imports.run("acme", id="a")
    world.operations.rewind.restart("imports", "a", from_step="pause")
    second = imports.run("acme", id="b")
    world.run_until_idle()
    assert sorted(holds(world)) == [("a", "held"), ("b", "waiting")]
    assert first.statuses()["begin"] == "completed"
    world.run_after(60)
    world.run_after(60)
    assert (first.output, second.output) == ("imported", "imported")
    assert holds(world) == []


def test_a_limited_step_of_a_limited_run_takes_its_own_limits(world: World) -> None:
    run, call = Limit("import", at_once=1), Limit("stripe", at_once=1)

    @world.workflow(limits=[run])
    def imports(event: WorkflowEvent, step: Step):
        return step.do("call", StepConfig(limits=[call], retries=Retries(limit=0)), lambda: holds(world))

    assert imports.run(id="a").output == [["a", "held"], ["a", "held"]]
    assert holds(world) == []


def test_a_key_that_is_none_fails_the_run(world: World, importing) -> None:
    assert importing().run(None).error == (
        "LimitKeyInvalid: The function by= of limit 'import' returned None: return a text of 1 to 255 characters, or a "
        "whole number."
    )


def test_limits_that_are_no_list_of_limits_are_refused(world: World) -> None:
    with pytest.raises(ConfigInvalid) as refused:

        @world.workflow(limits=["import"])
        def imports(event: WorkflowEvent, step: Step):
            return None

    assert "use a list of Limit objects, such as [Limit('stripe', at_once=20)]" in str(refused.value)


def test_the_replay_check_goes_on_without_limits(world: World, importing) -> None:
    imports = importing()
    imports.run("acme", id="a")
    recorded = imports.run("acme", id="b")
    for instance in (imports.of("a"), recorded):
        read = world.store.read(lambda tx, name=instance.id: read_run(tx, "imports", name, None))
        result = check_replay(world.worker.runner, read)
        assert (result.differences, result.uncalled) == ((), ())


def test_explain_names_the_ancestor_that_holds_the_limit_of_a_child_and_waits_for_it(world: World) -> None:
    limit = Limit("import", at_once=1)

    @world.workflow
    def page(event: WorkflowEvent, step: Step):
        return step.do("fetch", StepConfig(limits=[limit]), lambda: "fetched")

    @world.workflow
    def part(event: WorkflowEvent, step: Step):
        return step.child("page", SimpleNamespace(definition=world.registry.get("page")), None, id="p")

    @world.workflow(limits=[limit])
    def imports(event: WorkflowEvent, step: Step):
        return step.child("part", SimpleNamespace(definition=world.registry.get("part")), None, id="a-part")

    imports.run(id="a")
    world.run_until_idle()
    found = explain(world.operations.queries.facts("page", "p"))
    assert found.sentence == (
        'Step "fetch" waits for limit "import" (1 of 1 held; place 1, of 1; longest holder imports/a, for 0 ms). '
        "imports/a holds it, and waits for this run: unless another holder gives it back, neither continues. Raise the "
        "limit, and take it in one of the two only."
    )
    assert found.actions[1].endswith(" durable limits set import --at-once 2")
    world.operations.limits.set("import", at_once=2, by="ann")
    world.run_until_idle()
    assert imports.of("a").output == "fetched"


def test_a_step_that_asks_for_a_limit_of_its_own_run_is_refused(world: World) -> None:
    """It would wait for its own run."""

    limit = Limit("import", at_once=1)

    @world.workflow(limits=[limit])
    def order(event: WorkflowEvent, step: Step):
        return step.do("import", StepConfig(limits=[limit]), lambda: "imported")

    run = order.run()
    assert run.status == "errored"
    assert run.error.startswith("DefinitionInvalid: ")
    assert holds(world) == []
