"""The dispatcher of `durable dev`: what other processes have sent to another broker is published again at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery

from celery_durable import Durable, Step, WorkflowEvent
from celery_durable.testing import databases
from tests.conftest import MovableRuntime
from tests.support.embedded import messages

pytestmark = pytest.mark.parametrize("database", ["sqlite"], indirect=True)

SECONDS = 1.0
"""More than the dispatcher leaves a worker to claim a run, and less than any rule of a shared broker."""


@pytest.fixture
def runtime() -> MovableRuntime:
    return MovableRuntime()


@pytest.fixture
def dev(make_app: Callable[..., Celery], runtime: MovableRuntime) -> Durable:
    """A Durable whose settings leave a message a day, and a workflow "order"."""
    app = make_app(
        durable_grace_seconds=86_400.0, durable_redispatch_seconds=86_400.0, durable_redispatch_max_seconds=86_400.0
    )
    durable = Durable(app, runtime=runtime)

    @durable.workflow(name="order")
    def order(event: WorkflowEvent[Any], step: Step) -> None: ...

    return durable


def create_elsewhere(durable: Durable) -> None:
    """Create an instance, as a command in another terminal does. Its message is sent, and does not arrive."""
    durable.workflows["order"].create(None, id="o-1")
    assert len(messages(durable.app)) == 1


@pytest.mark.parametrize(("is_dev", "published"), [(True, 1), (False, 0)])
def test_a_message_that_went_elsewhere_is_sent_here(
    dev: Durable, runtime: MovableRuntime, is_dev: bool, published: int
) -> None:
    if is_dev:
        databases.run_dispatcher_in_worker(dev)
    create_elsewhere(dev)
    runtime.advance(SECONDS)
    assert (dev.internals.sweeper.seconds_to_next() <= 0) is is_dev
    assert dev.internals.sweeper.sweep() == published
    assert [message.payload[0] for message in messages(dev.app)] == [["order", "o-1", 1]] * published


def test_a_message_that_waits_here_is_not_sent_again(dev: Durable, runtime: MovableRuntime) -> None:
    databases.run_dispatcher_in_worker(dev)
    dev.workflows["order"].create(None, id="o-1")
    runtime.advance(SECONDS)
    assert dev.internals.sweeper.sweep() == 0
    assert len(messages(dev.app)) == 1


def test_a_worker_has_time_to_claim_what_it_has_just_taken(dev: Durable, runtime: MovableRuntime) -> None:
    databases.run_dispatcher_in_worker(dev)
    create_elsewhere(dev)
    assert dev.internals.sweeper.seconds_to_next() > 0
    assert dev.internals.sweeper.sweep() == 0
