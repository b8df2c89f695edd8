"""After a commit: the pass has recorded it before anybody hears of it, and loses nothing if it stops there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from celery_durable import Step, StepTx, WorkflowEvent, signals
from celery_durable.definitions import LinearStep
from celery_durable.errors import StoreUnavailable
from celery_durable.linear import Completed, LinearContext, Retry
from tests.support.flows import flow_of
from tests.support.lines import Line
from tests.support.world import World, on_one_database


class Terminated(BaseException):
    """Stops the process."""


class Lost(Exception):
    """What a driver raises for SQLSTATE 57P01."""

    sqlstate = "57P01"


@contextmanager
def connected(signal: Any, receiver: Callable[..., None]) -> Iterator[None]:
    signal.connect(receiver, weak=False)
    try:
        yield
    finally:
        signal.disconnect(receiver)


def stop_once() -> Callable[..., None]:
    calls: list[int] = []

    def stop(**_: Any) -> None:
        calls.append(1)
        if len(calls) == 1:
            raise Terminated

    return stop


def advance_once(world: World) -> list[Any]:
    """Advance what is due; returns the summaries and the exceptions."""
    world.sweeper.sweep()
    due, world.messages[:] = list(world.messages), []
    results: list[Any] = []
    for each in due:
        try:
            results.append(world.worker.advance(each.ref))
        except BaseException as error:
            results.append(type(error))
    return results


@on_one_database
def test_a_branch_is_recorded_before_a_receiver_hears_of_it(world: World) -> None:
    instance = flow_of(world, lambda step: step.gather(step.submit("first", int), step.submit("second", int))).create()
    world.new_worker(interruptions=(Terminated,))
    with connected(signals.step_completed, stop_once()):
        assert advance_once(world) == [Terminated]
    assert instance.row.claim_token is None  # released: the other branch's attempt does not count
    assert sorted(instance.statuses().values()) == ["completed", "pending"]
    assert advance_once(world) == ["complete"]


@on_one_database
def test_lines_that_a_commit_has_written_are_not_written_again_by_the_release(world: World) -> None:
    @world.workflow
    def order(event: WorkflowEvent[Any], step: Step) -> None:
        step.log.info("once")
        step.do("charge", int)

    order.create()
    world.new_worker(interruptions=(Terminated,))
    with connected(signals.step_completed, stop_once()):
        assert advance_once(world) == [Terminated]
    assert [row.message for row in world.rows(sa.select(world.store.tables.log))] == ["once"]


def test_a_line_that_is_logged_during_a_commit_is_kept_for_the_next(world: World) -> None:
    @world.workflow
    def order(event: WorkflowEvent[Any], step: Step) -> None:
        def charge(tx: StepTx) -> None:
            tx.mutate(lambda _: step.log.info("in the commit"))

        step.log.info("before")
        step.do("charge", charge)
        step.log.info("after")

    order.create()
    assert advance_once(world) == ["complete"]
    rows = world.rows(sa.select(world.store.tables.log).order_by(world.store.tables.log.c.id))
    assert [row.message for row in rows] == ["before", "in the commit", "after"]


@on_one_database
def test_a_stop_in_a_second_attempt_is_no_retry_of_the_first(world: World) -> None:
    def pay(context: LinearContext) -> Any:
        if context.attempt == 1:
            return Retry(backoff=1, error="away")
        if not stopped:
            stopped.append(1)
            raise Terminated
        return Completed()

    stopped: list[int] = []
    retried: list[dict[str, Any]] = []
    line = Line(world, [LinearStep("pay")], pay=pay)
    line.flow.create()
    world.new_worker(interruptions=(Terminated,))
    with connected(signals.step_retrying, lambda **given: retried.append(given)):
        advance_once(world)
        world.advance(1)
        assert advance_once(world) == [Terminated]
        assert advance_once(world) == ["complete"]
    assert len(retried) == 1


def test_a_branch_that_lost_an_earlier_race_leaves_the_next_race_waiting(world: World) -> None:
    @world.workflow
    def order(event: WorkflowEvent[Any], step: Step) -> None:
        quick, lost = step.submit("quick", int), step.submit_wait_for_event("lost", "go")
        step.first("one", quick, lost)
        step.first("two", lost, step.submit_wait_for_event("late", "later"))

    instance = order.create()
    advance_once(world)
    assert advance_once(world) == []  # due again at once, it would use a worker for nothing
    assert instance.status == "waiting"


@on_one_database
def test_a_body_does_not_run_again_while_the_fate_of_its_commit_is_unknown(world: World) -> None:
    runs: list[int] = []

    @world.workflow
    def order(event: WorkflowEvent[Any], step: Step) -> None:
        def book(tx: StepTx) -> str:
            runs.append(1)
            return world.book(tx, event.instance_id, event.run_number)

        step.do("book", book)

    order.create()
    store = world.worker.store

    def lose_the_connection(_: Session) -> None:
        sa.event.listen(store.engine, "before_cursor_execute", refuse)
        raise sa.exc.OperationalError("COMMIT", {}, Lost())

    def refuse(*_: Any) -> None:
        raise sa.exc.OperationalError("BEGIN", {}, Lost())

    sa.event.listen(Session, "after_commit", lose_the_connection)
    try:
        assert advance_once(world) == [StoreUnavailable]
    finally:
        sa.event.remove(Session, "after_commit", lose_the_connection)
        sa.event.remove(store.engine, "before_cursor_execute", refuse)
    assert runs == [1]
    assert world.booked() == ["book"]
