"""A server that takes no writes for a while: named, nobody's fault, and over when it is over."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import sqlalchemy as sa

from celery_durable import Step, StepTx, WorkflowEvent
from celery_durable.errors import StoreUnavailable
from celery_durable.store.engine import Store
from tests.store.world import World
from tests.support import open_connections
from tests.support.authors import ledger
from tests.support.world import World as Engine

pytestmark = pytest.mark.parametrize("database", ["postgresql"], indirect=True)


@contextmanager
def read_only(url: sa.URL | str) -> Iterator[Callable[[], None]]:
    """New sessions of this database write nothing, as on a primary that was demoted; the call ends it."""
    admin = sa.create_engine(sa.make_url(url).set(database="postgres"), isolation_level="AUTOCOMMIT")
    name = sa.make_url(url).database

    def change(to: str) -> None:
        with admin.connect() as connection:
            connection.exec_driver_sql(f"ALTER DATABASE {name} {to}")
        open_connections.close_all(sa.make_url(url).render_as_string(hide_password=False))  # they would not notice

    change("SET default_transaction_read_only = on")
    try:
        yield lambda: change("RESET default_transaction_read_only")
    finally:
        change("RESET default_transaction_read_only")
        admin.dispose()


def test_the_log_names_it_and_the_same_process_writes_again_when_it_is_over(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    """The old connections would go on refusing: they are not used again."""
    world = World(store)
    world.create()
    with read_only(store.engine.url) as end, caplog.at_level(logging.WARNING):
        store._connections.reconnect()
        with pytest.raises(StoreUnavailable, match="read-only transaction"):
            world.create(id="i-2")
        assert "The database takes no writes now: cannot execute INSERT in a read-only transaction" in caplog.messages
        end()
        world.create(id="i-2")
    world.close()


@pytest.mark.parametrize("writes", ["mutate", "none"])
def test_no_step_fails_for_it(make_world: Callable[..., Engine], writes: str) -> None:
    world = make_world()
    ran: list[int] = []
    name = "book" if writes == "mutate" else "work"

    @world.workflow
    def order(event: WorkflowEvent, step: Step) -> str:
        step.do(name, body)
        return "booked"

    def body(tx: StepTx) -> None:
        ran.append(tx.attempt)
        row = {"instance": "i-1", "run": 1, "step": "book", "attempt": tx.attempt}
        if writes == "mutate":
            tx.mutate(lambda session: session.execute(sa.insert(ledger).values(row)))

    instance = order.create()

    def goes_read_only() -> None:
        nonlocal ending
        ending = read_only(world.url)
        ending.__enter__()
        worker.store._connections.reconnect()

    ending = None
    worker = world.new_worker()
    worker.runtime.at["before-body"] = goes_read_only
    with pytest.raises(Exception, match="read-only transaction"):
        worker.advance(instance.ref)
    assert ending is not None
    ending.__exit__(None, None, None)
    assert instance.statuses() == {}  # nothing of it is on record
    world.advance(31)
    assert instance.advance(worker) == "complete"
    assert instance.step(name).attempts <= 2


@contextmanager
def full_disk(world: Engine) -> Iterator[None]:
    """What a body writes fails as on a full disk; what the engine writes does not."""
    engine = world.store.engine
    full = "RAISE EXCEPTION 'could not extend file: No space left on device' USING ERRCODE = 'disk_full'"
    with engine.begin() as connection:
        connection.exec_driver_sql(
            f"CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {full}; END $$"
        )
        connection.exec_driver_sql(
            f"CREATE TRIGGER refuse BEFORE INSERT ON {ledger.name} FOR EACH ROW EXECUTE FUNCTION refuse()"
        )
    try:
        yield
    finally:
        with engine.begin() as connection:
            connection.exec_driver_sql("DROP FUNCTION refuse CASCADE")


def test_no_step_fails_for_a_full_disk(make_world: Callable[..., Engine]) -> None:
    world = make_world()

    @world.workflow
    def order(event: WorkflowEvent, step: Step) -> None:
        step.do("book", book)

    def book(tx: StepTx) -> None:
        row = {"instance": "i-1", "run": 1, "step": "book", "attempt": tx.attempt}
        tx.mutate(lambda session: session.execute(sa.insert(ledger).values(row)))

    instance, worker = order.create(), world.new_worker()
    with full_disk(world), pytest.raises(StoreUnavailable, match="No space left on device"):
        worker.advance(instance.ref)
    assert instance.statuses() == {}
    world.advance(31)
    assert instance.advance(worker) == "complete"
