"""Instances, steps, items and messages in every state, and how each instance ends once workers look at it again.

The dumps under ``dumps/`` hold these rows as the frozen revision wrote them. The code that follows must read and finish
them, so nothing here changes: a later revision adds states of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import sqlalchemy as sa
from celery import Celery

from celery_durable import (
    LinearContext,
    LinearStep,
    NonRetryableError,
    Retries,
    Step,
    StepConfig,
    StepFailed,
    StepTx,
    WorkflowEvent,
    values,
)
from celery_durable.model import ItemRef, ItemStatus
from celery_durable.store import emissions, heartbeats, outbox, queues
from celery_durable.store.heartbeats import HeartbeatUpdate
from tests.engine.lines import Line, waits_for
from tests.engine.world import FlowControl, World
from tests.references import reference_of

app = Celery("frozen", set_as_current=False)


@app.task(name="frozen.work", shared=False)
def work(number: int) -> int:
    """Never run here: the tests answer in its place."""


ENDS: dict[str, Any] = {
    "sleeping": "slept",
    "waiting": {"paid": 5},
    "listening": {"eur": 7},
    "gathering": [None, {"paid": 6}],
    "repeating": "2 attempts",
    "delegating": 10,
    "mapping": [20, 21, 22, 23, 24, 25],
    "losing": [30, "ValueError: no"],
    "parent": "child of parent",
    "paused": "slept",
    "due": "done",
    "crashed": "done",
    "branching": ["branch", "branch"],
    "racing": "slept",
    "rewound": "slept",
    "forked": "slept",
    "labelled": "slept",
    "complete": "done",
    "corrected": "complete",
    "errored": "errored",
    "terminated": "terminated",
    "linear-waiting": "SHIP done",
    "linear-done": "SHIP done",
    "linear-ready": "SHIP done",
    "linear-crashed": "SHIP done",
    "linear-dead": "errored",
}
"""What each instance returns in the end, by id; its status if it returns nothing."""
_LATER = {"forked", "due", "crashed", "branching", "corrected", "labelled"}


def _charge(tx: StepTx, way: str) -> dict[str, str]:
    tx.set_labels({"way": way})
    if way == "labelled":
        tx.send_task("frozen.mail", way)
        tx.send_outbound("Frozen", {"way": way})
    return {"way": way}


def _repeat(tx: StepTx) -> str:
    if tx.attempt == 1:
        raise OSError("not yet")
    return f"{tx.attempt} attempts"


def _fail() -> None:
    raise NonRetryableError("for good")


def _gather(step: Step) -> list[Any]:
    futures = (step.submit_sleep("nap", "1 day"), step.submit_wait_for_event("p", "paid", timeout="9 days"))
    nothing, paid = step.gather(*futures)
    return [nothing, paid.payload]


def _lose(step: Step) -> list[Any]:
    got = step.map("work", work.s(), [0, 1], timeout="300 days", return_exceptions=True)
    return [f"{each.error_name}: {each.error_message}" if isinstance(each, StepFailed) else each for each in got]


def _race(step: Step) -> str:
    step.first("race", step.submit_sleep("short", "1 minute"), step.submit_wait_for_event("no", "no"))
    return _sleep(step)


def _sleep(step: Step) -> str:
    step.sleep("nap", "1 day")
    return "slept"


_WAYS: dict[str, Callable[[Step], Any]] = {
    "waiting": lambda step: step.wait_for_event("payment", "paid", timeout="300 days").payload,
    "listening": lambda step: step.wait_for_topic("price", "prices", timeout="300 days").payload,
    "gathering": _gather,
    "repeating": lambda step: step.do("flaky", StepConfig(retries=Retries(limit=3, delay="1 day")), _repeat),
    "delegating": lambda step: step.task("work", work.s(0), timeout="300 days"),
    "mapping": lambda step: step.map("work", work.s(), range(6), max_concurrency=2, timeout="300 days", retries=2),
    "losing": _lose,
    "branching": lambda step: step.gather(step.submit("one", lambda: "branch"), step.submit("two", lambda: "branch")),
    "racing": _race,
    "due": lambda _: "done",
    "crashed": lambda _: "done",
    "complete": lambda _: "done",
    "errored": lambda step: step.do("fail", _fail),
    "corrected": lambda step: step.do("fail", _fail),
}
"""What the workflow "shop" does after its first step, by the id of the instance; the others sleep."""


def deploy(world: World) -> tuple[FlowControl, Line]:
    """Register the code of all instances."""

    @world.workflow(name="child")
    def child(event: WorkflowEvent[str], step: Step) -> str:
        step.sleep("nap", "1 day")
        return f"child of {event.payload}"

    @world.workflow(name="shop")
    def shop(event: WorkflowEvent[str], step: Step) -> Any:
        way = event.payload
        step.log.info("started", way=way)
        step.publish("way", way)
        step.do("charge", _charge, way)
        if way == "parent":
            return step.child("child", child, way, id="child-of-parent")
        return _WAYS.get(way, _sleep)(step)

    def pay(ctx: LinearContext) -> Any:
        if ctx.params["way"] == "linear-dead":
            raise NonRetryableError("no")
        return waits_for(timeout="300 days")(ctx)

    line = Line(world, [LinearStep("VALIDATE"), LinearStep("PAY"), LinearStep("SHIP")], PAY=pay)
    return shop, line


def build(world: World) -> None:
    """Bring instances, items and messages into every state."""
    shop, line = deploy(world)
    operations, store = world.operations, world.store
    for way in ENDS:
        if way not in _LATER and not way.startswith("linear"):
            shop.create(way, id=way)
    world.run_until_idle()
    operations.lifecycle.pause("shop", "paused")
    operations.lifecycle.terminate("shop", "terminated", reason="by the customer")
    operations.rewind.restart("shop", "rewound", from_step="nap", reason="again")
    operations.rewind.fork("shop", "sleeping", "nap", id="forked")
    operations.events.send("shop", "sleeping", "unasked", {"n": 1}, id="event-1")
    operations.events.send("shop", "gathering", "paid", {"paid": 6}, id="event-2")
    shop.run("corrected", id="corrected")
    operations.interventions.skip("shop", "corrected", "fail", by="eve", reason="not needed")
    world.run_after(timedelta(minutes=2))  # the race is over

    _answer(world, "losing", 0, 30)
    _answer(world, "losing", 1, error=ValueError("no"))
    world.run_until_idle()
    _answer(world, "mapping", 0, 20)

    for way in ("linear-waiting", "linear-done", "linear-dead"):
        line.flow.run({"way": way}, id=way)
    operations.events.send("order", "linear-done", "paid", 5, id="event-3")
    world.run_until_idle()
    line.flow.create({"way": "linear-ready"}, id="linear-ready")
    shop.create("due", id="due")
    for flow, way in ((shop, "crashed"), (shop, "branching"), (line.flow, "linear-crashed")):
        instance = flow.create({"way": way} if flow is line.flow else way, id=way)
        if way == "branching":
            world.worker.runner.advance(instance.ref, task_id="task", node="worker", max_steps=1)
        dying = world.new_worker()
        dying.runtime.crash_at = "before-body" if way == "branching" else "after-body"
        dying.advance(instance.ref)

    _answer(world, "mapping", 1, error=OSError("once more"))  # no pass has decided about it yet

    world.is_broker_away = True  # what the outbox holds stays there
    world.messages.clear()
    labelled = shop.create("labelled", id="labelled", labels={"of": "shop"})
    world.worker.advance(labelled.ref)
    (event_id,) = [row.id for row in world.rows(sa.select(store.tables.outbox)) if row.kind == "event"]
    lease = timedelta(seconds=9)
    delivery = store.transact(lambda tx: outbox.begin_delivery(tx, event_id, token="t" * 36, lease=lease))
    assert delivery is not None
    store.transact(lambda tx: outbox.release_delivery(tx, delivery, retry_in=None, error="no handler"))
    started = {"emission_id": "emission-1", "topic": "prices", "payload": '{"eur":7}', "lease": lease}
    assert store.transact(lambda tx: emissions.begin(tx, **started))
    store.transact(lambda tx: queues.insert(tx, "durable", sent_at=world.now))
    for kind in ("dispatcher", "worker"):
        update = HeartbeatUpdate(id=f"{kind}-1", kind=kind, node="shop", pid=1, queues=["durable"])  # type: ignore[arg-type]
        store.transact(lambda tx, update=update: heartbeats.upsert(tx, update))


def finish(world: World) -> dict[str, Any]:
    """Let workers finish all instances; returns what each one returned, or its status if it returned nothing."""
    shop, line = deploy(world)
    world.operations.lifecycle.resume("shop", "paused")
    world.operations.events.send("shop", "waiting", "paid", {"paid": 5}, id="event-4")
    for way in ("linear-waiting", "linear-ready", "linear-crashed"):
        world.operations.events.send("order", way, "paid", 6, id=f"event-{way}")
    for _ in range(3):
        world.run_after(timedelta(days=2))
        for way, number in (("delegating", 10), ("mapping", 20)):
            for position in _unanswered(world, way):
                _answer(world, way, position, number + position)
    world.run_until_idle()
    flows = {id_: line.flow if id_.startswith("linear") else shop for id_ in ENDS}
    states = {id_: flow.of(id_).state for id_, flow in flows.items()}
    return {id_: str(state.status) if state.output is None else state.output for id_, state in states.items()}


def _unanswered(world: World, instance_id: str) -> list[int]:
    return [row.position for row in _items(world, instance_id) if row.status == ItemStatus.SENT.value]


def _items(world: World, instance_id: str) -> list[Any]:
    t = world.store.tables
    joined = t.item.join(t.instance, t.instance.c.id == t.item.c.instance_pk)
    query = sa.select(t.item).select_from(joined).where(t.instance.c.instance_id == instance_id)
    return world.rows(query.order_by(t.item.c.position))


def _answer(
    world: World, instance_id: str, position: int, output: Any = None, *, error: Exception | None = None
) -> None:
    """Answer in the place of the worker that did the task of this position."""
    row = next(row for row in _items(world, instance_id) if row.position == position)
    st = world.store.tables.step.c
    is_step = (st.instance_pk == row.instance_pk, st.run_number == row.run_number, st.step_key == row.step_key)
    (step,) = world.rows(sa.select(st.type, st.wait_event_type).where(*is_step))
    item = ItemRef(row.instance_pk, row.step_key, row.position, row.attempts)
    event_type = step.wait_event_type if step.type == "task" else item.type
    reference = reference_of(world.store, world.instance("shop", instance_id).ref, event_type)
    if error is None:
        payload = values.encode_answer(values.encode(output, what="Result", limits=world.settings.limits))
    else:
        payload = values.encode_error_answer(type(error).__name__, str(error))
    assert world.operations.answers.accept(reference, payload).is_taken
