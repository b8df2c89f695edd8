"""Faults of the author's own writes are the step's, and cost the application nothing beside it."""

from __future__ import annotations

import gc
import threading

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from celery_durable import Retries, Step, StepConfig, StepFailed, StepTx, WorkflowEvent
from celery_durable.concurrency import ConcurrentBody
from celery_durable.runtime import Runtime
from tests.support.flows import flow_of
from tests.support.world import World

ONCE = StepConfig(retries=Retries(limit=0))


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_an_error_of_the_transaction_that_a_body_ignores_fails_its_step(world: World) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        def careless(tx: StepTx) -> int:
            try:
                tx.session.execute(sa.text("SELECT 1 / 0"))
            except sa.exc.DBAPIError:
                return 1
            return 2

        try:
            return step.do("careless", ONCE, careless)
        except StepFailed as failed:
            return failed.error_name

    instance = order.create()
    world.run_until_idle()
    assert (instance.status, instance.output) == ("complete", "InternalError")


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_a_constraint_that_fails_at_the_commit_fails_the_step(world: World) -> None:
    with world.store.engine.begin() as conn:
        conn.exec_driver_sql("DROP TABLE IF EXISTS child, parent")
        conn.exec_driver_sql("CREATE TABLE parent (id int PRIMARY KEY)")
        conn.exec_driver_sql("CREATE TABLE child (id int REFERENCES parent DEFERRABLE INITIALLY DEFERRED)")

    def orphan(session: Session) -> None:
        session.execute(sa.text("INSERT INTO child VALUES (7)"))

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        failures = []
        for name, body in (
            ("mutate", lambda tx: tx.mutate(orphan)),
            ("session", lambda tx: orphan(tx.session)),
        ):
            try:
                step.do(name, ONCE, body)
            except StepFailed as failed:
                failures.append(failed.error_name)
        return failures

    instance = order.create()
    world.run_until_idle()
    with world.store.engine.begin() as conn:
        conn.exec_driver_sql("DROP TABLE child, parent")
    assert instance.output == ["IntegrityError", "IntegrityError"]


def test_a_session_of_the_application_gets_its_verbs_back(world: World) -> None:
    shared = scoped_session(sessionmaker(world.store.engine))
    world.store.sessions.factory = shared

    order = flow_of(world, lambda step: step.do("read", lambda tx: tx.session.execute(sa.text("SELECT 1")).scalar()))
    instance = order.create()
    world.run_until_idle()
    assert instance.output == 1
    shared().execute(sa.text("SELECT 1"))
    shared().commit()
    shared.remove()


def test_the_threads_of_bodies_end_with_the_thread_that_used_them() -> None:
    def bodies() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name == "durable-body"}

    before, results = bodies(), []
    user = threading.Thread(
        target=lambda: Runtime().run_concurrently([ConcurrentBody(lambda: 1, results.append, None) for _ in range(3)])
    )
    user.start()
    user.join()
    gc.collect()
    for thread in bodies() - before:
        thread.join(timeout=10)
    assert (results, bodies() - before) == ([1, 1, 1], set())
