"""StepTx: what a body writes, creates and sends commits with its step, or not at all."""

from __future__ import annotations

import pytest
import sqlalchemy as sa

from celery_durable import NonRetryableError, Retries, Step, StepConfig, StepTx, WorkflowEvent
from tests.support.authors import names
from tests.support.flows import flow_of
from tests.support.world import World, insert_name, on_one_database

ONCE_MORE = StepConfig(retries=Retries(limit=1, delay=1))


def test_the_session_sees_its_own_writes_and_is_one_for_the_attempt(world: World) -> None:
    def book(tx: StepTx) -> int:
        assert tx.session is tx.session
        insert_name("a")(tx.session)
        return tx.session.scalar(sa.select(sa.func.count()).select_from(names))

    order = flow_of(world, lambda step: step.do("count", book))
    assert order.run().output == 1


def test_a_savepoint_may_be_used(world: World) -> None:
    def book(tx: StepTx) -> str:
        insert_name("kept")(tx.session)
        try:
            with tx.session.begin_nested():
                insert_name("kept")(tx.session)
        except sa.exc.IntegrityError:
            return "the second was refused"
        return "both were taken"

    order = flow_of(world, lambda step: step.do("book names", StepConfig(retries=0), book))
    world.exempt["I1"] = "this body books elsewhere"
    assert order.run().output == "the second was refused"
    assert world.names() == ["kept"]


@on_one_database
@pytest.mark.parametrize("method", ["commit", "rollback", "close", "begin", "reset", "invalidate"])
def test_ending_the_session_oneself_is_refused(world: World, method: str) -> None:
    def book(tx: StepTx, instance: str, run: int) -> None:
        world.book(tx, instance, run)
        getattr(tx.session, method)()

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.do("book", book, event.instance_id, event.run_number)

    instance = order.run()
    assert instance.error == (
        f"StepTxMisuse: tx.session.{method}() in step 'book': the session commits with the step's record. "
        "Return to commit, raise to roll back, use tx.session.begin_nested() for a savepoint."
    )
    assert instance.step("book").attempts == 1
    assert world.booked() == []


@on_one_database
@pytest.mark.parametrize(("register", "method"), [("mutate", "commit"), ("on_terminal_error", "rollback")])
def test_ending_it_in_a_write_that_was_put_off_is_refused(world: World, register: str, method: str) -> None:
    def work(tx: StepTx) -> None:
        tx.mutate(insert_name("written"))
        getattr(tx, register)(lambda session: getattr(session, method)())
        if register == "on_terminal_error":
            raise NonRetryableError("the card is stolen")

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.do("work", work)

    text = f"tx.session.{method}() in step 'work': the session commits with the step's record. "
    instance = order.run()
    if register == "mutate":
        assert instance.error.startswith(f"StepTxMisuse: {text}")
    else:
        assert instance.error == "NonRetryableError: the card is stolen"
        assert text in instance.lines()[0]
    assert instance.step("work").attempts == 1
    assert world.names() == []


def test_a_write_that_was_put_off_may_use_a_savepoint(world: World) -> None:
    def write(session) -> None:
        with session.begin_nested():
            insert_name("a")(session)
        savepoint = session.begin_nested()
        insert_name("b")(session)
        savepoint.rollback()

    order = flow_of(world, lambda step: step.do("work", lambda tx: tx.mutate(write)))
    assert order.run().status == "complete"
    assert world.names() == ["a"]


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_on_sqlite_nothing_else_durable_is_written_while_the_session_is_open(world: World) -> None:
    def book(tx: StepTx, instance: str, run: int) -> None:
        world.book(tx, instance, run)
        world.worker.store.transact(lambda _: None)

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.do("book", book, event.instance_id, event.run_number)

    assert order.run().error == (
        "StepTxMisuse: tx.session holds SQLite's only write lock until its step ends, so this thread cannot write "
        "anything else durable meanwhile. Use tx.create(), tx.send_event() or session=tx.session."
    )
    assert world.booked() == []


# --- idempotency keys ---------------------------------------------------------------------------


def test_the_idempotency_key_is_one_for_all_attempts_and_differs_between_steps_and_runs(world: World) -> None:
    keys: dict[tuple[str, int], set[str]] = {}

    def charge(tx: StepTx, run: int) -> None:
        keys.setdefault((tx.name, run), set()).add(tx.idempotency_key)
        if tx.attempt == 1:
            raise ValueError("no")

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        for name in ("a", "b"):
            step.do(name, ONCE_MORE, charge, event.run_number)

    instance = order.run()
    for _ in range(2):
        world.run_after(1)
    assert instance.status == "complete"
    instance.restart()
    for _ in range(3):
        world.run_after(1)
    assert instance.status == "complete"
    assert [len(found) for found in keys.values()] == [1, 1, 1, 1]
    assert len(set.union(*keys.values())) == 4


def test_a_step_that_repeats_has_a_key_for_each_occurrence(world: World) -> None:
    keys = []

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        for n in range(2):
            step.do("charge", StepConfig(repeat=True), lambda tx, n: keys.append(tx.idempotency_key), n)

    order.run()
    assert len(set(keys)) == 2
