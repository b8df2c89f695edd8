"""What a step sends: tasks and outbound events leave with its commit, at least once, under an id that stays."""

from __future__ import annotations

import functools
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from celery import Celery

from celery_durable import NonRetryableError, OutboundEvent, StepTx
from celery_durable.model import OutboxKind, OutboxMessage
from celery_durable.runtime import Runtime
from celery_durable.store.runs.outbox import begin_delivery
from celery_durable.tasks.outbox import Handler, OutboundDeliverer, Outbox
from celery_durable.tasks.publishing import PublishReport, SendState
from celery_durable.testing.processes import ends_the_process
from tests.support.flows import flow_of
from tests.support.world import SerializationFailure, World

everywhere = pytest.mark.parametrize("database", ["sqlite", "postgresql", "mariadb"], indirect=True)

app = Celery("others", set_as_current=False)


@app.task(name="shop.mail")
def mail(order: int, *, urgent: bool = False) -> None:
    """Never run here."""


def sending(world: World, send: Any, name: str = "order") -> Any:
    """A workflow whose one step sends something."""
    return flow_of(world, lambda step: step.do("announce", lambda tx: send(tx)), name=name)


def outbox(world: World) -> list[Any]:
    o = world.store.tables.outbox
    return world.rows(sa.select(o).order_by(o.c.created_at, o.c.id))


@everywhere
def test_a_task_is_sent_when_its_step_has_committed(world: World) -> None:
    def send(tx: StepTx) -> list[str]:
        return [
            tx.send_task(mail.s(7, urgent=True).set(queue="mails", priority=3)),
            tx.send_task(mail, 8),
            tx.send_task("elsewhere.pack", 9, fragile=True),
        ]

    ids = sending(world, send).run().output
    assert [(message.id, message.name, message.content) for message in world.sent] == [
        (ids[0], "shop.mail", {"args": [7], "kwargs": {"urgent": True}, "options": {"queue": "mails", "priority": 3}}),
        (ids[1], "shop.mail", {"args": [8], "kwargs": {}, "options": {}}),
        (ids[2], "elsewhere.pack", {"args": [9], "kwargs": {"fragile": True}, "options": {}}),
    ]
    assert len(set(ids)) == 3
    assert outbox(world) == []  # what is sent is forgotten


@everywhere
def test_what_the_broker_did_not_take_is_sent_by_a_sweep(world: World) -> None:
    world.is_broker_away = True
    instance = sending(world, lambda tx: tx.send_task("shop.mail", 7)).run()
    assert (instance.status, world.sent, len(outbox(world))) == ("complete", [], 1)
    world.run_after(3600)
    assert (world.sent, len(outbox(world))) == ([], 1)
    world.is_broker_away = False
    world.run_after(1)
    assert [message.id for message in world.sent] == [instance.output]
    world.run_after(3600)
    assert (len(world.sent), outbox(world)) == (1, [])


@pytest.mark.parametrize(("where", "times"), [("before-publish", 1), ("after-publish", 2)])
def test_a_worker_that_dies_while_it_sends_loses_nothing(world: World, where: str, times: int) -> None:
    flow = sending(world, lambda tx: tx.send_task("shop.mail", 7))
    world.new_worker().runtime.crash_at = where
    instance = flow.run()
    world.run_after(60)
    assert [message.id for message in world.sent] == [instance.output] * times  # at least once, under one id
    assert outbox(world) == []


def test_a_worker_that_dies_before_the_commit_has_sent_nothing(world: World) -> None:
    flow = sending(world, lambda tx: tx.send_task("shop.mail", tx.attempt))
    world.new_worker().runtime.crash_at = "after-body"
    instance = flow.run()
    assert world.sent == []
    world.run_after(60)
    assert [message.content["args"] for message in world.sent] == [[2]]
    assert instance.status == "complete"


def test_a_failed_attempt_sends_nothing_and_the_next_one_sends_under_the_same_id(world: World) -> None:
    ids = []

    def send(tx: StepTx) -> None:
        ids.append(tx.send_task("shop.mail", tx.attempt))
        if tx.attempt == 1:
            raise ValueError("not yet")

    sending(world, send).run()
    assert world.sent == []
    world.run_after(10)
    assert [(message.id, message.content["args"]) for message in world.sent] == [(ids[0], [2])]
    assert ids[0] == ids[1]


def test_a_boundary_that_is_committed_again_sends_once(world: World) -> None:
    flow = sending(world, lambda tx: (tx.mutate(lambda _: None), tx.send_task("shop.mail", 7))[1])

    def fail_once() -> None:
        raise sa.exc.OperationalError("COMMIT", {}, SerializationFailure())

    flow.create()
    worker = world.new_worker()
    worker.runtime.at["after-body"] = lambda: worker.runtime.at.update({"before-commit": fail_once})
    world.run_until_idle()
    assert len(world.sent) == 1


def test_what_is_refused_by_itself_holds_up_nothing_and_is_offered_ever_more_rarely(world: World) -> None:
    world.refused = {"shop.mail"}
    sending(world, lambda tx: [tx.send_task("shop.mail", 7), tx.send_task("shop.pack", 8)]).run()
    assert ([message.name for message in world.sent], len(outbox(world))) == (["shop.pack"], 1)
    for _ in range(3600):
        world.run_after(1)
    assert 5 <= world.offered.count("shop.mail") <= 15
    world.refused = set()
    world.run_after(600)
    assert ([message.name for message in world.sent], outbox(world)) == (["shop.pack", "shop.mail"], [])


def test_any_number_of_sweeps_send_a_row_once(world: World) -> None:
    world.is_broker_away = True
    sending(world, lambda tx: tx.send_task("shop.mail", 7)).run()
    world.advance(60)
    world.is_broker_away = False
    others = [world.new_beat() for _ in range(3)]
    assert [beat.sweeper.sweep() for beat in others] == [1, 0, 0]
    assert len(world.sent) == 1


@pytest.mark.parametrize(
    ("send", "said"),
    [
        (
            lambda tx: tx.send_task(mail.s(7).set(link=mail.s(8))),
            "Task 'shop.mail' cannot be sent with a step: option 'link' cannot be kept. These can: compression, "
            "exchange, expires, headers, ignore_result, priority, queue, routing_key, shadow, soft_time_limit, "
            "time_limit.",
        ),
        (
            lambda tx: tx.send_task(mail.s(7), 8),
            "Task 'shop.mail' cannot be sent with a step: a signature carries its own arguments; pass it alone.",
        ),
        (
            lambda tx: tx.send_task("shop.mail", {"who": [object()]}),
            "Task 'shop.mail' cannot be stored as JSON: $.args[0].who[0] is a object, which has no JSON form. Use "
            "plain data (or pydantic models, dataclasses, datetimes, Decimals, UUIDs, enums); keep other things "
            "elsewhere and store a reference.",
        ),
    ],
    ids=["link", "arguments twice", "no JSON"],
)
@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_what_cannot_be_kept_is_refused_where_it_is_written(world: World, send: Any, said: str) -> None:
    instance = sending(world, send).run()
    assert instance.error.partition(": ")[2] == said
    assert (world.sent, outbox(world)) == ([], [])


# --- outbound events ----------------------------------------------------------------------------


class Post:
    """Handlers of outbound events, and a worker that delivers what was sent."""

    def __init__(self, world: World) -> None:
        self.world, self.got = world, list[OutboundEvent]()
        self.errors: list[BaseException] = []
        self.handlers = {"OrderShipped": Handler.of(self.shipped, 2)}

    def shipped(self, event: OutboundEvent) -> None:
        self.got.append(event)
        if self.errors:
            raise self.errors.pop(0)

    def deliver(self) -> list[str]:
        runtime: Runtime = self.world.worker.runtime
        worker = OutboundDeliverer(self.world.store, self.world.settings, runtime, self.handlers, ends_the_process)
        messages, self.world.sent[:] = list(self.world.sent), []
        return [worker.deliver(message.id) for message in messages]


@pytest.fixture
def post(world: World) -> Post:
    sending(world, lambda tx: tx.send_outbound("OrderShipped", {"order": 7})).run()
    return Post(world)


@everywhere
def test_an_outbound_event_is_delivered_to_its_handler_once(world: World, post: Post) -> None:
    world.sent *= 2  # a message that comes twice
    assert post.deliver() == ["delivered", "noop: delivered, not due, or claimed by another worker"]
    (event,) = post.got
    assert event == OutboundEvent("OrderShipped", {"order": 7}, event.id, "order", "i-1", 1, 1)
    assert outbox(world) == []


@everywhere
@pytest.mark.parametrize("last", [ValueError("full"), NonRetryableError("full")])
def test_a_handler_that_fails_is_called_again_by_the_databases_time_and_at_most_so_often(
    world: World, post: Post, last: Exception
) -> None:
    times = 3 if isinstance(last, ValueError) else 2  # two retries: three attempts
    post.errors = [*[ValueError("full")] * (times - 1), last]
    assert post.deliver() == ["tried again: ValueError"]
    world.run_after(9)
    assert post.deliver() == []
    world.run_after(1)
    if times == 3:
        assert post.deliver() == ["tried again: ValueError"]
        world.run_after(20)
    assert post.deliver() == [f"given up: {type(last).__name__}"]
    world.run_after(86_400)
    assert post.deliver() == []
    assert [event.attempt for event in post.got] == list(range(1, times + 1))
    assert len({event.id for event in post.got}) == 1
    (row,) = outbox(world)  # kept for people
    assert (row.last_error, row.next_check_at) == (f"{type(last).__name__}: full", None)


def test_an_event_whose_message_got_lost_is_sent_again(world: World, post: Post) -> None:
    world.sent.clear()
    world.run_after(2)
    assert post.deliver() == ["delivered"]


def test_a_worker_that_dies_in_a_handler_has_the_event_delivered_again(world: World, post: Post) -> None:
    post.errors = [KeyboardInterrupt()]  # stopped in good order: no attempt
    with pytest.raises(KeyboardInterrupt):
        post.deliver()
    world.run_after(2)
    assert post.deliver() == ["delivered"]
    assert [event.attempt for event in post.got] == [1, 1]


def test_an_event_that_no_worker_survives_is_given_up(world: World, post: Post) -> None:
    for attempt in range(3):  # two retries: three attempts
        (message,) = world.sent
        take = functools.partial(begin_delivery, id_=message.id, token=f"worker {attempt}", lease=timedelta(minutes=5))
        assert world.store.transact(take).attempt == attempt + 1  # type: ignore[union-attr]  # and it is never heard of again
        world.sent.clear()
        world.run_after(300)
    assert post.deliver() == ["given up: WorkerCrashLoop"]
    assert post.got == []
    world.run_after(86_400)
    assert (post.deliver(), [row.next_check_at for row in outbox(world)]) == ([], [None])


def test_a_worker_without_the_handler_leaves_the_event_for_one_that_has_it(world: World, post: Post) -> None:
    handlers, post.handlers = post.handlers, {}
    assert post.deliver() == ["noop: outbound event 'OrderShipped' has no handler in this worker"]
    (row,) = outbox(world)
    assert (row.attempts, row.last_error) == (0, "No handler: the last worker has no @durable.outbound('OrderShipped')")
    world.run_after(5)
    post.handlers = handlers
    assert post.deliver() == ["delivered"]


def test_a_worker_without_the_handler_keeps_the_error_of_the_last_attempt(world: World, post: Post) -> None:
    post.errors = [ValueError("full")]
    assert post.deliver() == ["tried again: ValueError"]
    world.run_after(600)
    post.handlers = {}
    assert post.deliver() == ["noop: outbound event 'OrderShipped' has no handler in this worker"]
    (row,) = outbox(world)
    assert (row.attempts, row.last_error) == (1, "ValueError: full")


@pytest.mark.parametrize("is_lost", [False, True])
def test_many_messages_are_sent_and_removed_in_batches(world: World, is_lost: bool) -> None:
    """So that a crash repeats some of them, and no sweep takes for lost what is still being sent."""
    world.is_broker_away = True

    def send(tx: StepTx) -> None:
        for number in range(450):
            tx.send_task("shop.mail", number)

    sending(world, send).run()
    parts = []

    def take(messages: Any) -> PublishReport:
        parts.append((len(messages), len(outbox(world))))
        return PublishReport.of(len(messages), SendState.UNSENT if is_lost and len(parts) == 2 else SendState.SENT)

    posting = Outbox(world.store, world.settings, take)
    posting.send_committed(
        [OutboxMessage(row.id, OutboxKind(row.kind), row.name, row.payload) for row in outbox(world)]
    )
    if is_lost:
        assert (parts, len(outbox(world))) == ([(200, 450), (200, 250)], 250)
    else:
        assert (parts, len(outbox(world))) == ([(200, 450), (200, 250), (50, 50)], 0)


def test_a_late_sender_leaves_to_a_sweep_what_that_has_taken(world: World) -> None:
    world.is_broker_away = True
    sending(world, lambda tx: [tx.send_task("shop.mail", number) for number in range(300)][:0]).run()
    sent: list[str] = []

    def take(messages: Any) -> PublishReport:
        sent.extend(each.id for each in messages)
        return PublishReport.of(len(messages), SendState.SENT)

    def take_late(messages: Any) -> PublishReport:
        if not sent:
            world.advance(2 * world.settings.grace)
            Outbox(world.store, world.settings, take).sweep()
        return take(messages)

    Outbox(world.store, world.settings, take_late).send_committed(
        [OutboxMessage(row.id, OutboxKind(row.kind), row.name, row.payload) for row in outbox(world)]
    )
    assert (len(sent), len(set(sent))) == (500, 300)  # it was sending the first 200 when the sweep came


def test_a_sweep_allows_more_time_to_send_many_messages(world: World) -> None:
    sending(world, lambda tx: [tx.send_task("shop.mail", number) for number in range(300)][:0]).create()
    world.is_broker_away = True
    world.worker.advance(world.messages.pop(0).ref)
    later = {row.next_check_at - row.created_at for row in outbox(world)}
    grace = world.settings.grace // timedelta(microseconds=1)
    assert later == {grace, grace + 50_000}  # that of the first 200, and that of the others
