"""examples/package_with_workflows: the package by its scenarios, then what an application makes of it."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from celery_durable import WorkflowsRequired
from celery_durable.testing.scenario import (
    Context,
    advance_time_and_run_until_idle,
    define_scenario,
    event_and_run_until_idle,
    initialize_and_run_until_idle,
    read,
    run_scenario,
)
from examples.package_with_workflows.sessions import Sessions, metadata, required_workflows, tables


def with_tables(ctx: Context) -> None:
    metadata.create_all(ctx.harness.engine)


def messages(ctx: Context) -> list[str]:
    with ctx.harness.session() as db:
        return list(db.scalars(sa.select(tables.message.c.text).order_by(tables.message.c.id)))


def test_a_session_keeps_what_is_said_and_ends_after_a_week_of_silence() -> None:
    run_scenario(
        define_scenario(
            "a session",
            workflows=required_workflows,
            setup=with_tables,
            steps=[
                initialize_and_run_until_idle(required_workflows["SESSION"], {"session_id": "s-1"}, id="s-1"),
                event_and_run_until_idle("user_message", {"text": "hi"}),
                event_and_run_until_idle("user_message", {"text": "my parcel is lost"}),
                read(messages, assert_=lambda found: found == ["hi", "my parcel is lost"]),
                advance_time_and_run_until_idle(by="7 days"),
                read(lambda ctx: ctx.instance().result(), assert_=lambda count: count == 2),
            ],
        )
    )


def test_a_session_is_opened_with_its_workflow_or_not_at_all() -> None:
    def opened(ctx: Context) -> Any:
        sessions = Sessions(ctx.harness.durable.service)
        with Session(ctx.harness.engine) as db:
            sessions.open(db, "s-lost", agent="eve")
            db.rollback()
            sessions.open(db, "s-1", agent="ada")
            db.commit()
        ctx.harness.run_until_idle()
        sessions.say("s-1", "hi", message_id="m-1")
        sessions.say("s-1", "hi", message_id="m-1")
        ctx.harness.run_until_idle()
        listed = [each.id for each in ctx.harness.durable.internals.operations.queries.list().items]
        return listed, sessions.is_open("s-1"), sessions.steps("s-1"), messages(ctx)

    expected = (["s-1"], True, ["message 0", "keep message 0", "message 1"], ["hi"])
    run_scenario(
        define_scenario(
            "opening",
            workflows=required_workflows,
            setup=with_tables,
            steps=[read(opened, assert_=lambda found: found == expected)],
        )
    )


def test_the_package_says_what_it_lacks() -> None:
    with pytest.raises(WorkflowsRequired) as caught:
        Sessions(None)
    assert caught.value.code == "WORKFLOWS_REQUIRED"
    assert str(caught.value) == (
        "sessions runs durable workflows, and was given nothing to run them. Pass it the service of your application, "
        "`durable.service`, and register its workflows: durable.register(required_workflows)."
    )


def test_the_application_knows_the_packages_workflows() -> None:
    from examples.package_with_workflows import app

    assert app.durable.workflows.SESSION.name == "session"
    assert app.durable.workflows["session"].definition is required_workflows["SESSION"].definition
