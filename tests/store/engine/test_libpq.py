"""Statements without a cursor give what a cursor gives, and fail as one fails."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sqlalchemy as sa

from celery_durable.model import Status
from celery_durable.store.engine import Store, Tx
from celery_durable.store.engine.libpq import PreparedStatements
from celery_durable.store.engine.statements import Rows, param, statement
from celery_durable.store.instances import instances
from tests.store.world import World
from tests.support.lost_connections import kill, session_id

pytestmark = pytest.mark.parametrize("database", ["postgresql"], indirect=True)


@statement
def _echo(_: Store) -> Any:
    types = {"text": sa.Text, "status": sa.String, "number": sa.BigInteger, "flag": sa.Boolean}
    columns = [sa.cast(param(name, type_), type_).label(name) for name, type_ in types.items()]
    return sa.select(*columns, sa.literal_column("'100%'").label("percent"))


@statement
def _nothing(s: Store) -> Any:
    i = s.tables.instance
    return sa.update(i).where(i.c.id == param("pk", sa.BigInteger)).values(version=0)


def count_prepared(tx: Tx) -> int:
    ours = sa.text("SELECT count(*) FROM pg_prepared_statements WHERE name LIKE 'celery_durable%'")
    return int(tx.execute(ours).scalar_one())


VALUES: list[dict[str, Any]] = [
    {"text": "O'Hara %s \\ \n ☃ $1", "status": Status.ACTIVE, "number": 2**62, "flag": True},
    {"text": "", "status": "x", "number": -1, "flag": False},
    {"text": None, "status": None, "number": None, "flag": None},
]


@pytest.mark.parametrize("values", VALUES)
def test_values_come_back_as_through_a_cursor(world: World, values: dict[str, Any]) -> None:
    def echo(tx: Tx) -> Rows:
        return tx.run(_echo, **values)

    def echo_without_a_cursor(tx: Tx) -> Rows:
        assert tx.prepared_statements is not None
        return echo(tx)

    def echo_with_a_cursor(tx: Tx) -> Rows:
        assert tx.prepared_statements is None
        return echo(tx)

    found = world.store.run_statement(echo_without_a_cursor)
    assert found == world.store.transact_user_writes(echo_with_a_cursor)
    assert found.one()._asdict() == values | {"percent": "100%"}
    assert found.rowcount == 1


def test_a_statement_without_rows_says_how_many_it_changed(world: World) -> None:
    pk = world.claim(world.create()).pk
    assert [world.store.run_statement(lambda tx, pk=pk: tx.run(_nothing, pk=pk)).rowcount for pk in (pk, -1)] == [1, 0]
    assert world.store.run_statement(lambda tx: tx.run(_nothing, pk=pk)) == []


def test_text_with_a_null_character_is_refused_as_by_a_cursor(world: World) -> None:
    for run in (world.store.run_statement, world.store.transact, world.store.transact_user_writes):
        with pytest.raises(sa.exc.DataError, match="NUL"):
            run(lambda tx: tx.run(_echo, **(VALUES[0] | {"text": "a\0b"})))


def test_the_error_of_a_statement_is_wrapped_and_the_connection_serves_on(world: World) -> None:
    with pytest.raises(sa.exc.DataError) as raised:
        world.store.run_statement(lambda tx: tx.run(_echo, **(VALUES[0] | {"number": 2**70})))
    assert raised.value.orig is not None
    assert raised.value.orig.sqlstate == "22003"  # type: ignore[attr-defined]
    assert len(world.store.run_statement(lambda tx: tx.run(_echo, **VALUES[0]))) == 1


def test_a_statement_that_the_server_forgot_is_prepared_again(world: World) -> None:
    """psycopg sends DEALLOCATE ALL after a rollback; so do some poolers."""
    assert len(world.store.run_statement(lambda tx: tx.run(_echo, **VALUES[0]))) == 1
    assert world.store.read(count_prepared) == 1
    world.store.run_statement(lambda tx: tx.execute(sa.text("DEALLOCATE ALL")))
    assert world.store.read(count_prepared) == 0
    assert len(world.store.run_statement(lambda tx: tx.run(_echo, **VALUES[0]))) == 1


@statement
def _read_changing(_: Store) -> Any:
    return sa.select(sa.column("name", sa.String)).select_from(sa.table("changing"))


@pytest.fixture
def change(world: World) -> Iterator[Callable[[str], None]]:
    """Changes the type of a column of a table."""

    def run(sql: str) -> None:
        with world.store.engine.begin() as connection:
            connection.exec_driver_sql(sql)

    run("CREATE TABLE changing (name varchar(100))")
    yield lambda type_: run(f"ALTER TABLE changing ALTER COLUMN name TYPE {type_}")
    run("DROP TABLE changing")


def test_a_statement_is_prepared_again_after_a_column_has_another_type(
    world: World, change: Callable[[str], None]
) -> None:
    """PostgreSQL refuses it: "cached plan must not change result type"."""

    def read(tx: Tx) -> int:
        return len(tx.run(_read_changing))

    assert world.store.run_statement(read) == 0
    assert world.store.transact(read) == 0
    for type_ in ("text", "varchar(200)"):
        change(type_)
        assert world.store.transact(read) == 0
        change("varchar(300)")
        assert world.store.run_statement(read) == 0


def test_the_statements_of_a_transaction_need_no_cursor(world: World) -> None:
    def run_twice(tx: Tx) -> int:
        assert tx.prepared_statements is not None
        assert [len(tx.run(_echo, **VALUES[0])) for _ in range(2)] == [1, 1]
        return count_prepared(tx)

    assert world.store.transact(run_twice) == 2  # with the one that begins the transaction
    assert world.store.transact(run_twice) == 2


def test_a_transaction_without_a_cursor_is_rolled_back_and_committed(world: World) -> None:
    ref = world.create()

    def bump(tx: Tx, error: Exception | None = None) -> None:
        row = instances.lock(tx, ref.workflow, ref.instance_id)
        assert tx.run(_nothing, pk=row.pk).rowcount == 1
        if error is not None:
            raise error

    before = world.row(ref)
    with pytest.raises(ZeroDivisionError):
        world.store.transact(lambda tx: bump(tx, ZeroDivisionError()))
    assert world.row(ref) == before
    world.store.transact(bump)
    assert world.row(ref).version == 0


def test_a_transaction_after_a_rollback_of_psycopg_prepares_its_statements_again(world: World) -> None:
    def fail(tx: Tx) -> None:
        tx.run(_echo, **VALUES[0])
        tx.execute(sa.text("SELECT 1"))  # prepared by psycopg, which therefore deallocates all
        raise ZeroDivisionError

    def echo(tx: Tx) -> int:
        return len(tx.run(_echo, **VALUES[0]))

    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            world.store.transact(fail)
        assert world.store.read(count_prepared) == 0
        assert world.store.transact(echo) == 1


def test_a_transaction_is_repeated_if_its_statements_are_deallocated_in_it(world: World) -> None:
    calls: list[int] = []

    def deallocate_once(tx: Tx) -> int:
        tx.run(_echo, **VALUES[0])
        calls.append(len(calls))
        if len(calls) == 1:
            tx.execute(sa.text("DEALLOCATE ALL"))
        return len(tx.run(_echo, **VALUES[0]))

    assert world.store.transact(deallocate_once) == 1
    assert calls == [0, 1]


def test_a_transaction_with_statements_of_others_uses_a_cursor(world: World) -> None:
    def change_a_table(tx: Tx) -> int:
        assert tx.prepared_statements is None
        tx.run(_echo, **VALUES[0])
        tx.execute(sa.text("CREATE TEMPORARY TABLE mine (n integer)"))
        tx.execute(sa.text("DROP TABLE mine"))
        return len(tx.run(_echo, **VALUES[0]))

    assert world.store.transact_user_writes(change_a_table) == 1


def test_the_statement_after_a_lost_connection_gets_a_new_one(world: World) -> None:
    def run_on_a_killed_connection(tx: Tx) -> None:
        kill(world.store, session_id(tx.conn))
        with pytest.raises(sa.exc.OperationalError) as raised:
            tx.run(_echo, **VALUES[0])
        assert raised.value.connection_invalidated

    world.store.run_statement(run_on_a_killed_connection)
    assert len(world.store.run_statement(lambda tx: tx.run(_echo, **VALUES[0]))) == 1


def test_a_connection_that_is_closed_already_raises_an_error_of_the_driver(world: World) -> None:
    def run_twice(tx: Tx) -> None:
        assert tx.prepared_statements is not None
        kill(world.store, session_id(tx.conn))
        driver_error = tx.conn.dialect.loaded_dbapi.OperationalError
        for _ in range(2):  # libpq reads first that the server ends; then it cannot even send
            with pytest.raises(driver_error):
                tx.prepared_statements.execute("SELECT 1", [])
        tx.conn.invalidate()

    world.store.run_statement(run_twice)


def test_nothing_is_prepared_behind_a_pooler(store_url: str) -> None:
    store = Store(store_url, prepared_statements=False)
    try:
        assert store.run_statement(lambda tx: tx.run(_echo, **VALUES[0])).one().text == VALUES[0]["text"]
        assert store.run_statement(lambda tx: isinstance(tx.prepared_statements, PreparedStatements))
        assert store.read(count_prepared) == 0
    finally:
        store.close()


def test_a_listener_sees_the_statements(world: World) -> None:
    seen: list[str] = []
    sa.event.listen(world.store.engine, "before_cursor_execute", lambda *args: seen.append(args[2]))
    world.store.run_statement(lambda tx: tx.run(_echo, **VALUES[0]))
    assert len(seen) == 1


GREENLETS = {
    "gevent": "from gevent import monkey; monkey.patch_all()",
    "eventlet": "import eventlet; eventlet.monkey_patch()",
    "threads": "",
}


@pytest.mark.parametrize("library", ["gevent", "threads", pytest.param("eventlet", marks=pytest.mark.gate)])
def test_greenlets_run_while_a_statement_waits(store_url: str, library: str) -> None:
    code = f"""
{GREENLETS[library]}
from celery_durable.store.engine.store import Store
store = Store({store_url!r})
print(store.run_statement(lambda tx: tx.prepared_statements is not None))
store.close()
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout.split()) == (0, [str(library == "threads")]), done.stderr
