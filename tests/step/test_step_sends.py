"""Instances that a step creates and events that it sends are there with the step."""

from __future__ import annotations

import pytest

from celery_durable import Retries, Step, StepConfig, StepTx, WorkflowEvent
from tests.support.flows import flow_of
from tests.support.world import World, insert_name, on_one_database

ONCE_MORE = StepConfig(retries=Retries(limit=1, delay=1))


@pytest.fixture
def child(world: World):
    @world.workflow
    def child(event: WorkflowEvent, step: Step):
        return [event.payload, step.wait_for_event("approval", "approval").payload]

    return child


def test_an_instance_that_a_step_creates_is_there_with_the_step(world: World, child) -> None:
    seen = []

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        one = step.do("start", lambda tx: [tx.create(child, {"n": 1}, id="c-1"), tx.create(child)])
        step.sleep("rest", 60)
        return one

    instance = order.create()
    world.worker.runtime.at["after-body"] = lambda: seen.append(world.operations.queries.list("child").items)
    world.run_until_idle()
    assert seen == [()]
    world.run_after(60)
    first, second = instance.output
    assert first == "c-1"
    assert {item.id for item in world.operations.queries.list("child").items} == {first, second}
    for made in instance.output:
        child.of(made).send("approval", made)
    world.run_until_idle()
    assert child.of(first).output == [{"n": 1}, first]
    assert child.of(second).output == [None, second]


def test_an_instance_that_a_failed_attempt_would_have_created_is_not_there(world: World, child) -> None:
    def start(tx: StepTx) -> None:
        tx.create(child, id=f"c-{tx.attempt}")
        if tx.attempt == 1:
            raise ValueError("no")

    flow_of(world, lambda step: step.do("start", ONCE_MORE, start)).run()
    world.run_after(1)
    assert [item.id for item in world.operations.queries.list("child").items] == ["c-2"]


def test_a_created_instance_remembers_the_step_that_made_it(world: World, child) -> None:
    instance = flow_of(world, lambda step: step.do("start", lambda tx: tx.create(child, id="c-1"))).run()
    row = child.of("c-1").row
    assert (row.parent_pk, row.parent_run_number, row.parent_step_key) == (instance.row.id, 1, "start")


def test_an_event_that_a_step_sends_wakes_its_target_with_the_step(world: World, child) -> None:
    target = child.run("p", id="c-1")

    order = flow_of(
        world, lambda step: step.do("tell", lambda tx: tx.send_event(child, "c-1", "approval", {"from": tx.name}))
    )
    order.run()
    assert target.output == ["p", {"from": "tell"}]


def test_a_step_can_send_several_events_to_one_instance(world: World) -> None:
    @world.workflow
    def child(event: WorkflowEvent, step: Step):
        return [step.wait_for_event(f"wait {number}", "news").payload for number in range(2)]

    def tell(tx: StepTx) -> None:
        for number in range(2):
            tx.send_event(child, "c-1", "news", number)

    target = child.run(id="c-1")
    flow_of(world, lambda step: step.do("tell", tell)).run()
    assert target.output == [0, 1]


@pytest.mark.parametrize("way", ["of the step", "of the operations, in its session"])
def test_an_event_that_a_failed_attempt_would_have_sent_is_not_sent(world: World, child, way: str) -> None:
    target = child.run(id="c-1")

    def tell(tx: StepTx) -> None:
        if way == "of the step":
            tx.send_event(child, "c-1", "approval", tx.attempt)
        else:
            world.operations.events.send("child", "c-1", "approval", tx.attempt, session=tx.session)
        if tx.attempt == 1:
            raise ValueError("no")

    flow_of(world, lambda step: step.do("tell", ONCE_MORE, tell)).run()
    assert target.events() == []
    world.run_after(1)
    assert target.events() == [("approval", 2, "approval")]


def test_a_step_can_create_an_instance_and_send_it_its_first_event(world: World, child) -> None:
    def start(tx: StepTx) -> None:
        made = tx.create(child, id="c-1")
        tx.send_event(child, made, "approval", "at once")

    flow_of(world, lambda step: step.do("start", start)).run()
    assert child.of("c-1").output == [None, "at once"]


def test_a_step_can_send_an_event_to_its_own_instance(world: World) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.do("tell", lambda tx: tx.send_event(order, event.instance_id, "note", "to self"))
        return step.wait_for_event("read", "note").payload

    assert order.run().output == "to self"


def test_steps_that_send_events_to_older_and_newer_instances_do_not_deadlock(world: World, child) -> None:
    older = child.run(id="older")

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        def tell(tx: StepTx) -> None:
            for target in ("newer", "older"):
                tx.send_event(child, target, "approval", target)

        step.wait_for_event("go", "go")
        step.do("tell", tell)

    instance = order.run()
    newer = child.run(id="newer")
    instance.send("go")
    world.run_until_idle()
    assert (older.output[1], newer.output[1]) == ("older", "newer")


@pytest.mark.parametrize("with_session", [True, False])
@pytest.mark.parametrize(
    ("what", "error"),
    [
        (
            lambda tx, child: tx.send_event(child, "missing", "approval"),
            "InstanceNotFound: Workflow 'child' has no instance 'missing'. "
            "Check the id, or list the workflow's instances.",
        ),
        (
            lambda tx, child: tx.send_event(child, "ended", "approval"),
            "InstanceTerminal: Cannot send an event to instance 'ended' of workflow 'child': it is terminated. To "
            "start a new run, restart it.",
        ),
        (
            lambda tx, child: tx.create(child, id="ended"),
            "InstanceAlreadyExists: Workflow 'child' already has an instance 'ended'. Use another id, "
            "or get or restart the existing instance.",
        ),
    ],
    ids=["missing", "ended", "exists"],
)
def test_what_cannot_be_sent_or_created_fails_the_step_for_good(
    world: World, child, with_session: bool, what, error: str
) -> None:
    child.run(id="ended").terminate()

    def work(tx: StepTx) -> None:
        tx.mutate(insert_name("written"))
        if with_session:
            tx.session.connection()
        what(tx, child)

    instance = flow_of(world, lambda step: step.do("work", work)).run()
    assert instance.error == error
    assert instance.step("work").attempts == 1
    assert world.names() == []


def test_params_that_do_not_fit_fail_the_step_for_good(world: World) -> None:
    @world.workflow
    def child(event: WorkflowEvent[int], step: Step):
        pass

    instance = flow_of(world, lambda step: step.do("start", lambda tx: tx.create(child, "seven", id="c-1"))).run()
    assert instance.error == (
        "WorkflowParamsInvalid: Parameters of workflow 'child' for instance 'c-1' are not valid: "
        "$: Input should be a valid integer, unable to parse string as an integer."
    )
    assert instance.step("start").attempts == 1


CHARACTERS = "of the characters a-z A-Z 0-9 _ - and do not begin with '-'."


@on_one_database
@pytest.mark.parametrize(
    ("send", "error"),
    [
        (
            lambda tx, _: tx.create("child", id="c-1"),
            "DefinitionInvalid: tx.create() needs a workflow, and got 'child': pass what @durable_workflow made.",
        ),
        (
            lambda tx, _: tx.send_event("child", "c-1", "approval"),
            "DefinitionInvalid: tx.send_event() needs a workflow, and got 'child': pass what @durable_workflow made.",
        ),
        (
            lambda tx, child: tx.send_event(child, "live", "no spaces"),
            f"InvalidEventType: Event type 'no spaces' is not allowed: use 1 to 100 {CHARACTERS}",
        ),
        (
            lambda tx, child: tx.send_event(child, "NUL \x00", "approval"),
            f"InvalidInstanceId: Instance id 'NUL \\x00' is not allowed: use 1 to 255 {CHARACTERS}",
        ),
        (
            lambda tx, child: tx.send_event(child, "live", "approval", id=""),
            "NameInvalid: Event id '' is not allowed: use text of 1 to 255 characters without control characters.",
        ),
        (
            lambda tx, child: tx.create(child, id="no spaces"),
            f"InvalidInstanceId: Instance id 'no spaces' is not allowed: use 1 to 100 {CHARACTERS}",
        ),
    ],
)
def test_what_is_sent_to_nobody_is_refused(world: World, child, send, error: str) -> None:
    live = child.run(id="live")

    instance = flow_of(world, lambda step: step.do("send", lambda tx: send(tx, child))).run()
    assert (instance.error, instance.step("send").attempts, live.events()) == (error, 1, [])
