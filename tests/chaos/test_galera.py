"""A Galera cluster of three nodes: what it keeps, what its locks are worth, and commits while it loses its majority."""

from __future__ import annotations

from collections.abc import Iterator

import pymysql
import pytest
import sqlalchemy as sa

from celery_durable.errors import StoreUnavailable
from celery_durable.runtime import Runtime
from celery_durable.store.engine import Store, Tx
from celery_durable.store.engine.faults import CommitInDoubt
from celery_durable.store.engine.time_limits import Timeouts
from tests.chaos.arena import missing_programs
from tests.chaos.galera import GaleraCluster
from tests.support.services import missing_tool

pytestmark = [pytest.mark.slow, pytest.mark.smoke, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[GaleraCluster]:
    if missing_programs("redis+galera"):
        missing_tool("galera")
    cluster = GaleraCluster()
    try:
        yield cluster
    finally:
        cluster.clean_up()


def test_the_port_stays_and_so_does_what_was_committed(cluster: GaleraCluster) -> None:
    engine = sa.create_engine(cluster.url, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
    with engine.connect() as connection:
        connection.exec_driver_sql("CREATE TABLE number (number integer PRIMARY KEY)")
    for number, change in enumerate((cluster.fail_over, cluster.restart)):
        before = cluster.active
        with engine.connect() as connection:
            connection.exec_driver_sql(f"INSERT INTO number VALUES ({number})")
            change()
            assert cluster.active is not before
            with pytest.raises(sa.exc.OperationalError):
                connection.exec_driver_sql("SELECT 1")
    with engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT number FROM number ORDER BY 1").scalars().all() == [0, 1]
    assert [node.is_synced for node in cluster.nodes] == [True, True, True]


def test_a_lock_of_one_node_does_not_hold_on_another(cluster: GaleraCluster) -> None:
    """The reason for the proxy: the guard of a step's commit is such a lock, and its commit need not change the row."""
    one, other = (node.connect(autocommit=False) for node in cluster.nodes[:2])
    with one, other, one.cursor() as first, other.cursor() as second:
        first.execute("CREATE TABLE guarded (id integer PRIMARY KEY, token integer)")
        first.execute("INSERT INTO guarded VALUES (1, 1)")
        one.commit()
        second.execute("SELECT token FROM guarded WHERE id = 1 FOR UPDATE")
        first.execute("SET innodb_lock_wait_timeout = 0")
        first.execute("SELECT token FROM guarded WHERE id = 1 FOR UPDATE")
        assert first.fetchone() == second.fetchone() == (1,)
        # The second transaction to commit a change of the row is the one that fails.
        first.execute("UPDATE guarded SET token = 2")
        second.execute("UPDATE guarded SET token = 3")
        one.commit()
        with pytest.raises(pymysql.err.OperationalError, match="1213"):
            other.commit()


def test_a_commit_is_in_doubt_if_its_node_loses_the_majority_and_other_statements_are_refused(
    cluster: GaleraCluster,
) -> None:
    store = Store(cluster.url, runtime=Runtime())
    active = cluster.active
    others = [node for node in cluster.nodes if node is not active]
    store.transact(lambda tx: tx.conn.exec_driver_sql("CREATE TABLE doubtful (id integer PRIMARY KEY)"))

    def write(tx: Tx) -> None:
        tx.conn.exec_driver_sql("INSERT INTO doubtful VALUES (1)")
        for node in others:
            node.freeze()

    try:
        with pytest.raises(CommitInDoubt, match="1180") as caught:
            store.transact_once(write, timeouts=Timeouts(60, 60))
        assert store.is_commit_in_doubt(caught.value)
        with pytest.raises(StoreUnavailable, match="1047") as refused:
            store.read(lambda tx: tx.conn.exec_driver_sql("SELECT * FROM doubtful").all())
        assert store.is_transient(refused.value)
    finally:
        for node in others:
            node.thaw()
        cluster.await_nodes()
    found = set()
    for node in cluster.nodes:
        with node.connect() as connection, connection.cursor() as cursor:
            found.add(cursor.execute("SELECT * FROM doubtful"))
    assert found in ({0}, {1})  # which one depends on what the others received before they froze
    assert len(store.read(lambda tx: tx.conn.exec_driver_sql("SELECT * FROM doubtful").all())) == found.pop()
    store.close()
