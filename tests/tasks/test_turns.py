"""Turns of a dispatcher: one batch of each kind, and none waits until another is done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import sqlalchemy as sa
from celery import Celery

from celery_durable import Durable, Step, WorkflowEvent
from celery_durable.model import DueRun, OutboxKind, OutboxMessage, RunRef
from celery_durable.runtime import Runtime
from celery_durable.store.runs import outbox
from celery_durable.store.runs.claims import RESUMING
from celery_durable.tasks.dispatcher import Sweeper
from celery_durable.tasks.outbox import Outbox
from celery_durable.tasks.publishing import PublishReport, SendState

_BATCH = 10


class Broker:
    """Takes everything, and writes down in which order."""

    def __init__(self) -> None:
        self.taken: list[RunRef | str] = []
        self.lengths: dict[str, int] = {}

    def publish(self, due_runs: Sequence[DueRun]) -> PublishReport:
        self.taken += [due.ref for due in due_runs]
        return PublishReport.of(len(due_runs), SendState.SENT)

    def send(self, messages: Sequence[OutboxMessage]) -> PublishReport:
        self.taken += [message.id for message in messages]
        return PublishReport.of(len(messages), SendState.SENT)


def _sweeper(durable: Durable, broker: Broker) -> Sweeper:
    return Sweeper(
        durable.internals.store,
        durable.internals.settings,
        Runtime(),
        broker.publish,
        broker.lengths.get,
        outbox=Outbox(durable.internals.store, durable.internals.settings, broker.send),
    )


def _fill(durable: Durable, *, instances: int, messages: int, queue: str = "here") -> None:
    """So many instances and messages that are due, of which nobody was told."""

    @durable.workflow(name=queue, queue=queue)
    def flow(event: WorkflowEvent[Any], step: Step) -> None: ...

    for number in range(instances):
        durable.internals.operations.create.instance(queue, None, id=f"{queue}-{number}")
    tables = durable.internals.store.tables
    rows = [OutboxMessage(f"m-{number}", OutboxKind.TASK, "mail", "{}") for number in range(messages)]
    with durable.internals.store.engine.begin() as connection:
        connection.execute(sa.update(tables.instance).values(sent_at=None, next_check_at=tables.instance.c.run_at))
    durable.internals.store.transact(
        lambda tx: outbox.insert(tx, rows, pk=1, run_number=1, step_key=None, grace=-durable.internals.settings.grace)
    )


def test_a_full_outbox_delays_an_instance_by_one_batch(make_app: Callable[..., Celery]) -> None:
    durable, broker = Durable(make_app(durable_sweep_batch=_BATCH)), Broker()
    _fill(durable, instances=25, messages=95)
    sweeper = _sweeper(durable, broker)
    assert sweeper.sweep() == 120
    kinds = "".join("i" if isinstance(each, RunRef) else "m" for each in broker.taken)
    assert kinds == "i" * 10 + "m" * 10 + "i" * 10 + "m" * 10 + "i" * 5 + "m" * 75


def test_a_turn_is_bounded(make_app: Callable[..., Celery]) -> None:
    durable, broker = Durable(make_app(durable_sweep_batch=_BATCH)), Broker()
    _fill(durable, instances=25, messages=25)
    sweeper = _sweeper(durable, broker)
    assert sweeper.sweep(max_rounds=1) == 20
    assert sweeper.seconds_to_next() <= 0
    assert sweeper.sweep() == 30


def test_queues_share_a_turn(make_app: Callable[..., Celery]) -> None:
    durable, broker = Durable(make_app(durable_sweep_batch=_BATCH)), Broker()
    _fill(durable, instances=25, messages=0, queue="many")
    _fill(durable, instances=3, messages=0, queue="few")
    _sweeper(durable, broker).sweep(max_rounds=1)
    assert [each.workflow for each in broker.taken if isinstance(each, RunRef)].count("few") == 3


def test_resumed_and_new_runs_share_the_room_of_their_queue(make_app: Callable[..., Celery]) -> None:
    durable, broker = Durable(make_app(durable_queue_high_water=10)), Broker()
    _fill(durable, instances=16, messages=0)
    broker.lengths["here"] = 0
    i = durable.internals.store.tables.instance
    with durable.internals.store.engine.begin() as connection:
        connection.execute(sa.update(i).where(i.c.id > 8).values(priority=RESUMING))
    assert _sweeper(durable, broker).sweep(max_rounds=1) == 10
    assert {f"here-{number}" for number in range(8, 16)} < {each.instance_id for each in broker.taken}


def test_what_waits_for_a_full_queue_is_not_read(make_app: Callable[..., Celery]) -> None:
    durable, broker = Durable(make_app(durable_sweep_batch=_BATCH)), Broker()
    _fill(durable, instances=30, messages=5, queue="full")
    broker.lengths["full"] = 10**6
    _fill(durable, instances=2, messages=0, queue="free")
    sweeper = _sweeper(durable, broker)
    locked: list[Any] = []

    def note(*given: Any) -> None:
        if "workflow_instance" in given[2] and "next_check_at <=" in given[2] and "queue =" in given[2]:
            locked.append(given[3])

    sa.event.listen(durable.internals.store.engine, "before_cursor_execute", note)
    assert sweeper.sweep() == 7
    assert sweeper.seconds_to_next() > 0  # it does not spin
    assert locked
    assert not any("full" in params for params in locked)
