"""Operations whose commit is in doubt: the connection broke, and meanwhile others went on."""

from __future__ import annotations

import pytest

from celery_durable import CreateOptions, OutboundEvent, Step, WorkflowEvent, signals
from celery_durable.tasks.outbox import Handler, OutboundDeliverer
from tests.support.flows import flow_of
from tests.support.lost_connections import cut_commit, cut_statement, stays_in_doubt
from tests.support.world import World

pytestmark = pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)
cuts = pytest.mark.parametrize("when", ["before", "after"])


def nothing() -> None:
    pass


@pytest.mark.parametrize(("when", "is_restarted"), [("before", False), ("after", False), ("after", True)])
def test_a_create_is_its_own_whatever_has_become_of_it(world: World, order, others, when, is_restarted) -> None:
    then = (lambda: others.rewind.restart("order", "o-1")) if is_restarted else nothing
    cut_connection = cut_statement if world.store.combines_writes else cut_commit
    with cut_connection(world.store, when=when, then=then) as cut:
        assert world.operations.create.instance("order", id="o-1") == "o-1"
    assert cut == [when]
    assert order.of("o-1").row.run_number == (2 if is_restarted else 1)


def test_a_batch_answers_with_what_it_created_also_when_one_was_restarted(world: World, order, others) -> None:
    order.create(id="o-2")
    batch = [CreateOptions(id=f"o-{n}") for n in (1, 2, 3)]
    with cut_commit(world.store, when="after", then=lambda: others.rewind.restart("order", "o-1")):
        assert world.operations.create.batch("order", batch) == ["o-1", "o-3"]


@cuts
def test_an_event_in_doubt_is_new_where_it_is_ours(world: World, order, when) -> None:
    instance = order.run()
    with cut_commit(world.store, when=when) as cut:
        assert instance.send("approval", "yes", id="e-1") is True
    assert cut == [when]
    assert instance.send("approval", "again", id="e-1") is False
    world.run_until_idle()
    assert instance.output == "yes"


@cuts
def test_an_event_in_doubt_whose_id_had_been_accepted_before_is_not_new(world: World, order, when) -> None:
    instance = order.run()
    instance.send("approval", "yes", id="e-1")
    with cut_commit(world.store, when=when):
        assert instance.send("approval", "again", id="e-1") is False
    assert [payload for _, payload, _ in instance.events()] == ["yes"]


def test_an_event_in_doubt_is_not_new_where_another_sent_one_of_its_id(world: World, order, others) -> None:
    instance = order.run()

    def send() -> None:
        world.advance(1)
        others.events.send("order", instance.id, "approval", "another", id="e-1")

    with cut_commit(world.store, when="before", then=send):
        assert instance.send("approval", "mine", id="e-1") is False
    assert [payload for _, payload, _ in instance.events()] == ["another"]


@cuts
def test_an_event_without_an_id_is_sent_once_also_if_in_doubt(world: World, order, when) -> None:
    """On PostgreSQL one statement sends it. Its id is random, so a row with this id was written by this call."""
    instance = order.run()
    cut_connection = cut_statement if world.store.combines_writes else cut_commit
    with cut_connection(world.store, when=when) as cut:
        assert instance.send("approval", "yes") is True
    assert cut == [when]
    assert [payload for _, payload, _ in instance.events()] == ["yes"]
    world.run_until_idle()
    assert instance.output == "yes"


@pytest.mark.parametrize("id", ["e-1", None], ids=["with an id", "without"])
@cuts
def test_an_event_in_doubt_is_not_sent_to_two_runs_and_is_told_of_the_one_that_has_it(
    world: World, order, others, when, id
) -> None:
    instance, told = order.run(), []

    def hear(run_number: int, **_: object) -> None:
        told.append(run_number)

    options = {} if id is None else {"id": id}
    is_alone = id is None and world.store.combines_writes
    cut_connection = cut_statement if is_alone else cut_commit
    signals.event_received.connect(hear)
    try:
        with cut_connection(world.store, when=when, then=lambda: others.rewind.restart("order", instance.id)):
            assert instance.send("approval", "yes", **options) is True
    finally:
        signals.event_received.disconnect(hear)
    assert told == [1 if when == "after" else 2]
    sent = [[payload for _, payload, _ in instance.events(run)] for run in (1, 2)]
    assert sent == ([["yes"], []] if when == "after" else [[], ["yes"]])


CHANGES = {
    "terminate": lambda operations, version: operations.lifecycle.terminate("parts", "p-1", if_version=version),
    "restart": lambda operations, version: operations.rewind.restart("parts", "p-1", if_version=version),
    "rewind": lambda operations, version: operations.rewind.restart("parts", "p-1", from_step="b", if_version=version),
    "retry": lambda operations, version: operations.rewind.retry("parts", "p-1", if_version=version),
    "restart_or_create": lambda operations, version: (
        operations.create.restart_or_create("parts", id="p-1", if_status=["waiting"], if_version=version).run_number
    ),
    "send_event": lambda operations, version: operations.events.send("parts", "p-1", "c", if_version=version),
    "set_result": lambda operations, version: operations.interventions.set_result(
        "parts", "p-1", "c", 1, by="eve", if_version=version
    ),
    "skip": lambda operations, version: operations.interventions.skip(
        "parts", "p-1", "c", by="eve", if_version=version
    ),
}
BEFORE = ("terminate", "rewind")
"""The changes for which `make test` cuts before the commit, too: what is not applied is done again alike."""
RESULTS = {"terminate": None, "send_event": True, "set_result": 1, "skip": 1}


@pytest.mark.parametrize(
    ("change", "when"),
    [
        *((change, "after") for change in CHANGES),
        *(pytest.param(change, "before", marks=() if change in BEFORE else pytest.mark.slow) for change in CHANGES),
    ],
)
def test_a_change_in_doubt_with_a_version_is_done_once(world: World, when, change) -> None:
    @world.workflow
    def parts(event: WorkflowEvent, step: Step):
        for name in "ab":
            step.do(name, lambda: None)
        if change == "retry":
            raise ValueError("full")
        step.wait_for_event("c", "c")

    instance = parts.run(id="p-1")
    with cut_commit(world.store, when=when) as cut:
        result = CHANGES[change](world.operations, [instance.tag])
    assert (cut, result) == ([when], RESULTS.get(change, 2))
    assert instance.row.run_number == (1 if change in RESULTS else 2)
    sent = [] if change == "terminate" else [instance.ref]
    assert [due.ref for due in world.messages] == sent


def test_a_restart_in_doubt_is_found_behind_another(world: World, order, others) -> None:
    instance = order.run()
    with cut_commit(world.store, when="after", then=lambda: others.rewind.restart("order", instance.id)):
        assert world.operations.rewind.restart("order", instance.id) == 2
    assert instance.row.run_number == 3


@pytest.fixture
def steps(world: World):
    @world.workflow
    def steps(event: WorkflowEvent, step: Step):
        ran = [step.do(name, lambda: event.run_number) for name in "ab"]
        return [*ran, step.wait_for_event("approval", "approval").payload]

    return steps


@cuts
def test_a_rewind_in_doubt_is_done_once_also_where_another_restarted_meanwhile(world, steps, others, when) -> None:
    instance = steps.run()
    with cut_commit(world.store, when=when, then=lambda: others.rewind.restart("steps", instance.id)) as cut:
        number = world.operations.rewind.restart("steps", instance.id, from_step="b" if when == "after" else None)
    assert cut == [when]
    assert number == (2 if when == "after" else 3)
    assert instance.row.run_number == 3
    assert list(instance.statuses(run=2)) == (["a"] if when == "after" else [])


@cuts
def test_a_fork_in_doubt_is_made_once_and_is_its_own(world: World, steps, others, when) -> None:
    instance = steps.run()
    then = (lambda: others.rewind.restart("steps", instance.id)) if when == "after" else nothing
    with cut_commit(world.store, when=when, then=then):
        assert world.operations.rewind.fork("steps", instance.id, "b", id="f-1") == "f-1"
    assert list(world.instance("steps", "f-1").statuses()) == ["a"]
    world.run_until_idle()
    assert world.instance("steps", "f-1").statuses() == {"a": "completed", "b": "completed", "approval": "waiting"}


@cuts
def test_a_restart_or_create_in_doubt_tells_what_it_did(world: World, order, when) -> None:
    for outcome in ("created", "restarted"):
        with cut_commit(world.store, when=when) as cut:
            assert world.operations.create.restart_or_create("order", id="o-1", if_status=["active"]).outcome == outcome
        assert cut == [when]
    assert order.of("o-1").row.run_number == 2


@cuts
def test_a_step_that_is_settled_in_doubt_is_settled_once(world: World, order, when) -> None:
    instance = order.run()
    with cut_commit(world.store, when=when) as cut:
        assert world.operations.interventions.set_result("order", instance.id, "approval", "yes", by="eve") == 1
    assert cut == [when]
    world.run_until_idle()
    assert instance.output == "yes"
    assert len(world.operations.history.read("order", instance.id).audit) == 1


@cuts
@pytest.mark.parametrize("method", ["retry", "drop"])
def test_what_people_do_to_the_outbox_is_done_once_whatever_has_become_of_it(world: World, when, method) -> None:
    telling = flow_of(world, lambda step: step.do("tell", lambda tx: tx.send_outbound("OrderShipped")), name="telling")
    sent = telling.run().output
    give_up = OutboundDeliverer(
        world.store, world.settings, world.worker.runtime, {"OrderShipped": Handler.of(refuse, 0)}
    )
    assert give_up.deliver(sent) == "given up: ValueError"
    with cut_commit(world.store, when=when) as cut, stays_in_doubt(when == "after"):
        getattr(world.operations.outbox, method)([sent])
    assert cut == [when]
    assert [each.attempts for each in world.operations.outbox.read()] == ([0] if method == "retry" else [])


@cuts
def test_a_batch_that_is_pruned_in_doubt_is_gone(world: World, order, when) -> None:
    for n in range(30):
        order.create(id=f"o-{n}").terminate()
    world.accepted.clear()
    with cut_commit(world.store, when=when) as cut:
        world.operations.retention.prune(older_than="0 s")
    assert (cut, world.operations.retention.prune(older_than="0 s")) == ([when], 0)


def refuse(event: OutboundEvent) -> None:
    raise ValueError("full")


@pytest.mark.parametrize(
    ("when", "is_restarted", "told"), [("before", True, 0), ("after", True, 0), ("before", False, 1)]
)
def test_an_end_in_doubt_is_told_only_where_it_is_known(world: World, others, when, is_restarted, told) -> None:
    @world.workflow(max_run_duration="1 day")
    def slow(event: WorkflowEvent, step: Step):
        step.wait_for_event("approval", "approval")

    instance, heard = slow.run(), []
    world.advance(86_400)

    def hear(**about: object) -> None:
        heard.append(about)

    signals.workflow_terminated.connect(hear)
    then = (lambda: others.rewind.restart("slow", instance.id)) if is_restarted else nothing
    try:
        with cut_commit(world.worker.store, when=when, then=then) as cut:
            world.worker.advance(instance.ref)
    finally:
        signals.workflow_terminated.disconnect(hear)
    assert (cut, len(heard)) == ([when], told)
    assert (instance.row.run_number, instance.status) == ((2, "active") if is_restarted else (1, "terminated"))
