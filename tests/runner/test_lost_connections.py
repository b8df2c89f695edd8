"""Connections and transactions that are lost under a step, and a database that breaks at its commit."""

from __future__ import annotations

from datetime import timedelta

import pytest
import sqlalchemy as sa

from celery_durable import Retries, Step, StepConfig, StepTx, WorkflowEvent
from celery_durable.errors import SchemaOutdated
from tests.support.flows import flow_of
from tests.support.lost_connections import cut_statement
from tests.support.world import World

LEASE = timedelta(seconds=31)


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
@pytest.mark.parametrize("where", ["in the body", "before-commit", "after-body"])
def test_a_connection_that_is_lost_is_no_failure_of_the_step(world: World, where: str) -> None:
    ran = []

    def cut() -> None:
        with world.store.engine.begin() as other:
            for connection in world.worker.connections:
                other.execute(sa.text("SELECT pg_terminate_backend(:pid)"), {"pid": connection.info.backend_pid})

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        def work() -> str:
            ran.append(1)
            if where == "in the body":
                cut()
            else:
                world.worker.runtime.at[where] = cut
            return "worked"

        step.do("warm up", lambda: 1)
        return step.do("work", work)

    assert order.run().output == "worked"
    assert ran == [1]


class ConnectionLost(Exception):
    sqlstate = "57P01"


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
@pytest.mark.parametrize("form", ["INSERT INTO workflow_step", "UPDATE workflow_step"])
def test_a_boundary_that_arrives_after_it_was_given_up_is_recognised(world: World, form: str) -> None:
    """Something between us and the server breaks our connection and delivers later what it had accepted."""
    worker, attempts, held_up = world.new_worker(), [], []

    def hold_up(connection, cursor, statement, parameters, *_) -> None:
        if statement.startswith("WITH") and form in statement and not held_up:
            held_up.append((statement, parameters))
            raise sa.exc.OperationalError(statement, {}, ConnectionLost())

    def arrive(times: int) -> None:
        with world.store.engine.begin() as connection:
            connection.exec_driver_sql(*held_up[0])

    sa.event.listen(worker.store.engine, "before_cursor_execute", hold_up)
    worker.runtime.back_off = arrive  # it was looked up, and not there; now it comes, and then it is done again

    def work(tx: StepTx) -> str:
        attempts.append(tx.attempt)
        if tx.attempt == 1 and form.startswith("UPDATE"):
            raise OSError("once")
        return "worked"

    order = flow_of(world, lambda step: step.do("work", StepConfig(retries=Retries(limit=1, delay=0)), work))
    assert order.run().output == "worked"
    assert len(held_up) == 1
    assert attempts == ([1, 2] if form.startswith("UPDATE") else [1])


@pytest.mark.parametrize("is_applied", [True, False])
@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_a_session_whose_commit_is_in_doubt_is_looked_up_also_where_it_held_the_only_lock(
    world: World, is_applied: bool
) -> None:
    world.exempt["I9"] = "the body runs again on purpose"
    cut = []

    def cut_once(connection: sa.Connection) -> None:
        if world.bodies and not cut:
            cut.append(connection)
            if is_applied:
                connection.connection.driver_connection.commit()
            connection.connection.driver_connection.close()

    sa.event.listen(world.worker.store.engine, "commit", cut_once)

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        return step.do("book", world.book, event.instance_id, event.run_number)

    assert order.run().output == "booked book"
    assert len(world.bodies) == (1 if is_applied else 2)


@pytest.mark.parametrize("is_applied", [True, False])
@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_a_body_whose_transaction_was_lost_runs_again_though_the_renewal_is_in_doubt_too(
    world: World, is_applied: bool
) -> None:
    world.exempt["I9"] = "the body runs again on purpose"
    commits = []

    def cut(connection: sa.Connection) -> None:
        commits.extend(world.bodies[:1])
        if len(commits) not in (1, 3):  # the body's, which is then looked for, and that of the renewal
            return
        if is_applied and len(commits) == 3:
            connection.connection.driver_connection.commit()
        connection.connection.driver_connection.close()

    sa.event.listen(world.worker.store.engine, "commit", cut)

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        return step.do("book", world.book, event.instance_id, event.run_number)

    assert order.run().output == "booked book"
    assert len(world.bodies) == 2


def test_a_database_that_breaks_at_a_boundary_fails_no_step_and_the_run_is_found_again(world: World) -> None:
    ran = []

    def rename(old: str, new: str) -> None:
        with world.store.engine.begin() as connection:
            connection.exec_driver_sql(f"ALTER TABLE {old} RENAME TO {new}")

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        def work() -> str:
            ran.append(1)
            if len(ran) == 1:
                rename("workflow_step", "hidden")
            return "worked"

        try:
            return step.do("work", work)
        except Exception as exc:
            return f"blamed the step: {exc}"

    instance = order.create()
    with pytest.raises(SchemaOutdated):
        world.run_until_idle()
    rename("hidden", "workflow_step")
    assert instance.status == "active"
    world.run_after(LEASE)
    assert instance.output == "worked"
    assert instance.step("work").attempts == 2  # nobody can tell what the broken attempt has done


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_a_sleep_begins_once_although_its_statement_is_in_doubt(world: World, when: str) -> None:
    """One statement records it and ends the claim, so a second try finds the claim gone."""

    @world.workflow
    def order(event: WorkflowEvent, step: Step) -> str:
        step.sleep("nap", 60)
        return "rested"

    instance = order.create()
    with cut_statement(world.store, when=when, part="INSERT INTO workflow_step") as cut:
        assert instance.advance().startswith("waiting")
    assert cut == [when]
    assert instance.statuses() == {"nap": "waiting"}
    assert instance.run_at == world.now + timedelta(seconds=60)
    world.run_after(60)
    assert instance.output == "rested"
