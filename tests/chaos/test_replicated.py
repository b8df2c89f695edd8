"""The database that fails over: on the same port, with every row whose commit was answered."""

from __future__ import annotations

import psycopg
import pytest

from tests.chaos.arena import missing_programs
from tests.chaos.replicated import ReplicatedPostgresql
from tests.support.services import missing


@pytest.mark.slow
@pytest.mark.smoke
def test_a_fail_over_keeps_the_port_and_what_was_committed() -> None:
    if missing_programs("redis+postgresql"):
        missing("postgresql", "its programs are not installed")
    database = ReplicatedPostgresql()
    try:
        for number in range(3):
            with _connected(database) as connection:
                connection.execute("CREATE TABLE IF NOT EXISTS number (number integer)")
                connection.execute("INSERT INTO number VALUES (%s)", [number])
                assert connection.execute("SELECT sync_state FROM pg_stat_replication").fetchall() == [("sync",)]
                database.fail_over()
                with pytest.raises(psycopg.OperationalError):
                    connection.execute("SELECT 1")
        with _connected(database) as connection:
            found = connection.execute("SELECT number FROM number ORDER BY number").fetchall()
        assert found == [(0,), (1,), (2,)]
    finally:
        database.clean_up()


def _connected(database: ReplicatedPostgresql) -> psycopg.Connection[tuple[object, ...]]:
    address = f"host=127.0.0.1 port={database.port} user=postgres dbname=postgres"
    return psycopg.connect(address, autocommit=True)
