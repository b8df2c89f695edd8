"""What a killed test run leaves behind is removed, and nothing of a run that lives."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import sqlalchemy as sa

from tests.support import leftovers
from tests.support.services import DATABASES

servers_only = pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)


@pytest.fixture
def dead() -> int:
    """The id of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@pytest.fixture
def admin(database: str) -> Iterator[sa.Engine]:
    engine = sa.create_engine(DATABASES[database], isolation_level="AUTOCOMMIT")
    yield engine
    engine.dispose()


@servers_only
def test_databases_of_dead_runs_are_dropped_and_those_of_living_runs_are_kept(admin: sa.Engine, dead: int) -> None:
    left, ours = f"durable_test_left_{dead}", f"durable_test_ours_{os.getpid()}"
    with admin.connect() as connection:
        for name in (left, ours):
            connection.exec_driver_sql(f"CREATE DATABASE {name}")
    try:
        assert left in leftovers.drop_databases_of_the_dead(admin)
        names = set(sa.inspect(admin).get_schema_names()) if admin.dialect.name == "mysql" else _databases(admin)
        assert (left in names, ours in names) == (False, True)
        assert left not in leftovers.drop_databases_of_the_dead(admin)
    finally:
        with admin.connect() as connection:
            connection.exec_driver_sql(f"DROP DATABASE IF EXISTS {left}")
            connection.exec_driver_sql(f"DROP DATABASE {ours}")


def _databases(admin: sa.Engine) -> set[str]:
    with admin.connect() as connection:
        return set(connection.exec_driver_sql("SELECT datname FROM pg_database").scalars())


def test_databases_on_another_machine_are_left_alone() -> None:
    elsewhere = sa.create_engine("postgresql+psycopg://postgres@database.example/postgres")
    assert leftovers.drop_databases_of_the_dead(elsewhere) == []


@pytest.mark.skipif(sys.platform != "linux", reason="NOT TESTED: processes are found by their environment in /proc")
def test_processes_of_dead_runs_are_killed_and_those_of_living_runs_are_kept(dead: int) -> None:
    command = [sys.executable, "-c", "print(flush=True); input()"]
    started = [
        subprocess.Popen(
            command,
            env=os.environ | {leftovers.OWNER: str(owner)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        for owner in (dead, os.getpid())
    ]
    left, ours = started
    try:
        for process in started:
            assert process.stdout is not None
            process.stdout.readline()  # it has replaced this program, and with it the environment
        killed = leftovers.kill_processes_of_the_dead()
        assert left.pid in killed
        assert ours.pid not in killed
        assert left.wait(timeout=60) == -9
        assert ours.poll() is None
    finally:
        for process in started:
            process.kill()
            process.communicate()


def test_what_tests_start_names_its_owner() -> None:
    command = [sys.executable, "-c", f"import os; print(os.environ['{leftovers.OWNER}'])"]
    assert int(subprocess.run(command, check=True, capture_output=True, text=True).stdout) == os.getpid()
