"""The errors that a MariaDB has only as a node of a Galera cluster. `tests/chaos/test_galera.py` has the nodes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pymysql
import pytest
import sqlalchemy as sa

from celery_durable.store.engine import Store, Tx, faults
from celery_durable.store.events import run_events
from celery_durable.store.instances import instances
from tests.store.world import World
from tests.support.lost_connections import session_id

mariadb_only = pytest.mark.parametrize("database", ["mariadb"], indirect=True)

NOT_READY = "WSREP has not yet prepared node for application use"
FAILED_COMMIT = 'Got error 6 "No such device or address" during COMMIT'


@mariadb_only
def test_work_on_a_node_without_a_majority_is_repeated_on_another_connection(world: World) -> None:
    """Behind a proxy, a new connection reaches another node. On the old one, not even ROLLBACK works."""
    sessions: list[int] = []

    def work(tx: Tx) -> str:
        sessions.append(session_id(tx.conn))
        if len(sessions) == 1:
            tx.conn.exec_driver_sql(f"SIGNAL SQLSTATE '08S01' SET MYSQL_ERRNO = 1047, MESSAGE_TEXT = '{NOT_READY}'")
        return "done"

    for use in (world.store.transact, world.store.run_statement, world.store.read):
        sessions.clear()
        assert use(work) == "done"
        assert len(set(sessions)) == 2


@pytest.mark.parametrize(("code", "text"), [(1047, NOT_READY), (1180, FAILED_COMMIT)])
def test_such_an_error_is_an_outage_whether_or_not_the_driver_says_the_sqlstate(code: int, text: str) -> None:
    error = sa.exc.OperationalError("COMMIT", None, pymysql.err.OperationalError(code, text))
    assert faults.is_transient(error)
    assert faults.classify_fault(error) is faults.Fault.CONNECTION_LOST


@mariadb_only
@pytest.mark.parametrize("applied", [True, False], ids=["applied by the others", "lost"])
def test_a_commit_during_which_the_node_loses_the_majority_is_in_doubt(world: World, applied: bool) -> None:
    """The node has sent the transaction, and does not know whether the others have received it."""
    ref, calls = world.create(), list[str]()

    def send(tx: Tx) -> str:
        calls.append("send")
        row = instances.lock(tx, ref.workflow, ref.instance_id)
        run_events.insert_event(tx, row, type_="a", payload="1", event_id=f"e-{len(calls)}")
        return "sent"

    def find(tx: Tx) -> str | None:
        calls.append("find")
        instances.lock(tx, ref.workflow, ref.instance_id)
        return "found" if tx.execute(sa.select(tx.t.event.c.event_id)).first() else None

    with failing_commit(world.store, applied=applied):
        assert world.store.transact(send, find_committed=find) == ("found" if applied else "sent")
    assert calls == (["send", "find"] if applied else ["send", "find", "send"])
    assert len(world.read_all_rows()["workflow_event"]) == 1


@mariadb_only
@pytest.mark.parametrize("applied", [True, False], ids=["applied by the others", "lost"])
def test_such_a_commit_of_a_session_is_in_doubt_too(world: World, applied: bool) -> None:
    ref = world.create()
    transaction = world.store.step_transactions.begin("book")

    def send(tx: Tx) -> None:
        row = instances.lock(tx, ref.workflow, ref.instance_id)
        run_events.insert_event(tx, row, type_="a", payload="1", event_id="e-1")

    with failing_commit(world.store, applied=applied), pytest.raises(Exception) as caught:
        world.store.transact_step(transaction, send)
    transaction.close()
    assert world.store.is_commit_in_doubt(caught.value)
    assert len(world.read_all_rows()["workflow_event"]) == applied


@contextmanager
def failing_commit(store: Store, *, applied: bool) -> Iterator[None]:
    """The next commit ends with the error of a node that lost the majority meanwhile."""
    do_commit, failures = store.engine.dialect.do_commit, iter([pymysql.err.OperationalError(1180, FAILED_COMMIT)])

    def commit(dbapi_connection: Any) -> None:
        failure = next(failures, None)
        if failure is None or applied:
            do_commit(dbapi_connection)
        if failure is not None:
            dbapi_connection.rollback()
            raise failure

    store.engine.dialect.do_commit = commit
    try:
        yield
    finally:
        store.engine.dialect.do_commit = do_commit
