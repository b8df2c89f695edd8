"""How often a dispatcher looks: what it cannot do anything about must not keep it, and the database, busy."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import sqlalchemy as sa
from celery import Celery

from celery_durable import Durable, Step, WorkflowEvent
from celery_durable.model import DueRun, RunRef
from celery_durable.runtime import Runtime
from celery_durable.tasks.dispatcher import Dispatcher, Sweeper
from celery_durable.tasks.publishing import PublishReport, SendState
from tests.support.embedded import until
from tests.support.flows import flow_of
from tests.support.world import World

_REST_SECONDS = 0.2
_STATEMENTS = 30
"""Those of about four looks."""


def make_sweeper_of_full_queues(durable: Durable) -> Sweeper:
    """A sweeper of a broker whose queues have a million messages."""
    return Sweeper(
        durable.internals.store,
        durable.internals.settings,
        Runtime(),
        lambda due_runs: PublishReport.of(len(due_runs), SendState.SENT),
        lambda _: 10**6,
    )


def test_a_dispatcher_rests_while_full_queues_leave_work_due(make_app: Callable[..., Celery]) -> None:
    app = make_app(durable_grace_seconds=0.001, durable_poll_seconds=_REST_SECONDS)
    durable = Durable(app)

    @durable.workflow
    def order(event: WorkflowEvent[Any], step: Step) -> None:
        """Never run here."""

    order.create(id="o-1")
    seen: list[str] = []
    sa.event.listen(durable.internals.store.engine, "before_cursor_execute", lambda *given: seen.append(given[2]))
    sweeper = make_sweeper_of_full_queues(durable)
    dispatcher = Dispatcher(sweeper, durable.internals.settings)
    until(lambda: sweeper.seconds_to_next() <= 0)
    seen.clear()
    began = time.monotonic()
    dispatcher.start()
    try:
        until(lambda: len(seen) >= _STATEMENTS)
        took = time.monotonic() - began
    finally:
        dispatcher.stop()
    assert took >= 2 * _REST_SECONDS
    until(lambda: sweeper.seconds_to_next() <= 0)  # it is still due, and its queue is asked again every second


def test_a_full_queue_is_reported_only_while_work_waits_for_it(make_app: Callable[..., Celery]) -> None:
    app = make_app(durable_grace_seconds=0.001, durable_poll_seconds=0.01)
    durable = Durable(app)

    @durable.workflow
    def order(event: WorkflowEvent[Any], step: Step) -> None:
        """Never run here."""

    created = order.create(id="o-1")
    sweeper = make_sweeper_of_full_queues(durable)
    dispatcher = Dispatcher(sweeper, durable.internals.settings)
    dispatcher.start()
    try:
        until(lambda: list(sweeper.full_queues()) == [app.conf.durable_queue])
        created.terminate()
        until(lambda: not sweeper.full_queues())  # its length is not read any more
    finally:
        dispatcher.stop()


def test_a_queue_that_others_fill_is_reported_while_a_run_is_due(make_world: Callable[..., World]) -> None:
    """The run sleeps until then, so it has no message in the queue."""
    world = make_world(queue_high_water=1)
    flow_of(world, lambda step: step.sleep("rest", 20)).run()
    world.messages.append(DueRun(RunRef("foreign", "f-1", 1), world.settings.queue))
    for seconds, full in ((10, []), (10, [world.settings.queue])):
        world.advance(seconds)
        assert world.sweeper.sweep() == 0
        world.sweeper.seconds_to_next()
        assert list(world.sweeper.full_queues()) == full
