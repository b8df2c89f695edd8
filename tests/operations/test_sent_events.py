"""An event that one statement sends, on PostgreSQL."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import sqlalchemy as sa
from celery import Celery

from celery_durable import Durable, Step, WorkflowEvent
from celery_durable.errors import InstanceNotFound, VersionMismatch
from celery_durable.model import Scope
from celery_durable.operations.events import EventOperations, _Sending
from celery_durable.store.engine import Tx
from tests.support.approvals import define_order
from tests.support.lost_connections import cut_statement
from tests.support.world import World

pytestmark = pytest.mark.parametrize("database", ["postgresql"], indirect=True)


def test_an_event_whose_statement_is_applied_after_it_was_looked_up_is_sent_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server had not noticed the loss of the connection, and the statement still waited for its lock."""
    instance, look_ups = define_order(world).run(), []
    find_sent = _Sending.find_sent

    def look_too_early(self: _Sending, tx: Tx) -> Any:
        look_ups.append(self.event_id)
        return find_sent(self, tx) if len(look_ups) > 1 else None

    monkeypatch.setattr(_Sending, "find_sent", look_too_early)
    with cut_statement(world.store, when="after"):
        assert instance.send("approval", "yes") is True
    assert look_ups == world.accepted_events * 2
    assert [payload for _, payload, _ in instance.events()] == ["yes"]
    world.run_until_idle()
    assert instance.output[1] == "yes"


def test_a_version_and_a_scope_are_checked(world: World) -> None:
    """The statement checks neither, so such an event is sent in a transaction."""
    instance = define_order(world).run()
    with pytest.raises(VersionMismatch):
        instance.send("approval", "yes", if_version=["another"])
    scoped = EventOperations(dataclasses.replace(world.operations.events._context, scope=Scope(id_prefix="other-")))
    with pytest.raises(InstanceNotFound):
        scoped.send("order", instance.id, "approval", "yes")
    assert instance.events() == []


def test_a_commit_in_doubt_is_logged_without_the_payload(world: World, caplog: pytest.LogCaptureFixture) -> None:
    instance = define_order(world).run()
    with cut_statement(world.store, when="after"):
        instance.send("approval", "a secret")
    assert "The outcome of a commit is unknown" in caplog.text
    assert "a secret" not in caplog.text


def test_an_event_over_an_engine_of_the_application_is_sent_in_a_transaction(store_url: str) -> None:
    """Such connections may have no lock timeout: a statement could be applied after its connection was cut."""
    engine = sa.create_engine(store_url)
    app = Celery("shop", broker="memory://", set_as_current=False)
    durable = Durable(app, engine=engine)

    @durable.workflow(name="empty")
    def empty(event: WorkflowEvent[None], step: Step) -> None: ...

    instance, transactions = empty.create(), []
    sa.event.listen(durable.internals.store.engine, "commit", transactions.append)
    instance.send_event("approved")
    durable.close()
    engine.dispose()
    assert len(transactions) == 1
