"""What is sent when a run has ended: a task of the transaction that ends it, at least once, under one id."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import sqlalchemy as sa
from celery import Celery
from celery.exceptions import NotRegistered
from celery.local import PromiseProxy

from celery_durable import Completed, Dead, LinearContext, LinearStep, Step, WorkflowEvent
from celery_durable.definitions import define_linear
from celery_durable.model import OutboxMessage
from tests.support.flows import flow_of
from tests.support.lost_connections import cut_commit
from tests.support.world import FlowControl, SerializationFailure, World

everywhere = pytest.mark.parametrize("database", ["sqlite", "postgresql", "mariadb"], indirect=True)
servers = pytest.mark.parametrize(
    "database", ["postgresql", pytest.param("mariadb", marks=pytest.mark.slow)], indirect=True
)

app = Celery("others", set_as_current=False)


@app.task(name="shop.done", shared=False)
def done(ending: dict[str, Any]) -> None:
    """Never run here."""


def echoing(world: World, **options: Any) -> FlowControl:
    """A workflow that returns what it was given, or raises it."""

    @world.workflow(**{"name": "order", "on_complete": done, "on_failure": "elsewhere.failed"} | options)
    def order(event: WorkflowEvent[Any], step: Step) -> Any:
        if event.payload == "fail":
            raise LookupError("no such article")
        return event.payload

    return order


def linear(world: World, pay: Callable[[LinearContext], Any]) -> FlowControl:
    """A linear workflow of one step."""
    options = {"on_complete": done, "on_failure": "elsewhere.failed"}
    definition = define_linear("order", module=__name__, version=1, steps=[LinearStep("PAY")], **options)
    definition.handlers["PAY"] = pay
    world.registry.replace(definition)
    return FlowControl(world, definition)  # type: ignore[arg-type]


def told(message: OutboxMessage) -> dict[str, Any]:
    """What the task is called with."""
    assert message.content["kwargs"] == message.content["options"] == {}
    (ending,) = message.content["args"]
    return ending


def outbox(world: World) -> list[Any]:
    return world.rows(sa.select(world.store.tables.outbox))


COMPLETE = {
    "workflow": "order",
    "instanceId": "i-1",
    "runNumber": 1,
    "status": "complete",
    "output": {"sum": 7},
    "error": None,
    "reason": None,
}


@everywhere
def test_who_asked_for_it_is_told_that_a_run_is_complete(world: World) -> None:
    echoing(world).run({"sum": 7})
    (message,) = world.sent
    assert (message.name, told(message)) == ("shop.done", COMPLETE)
    assert outbox(world) == []


@everywhere
def test_who_asked_for_it_is_told_that_a_run_failed(world: World) -> None:
    echoing(world).run("fail")
    (message,) = world.sent
    error = {"name": "LookupError", "message": "no such article"}
    assert message.name == "elsewhere.failed"
    assert told(message) == COMPLETE | {"status": "errored", "output": None, "error": error}


@everywhere
@pytest.mark.parametrize(
    ("limit", "reason"),
    [
        ("max_run_duration", "The run took longer than its max_run_duration of 1 d"),
        ("max_suspend_duration", "Waiting at 'approval' took longer than the max_suspend_duration of 1 d"),
    ],
)
def test_who_asked_for_it_is_told_that_a_run_took_too_long(world: World, limit: str, reason: str) -> None:
    order = flow_of(
        world,
        lambda step: step.wait_for_event("approval", "approval", timeout="3 days"),
        name="order",
        on_failure="elsewhere.failed",
        **{limit: "1 day"},
    )
    order.run()
    world.run_after(86_400)
    (message,) = world.sent
    assert told(message) == COMPLETE | {"status": "terminated", "output": None, "reason": reason}


def test_the_code_of_the_worker_that_ends_the_run_decides_what_is_sent(world: World) -> None:
    def deploy(task: str) -> FlowControl:
        @world.workflow(name="order", on_complete=task)
        def order(event: WorkflowEvent[Any], step: Step) -> None:
            step.sleep("a day", "1 day")

        return order

    deploy("shop.old").run()
    deploy("shop.new")
    world.run_after(86_400)
    assert [message.name for message in world.sent] == ["shop.new"]


def test_only_what_was_asked_for_is_sent(world: World) -> None:
    flow = echoing(world, on_failure=None)
    flow.run("fail", id="i-1")
    flow.run("fine", id="i-2")
    echoing(world, on_complete=None).run("fine", id="i-3")
    assert [told(message)["instanceId"] for message in world.sent] == ["i-2"]


def test_who_terminates_or_restarts_a_run_knows_it(world: World) -> None:
    order = flow_of(
        world, lambda step: step.wait_for_event("approval", "approval"), name="order", on_complete=done, on_failure=done
    )
    instance = order.run()
    instance.restart()
    world.run_until_idle()
    instance.terminate("not wanted")
    world.run_after(86_400)
    assert world.sent == []


def test_a_task_that_turns_out_to_be_none_keeps_no_run_from_its_end(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    def make() -> Any:
        raise NotRegistered("shop.done")

    instance = echoing(world, on_complete=PromiseProxy(make)).run("fine")
    assert (str(instance.status), world.sent) == ("complete", [])
    assert "Nothing is sent at the end of order/i-1#1: its task has no name" in caplog.text


def test_each_run_is_told_under_an_id_of_its_own(world: World) -> None:
    instance = echoing(world).run("fine")
    instance.restart()
    world.run_until_idle()
    assert [told(message)["runNumber"] for message in world.sent] == [1, 2]
    assert len({message.id for message in world.sent}) == 2


def test_an_instance_that_is_made_again_under_its_id_is_told_under_another_id(world: World) -> None:
    flow = echoing(world, retention="1 hour")
    world.is_broker_away = True
    flow.run("fine")
    world.advance(7200)
    assert world.delete_expired() == 1
    flow.run("fine")
    world.is_broker_away = False
    world.run_after(3600)
    assert len({message.id for message in world.sent}) == len(world.sent) == 2


def test_a_workflow_that_no_worker_survives_is_told_too(make_world: Any) -> None:
    world = make_world(max_crashes=2)

    order = flow_of(
        world, lambda step: step.do("blow up", lambda: world.worker.runtime.die()), name="order", on_failure=done
    )
    order.run()
    for _ in range(10):
        world.run_after(120)
    (message,) = world.sent
    assert told(message)["error"]["name"] == "WorkerCrashLoop"


# --- what gets lost on the way ------------------------------------------------------------------


@everywhere
def test_what_the_broker_did_not_take_at_the_end_is_sent_by_a_sweep(world: World) -> None:
    world.is_broker_away = True
    instance = echoing(world).run({"sum": 7})
    assert (str(instance.status), world.sent, len(outbox(world))) == ("complete", [], 1)
    world.is_broker_away = False
    world.run_after(3600)
    assert [told(message) for message in world.sent] == [COMPLETE]
    assert outbox(world) == []


@everywhere
@pytest.mark.parametrize(
    ("where", "times"), [("before-commit", 1), ("after-commit", 1), ("before-publish", 1), ("after-publish", 2)]
)
def test_a_worker_that_dies_at_the_end_loses_nothing(world: World, where: str, times: int) -> None:
    worker = world.new_worker()

    @world.workflow(name="order", on_complete=done)
    def order(event: WorkflowEvent[Any], step: Step) -> Any:
        worker.runtime.crash_at = where  # of its last commit: there is no other
        return event.payload

    order.create({"sum": 7})
    assert world.tick() == ["crashed"]
    for _ in range(3):
        world.run_after(60)
    assert [told(message) for message in world.sent] == [COMPLETE] * times
    assert len({message.id for message in world.sent}) == 1  # at least once, under one id
    assert outbox(world) == []


@servers
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("payload", ["fine", "fail"])
def test_an_end_in_doubt_is_told_once(world: World, when: str, payload: str) -> None:
    with ExitStack() as stack:

        @world.workflow(name="order", on_complete=done, on_failure=done)
        def order(event: WorkflowEvent[Any], step: Step) -> Any:
            cuts.append(stack.enter_context(cut_commit(world.worker.store, when=when)))
            if event.payload == "fail":
                raise LookupError("no such article")

        cuts: list[list[str]] = []
        instance = order.create(payload)
        world.tick()
    assert cuts == [[when]]
    assert instance.status == ("errored" if payload == "fail" else "complete")
    world.run_after(3600)
    assert [told(message)["status"] for message in world.sent] == [instance.status]


@servers
@pytest.mark.parametrize("when", ["before", "after"])
def test_the_end_of_a_run_that_took_too_long_in_doubt_is_told_once(world: World, when: str) -> None:
    order = flow_of(
        world,
        lambda step: step.wait_for_event("approval", "approval", timeout="3 days"),
        name="order",
        on_failure=done,
        max_run_duration="1 day",
    )
    instance = order.run()
    world.advance(86_400)
    with cut_commit(world.worker.store, when=when) as cut:
        assert world.worker.advance(instance.ref).startswith("terminated: The run took longer")
    assert cut == [when]
    world.run_after(3600)
    assert [told(message)["status"] for message in world.sent] == ["terminated"]


@servers
@pytest.mark.parametrize("when", ["before", "after"])
def test_the_end_of_a_linear_run_in_doubt_is_told_once(world: World, when: str) -> None:
    with ExitStack() as stack:

        def pay(_: LinearContext) -> Completed:
            cuts.append(stack.enter_context(cut_commit(world.worker.store, when=when)))
            return Completed()

        cuts: list[list[str]] = []
        linear(world, pay).create()
        world.tick()
    assert cuts == [[when]]
    world.run_after(3600)
    assert [told(message)["status"] for message in world.sent] == ["complete"]


def test_an_end_that_is_committed_again_is_told_once(world: World) -> None:
    flow = echoing(world)

    def fail_once() -> None:
        raise sa.exc.OperationalError("COMMIT", {}, SerializationFailure())

    flow.create("fine")
    worker = world.new_worker()
    worker.runtime.at["claimed"] = lambda: worker.runtime.at.update({"before-commit": fail_once})
    world.run_until_idle()
    assert len(world.sent) == 1


def test_a_worker_that_was_superseded_tells_nothing(world: World) -> None:
    @world.workflow(name="order", on_complete=done)
    def order(event: WorkflowEvent[Any], step: Step) -> str:
        if event.run_number == 1:
            instance.restart()
        return "done"

    instance = order.create()
    world.run_until_idle()
    assert [told(message)["runNumber"] for message in world.sent] == [2]


# --- what it costs, and what it holds -----------------------------------------------------------


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_without_a_hook_the_end_is_one_statement(world: World) -> None:
    said: list[str] = []

    def count(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        said.append(statement.split(maxsplit=1)[0])

    # Two passes: of the first claims of a process, each writes how far the queue has come. Then a clock decides.
    warm = echoing(world, name="warm")
    for number in range(2):
        warm.create("fine", id=f"w-{number}")
        world.worker.advance(warm.of(f"w-{number}").ref)
    ends = {}
    for name, hook in (("plain", None), ("hooked", done)):
        flow = echoing(world, name=name, on_complete=hook)
        flow.create("fine", id=name)
        sa.event.listen(world.worker.store.engine, "before_cursor_execute", count)
        world.worker.advance(flow.of(name).ref)
        sa.event.remove(world.worker.store.engine, "before_cursor_execute", count)
        ends[name], said[:] = list(said), []
    assert ends["plain"] == ["UPDATE", "WITH"]
    assert ends["hooked"][:5] == ["UPDATE", "UPDATE", "WITH", "INSERT", "DELETE"]


@pytest.mark.parametrize("size", [1000, 900, 700])
def test_an_output_that_is_too_large_for_the_message_is_left_out(make_world: Any, size: int) -> None:
    world = make_world(max_payload_bytes=1000)
    output = "x" * (size - 2)
    instance = echoing(world).run(output)
    assert instance.output == output
    (message,) = world.sent
    has_room = size == 700
    assert told(message)["output"] == (output if has_room else None)
    assert told(message).get("outputOmitted") is (None if has_room else True)


def test_an_output_as_deep_as_outputs_may_be_is_told(make_world: Any) -> None:
    world = make_world(max_payload_depth=3)
    echoing(world).run([[["deep"]]])
    assert [told(message)["output"] for message in world.sent] == [[[["deep"]]]]


def test_an_error_is_told_however_small_payloads_have_to_be(make_world: Any) -> None:
    world = make_world(max_payload_bytes=20)
    echoing(world).run("fail")
    assert told(world.sent[0])["error"] == {"name": "LookupError", "message": "no such article"}
    assert "outputOmitted" not in told(world.sent[0])


# --- linear workflows ---------------------------------------------------------------------------


@everywhere
@pytest.mark.parametrize("answer", [Completed({"sum": 7}), Dead("nobody pays")], ids=["complete", "dead"])
def test_a_linear_workflow_tells_with_its_last_boundary(world: World, answer: Any) -> None:
    def pay(ctx: LinearContext) -> Any:
        ctx.tx.send_task("shop.mail", 7)
        return answer

    linear(world, pay).run()
    *sent, last = world.sent
    if isinstance(answer, Completed):
        assert ([message.name for message in sent], last.name, told(last)) == (["shop.mail"], "shop.done", COMPLETE)
    else:
        error = {"name": "Dead", "message": "nobody pays"}
        assert (sent, last.name) == ([], "elsewhere.failed")
        assert told(last) == COMPLETE | {"status": "errored", "output": None, "error": error}
    assert outbox(world) == []
