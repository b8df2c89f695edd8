"""Writes at the commit of a step, or with its failure; and unique violations."""

from __future__ import annotations

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from celery_durable import Retries, Step, StepConfig, StepFailed, StepTx, WorkflowEvent
from tests.support.authors import names
from tests.support.flows import flow_of
from tests.support.world import World, insert_name

ONCE_MORE = StepConfig(retries=Retries(limit=1, delay=1))


# --- mutate -------------------------------------------------------------------------------------


def test_mutations_run_at_the_commit_and_in_order(world: World) -> None:
    ran = []

    def work(tx: StepTx) -> str:
        tx.mutate(lambda session: ran.append("one") or insert_name("one")(session))
        tx.mutate(lambda session: ran.append("two") or insert_name("two")(session))
        ran.append("body")
        return "done"

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        result = step.do("work", work)
        step.sleep("rest", 60)
        return result

    instance = order.run()
    world.run_after(60)
    assert instance.output == "done"
    assert ran == ["body", "one", "two"]
    assert world.names() == ["one", "two"]


def test_mutations_join_the_session_when_there_is_one(world: World) -> None:
    def work(tx: StepTx) -> None:
        tx.mutate(lambda session: session.execute(sa.update(names).values(name="changed")))
        insert_name("new")(tx.session)

    order = flow_of(world, lambda step: step.do("work", work))
    assert order.run().status == "complete"
    assert world.names() == ["changed"]


@pytest.mark.parametrize("method", ["mutate", "on_terminal_error"])
def test_an_async_function_for_the_commit_is_refused_and_not_dropped(world: World, method: str) -> None:
    async def write(session: Session) -> None: ...

    instance = flow_of(world, lambda step: step.do("work", lambda tx: getattr(tx, method)(write))).run()
    assert (instance.status, instance.step("work").attempts) == ("errored", 1)
    assert instance.error == (
        f"AsyncNotSupported: The function of tx.{method}() 'write' is an async function. Write it as a plain function; "
        "only functions of steps and handlers may be async: step.do('ask', async_function, 'why?')."
    )


# --- unique violations --------------------------------------------------------------------------


def test_a_unique_violation_in_the_body_fails_the_step_for_good(world: World) -> None:
    with world.store.engine.begin() as connection:
        connection.execute(sa.insert(names).values(name="taken"))

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        try:
            step.do("take", lambda tx: insert_name("taken")(tx.session))
        except StepFailed as exc:
            return [exc.error_name, exc.attempts, exc.error_message]

    instance = order.run()
    name, attempts, message = instance.output
    assert (name, attempts) == ("StepCommitConflict", 1)
    assert message.startswith("The writes of step 'take' violate a constraint: ")
    assert "author_names" in message
    assert world.names() == ["taken"]


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
@pytest.mark.parametrize("with_session", [True, False])
def test_a_deferred_unique_violation_fails_the_step_for_good(world: World, with_session: bool) -> None:
    with world.store.engine.begin() as connection:
        connection.exec_driver_sql("DROP TABLE IF EXISTS author_slots")
        connection.exec_driver_sql("CREATE TABLE author_slots (n int UNIQUE DEFERRABLE INITIALLY DEFERRED)")
        connection.exec_driver_sql("INSERT INTO author_slots VALUES (1)")

    def take(session) -> None:
        session.execute(sa.text("INSERT INTO author_slots VALUES (1)"))

    order = flow_of(
        world, lambda step: step.do("take", lambda tx: take(tx.session) if with_session else tx.mutate(take))
    )
    instance = order.run()
    assert instance.error.startswith("StepCommitConflict: The writes of step 'take' violate a constraint: ")
    assert instance.step("take").attempts == 1
    with world.store.engine.begin() as connection:
        connection.exec_driver_sql("DROP TABLE author_slots")


def test_another_database_error_is_tried_again(world: World) -> None:
    def read(tx: StepTx) -> None:
        tx.session.execute(sa.text("SELECT * FROM nowhere" if tx.attempt == 1 else "SELECT 1"))

    instance = flow_of(world, lambda step: step.do("read", ONCE_MORE, read)).run()
    assert instance.step("read").status == "waiting"
    world.run_after(1)
    assert instance.status == "complete"
