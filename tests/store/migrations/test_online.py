"""Migrations of tables in use: workers write to them meanwhile, and an interrupted migration can be repeated.

They are those of `NEXT`, a migration after the last one, which uses each function of `online_changes`.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from celery_durable.store.engine import Store
from celery_durable.store.migrations import migrate
from celery_durable.store.schema import tables
from tests.store.migrations.tables import described, drop_all

NEXT = f"""
import sqlalchemy as sa
from celery_durable.store.migrations import online_changes

revision, down_revision = "9000", "{tables.REVISION}"

def upgrade(op, *, schema, prefix):
    run, item, instance = (f"{{prefix}}workflow_{{name}}" for name in ("run", "item", "instance"))
    online_changes.create_index(
        op, f"{{prefix}}ix_workflow_run_started", run, ["started_at"], schema=schema, where="started_at IS NOT NULL"
    )
    if op.get_context().dialect.name in ("postgresql", "sqlite"):
        old, new = f"{{prefix}}ix_workflow_item_open", f"{{prefix}}ix_workflow_item_due"
        online_changes.replace_index(op, old, new, item, ["due_at"], schema=schema, where="due_at IS NOT NULL")
    online_changes.add_column(op, instance, sa.Column("color", sa.BigInteger), schema=schema)
    online_changes.drop_column(op, run, "reason", schema=schema)
"""
INDEXES = {"ix_workflow_run_started", "ix_workflow_item_due"}
_NEW_RUN = (
    "INSERT INTO workflow_run (instance_pk, run_number, params, created_at, commit_id, log_count, dropped_log_count)"
    " VALUES ({}, 1, '1', 0, 'c', 0, 0)"
)


@pytest.fixture
def next_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later version of the package: it has one more migration, and needs it."""
    shutil.copytree(Path(migrate.__file__).with_name("versions"), tmp_path / "migrations" / "versions")
    (tmp_path / "migrations" / "versions" / "9000_next.py").write_text(NEXT)
    monkeypatch.setattr(migrate, "_SCRIPTS", tmp_path / "migrations")
    monkeypatch.setattr(migrate, "REVISION", "9000")


@pytest.fixture
def first(empty_url: str, request: pytest.FixtureRequest) -> Iterator[Store]:
    """A database at the last revision, for the next version."""
    store = Store(empty_url)
    migrate.upgrade(store)
    assert migrate.read_revision(store) == tables.REVISION
    request.getfixturevalue("next_version")
    yield store
    store.close()


def test_a_database_of_the_last_revision_becomes_the_same_as_a_new_one(first: Store) -> None:
    assert migrate.upgrade(first) == (tables.REVISION, "9000")
    upgraded = described(first.engine)
    drop_all(first.engine)
    migrate.upgrade(first)
    assert described(first.engine) == upgraded


def test_the_migration_of_an_application_makes_the_same_tables(first: Store) -> None:
    assert _migrate_as_an_application(first) == (tables.REVISION, "9000")
    upgraded = described(first.engine)
    drop_all(first.engine)
    migrate.upgrade(first)
    assert described(first.engine) == upgraded


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_writers_do_not_wait_for_a_migration_that_waits_for_an_old_transaction(first: Store) -> None:
    with first.engine.connect() as old, first.engine.connect() as other:
        old.exec_driver_sql(_NEW_RUN.format(1_000_001))
        with _in_background(first):
            _wait_until(first, "SELECT count(*) FROM pg_index WHERE NOT indisvalid")
            other.exec_driver_sql("SET lock_timeout = '2s'")
            other.exec_driver_sql(_NEW_RUN.format(1_000_002))
            other.commit()
            old.commit()
    assert migrate.read_revision(first) == "9000"
    assert _valid_indexes(first) == INDEXES


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_workers_continue_while_a_new_column_waits_for_a_long_transaction(first: Store) -> None:
    waits = (
        "SELECT count(*) FROM pg_stat_activity"
        " WHERE datname = current_database() AND wait_event_type = 'Lock' AND starts_with(query, 'ALTER TABLE')"
    )
    with first.engine.connect() as long, first.engine.connect() as worker:
        long.exec_driver_sql("LOCK TABLE workflow_instance IN ACCESS SHARE MODE")  # as a report; without a snapshot
        with _in_background(first):
            for _ in range(2):  # it is tried again
                _wait_until(first, waits)
                worker.exec_driver_sql("SET lock_timeout = '5s'")
                worker.exec_driver_sql("SELECT 1 FROM workflow_instance")
                worker.commit()
            long.commit()
    assert migrate.read_revision(first) == "9000"


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_an_applications_migration_and_a_writer_do_not_lock_each_other_out(first: Store) -> None:
    """The writer has locked a row of a table whose index is replaced, and then updates it."""
    waits = (
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        " AND strpos(query, 'ix_workflow_item_open') > 0"
    )
    with first.engine.connect() as writer, ThreadPoolExecutor() as threads:
        writer.exec_driver_sql("SELECT 1 FROM workflow_item FOR UPDATE")
        migrated = threads.submit(_migrate_as_an_application, first)
        _wait_until(first, waits)
        writer.exec_driver_sql("UPDATE workflow_item SET attempts = attempts + 1")
        writer.commit()
        assert migrated.result(30) == (tables.REVISION, "9000")


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_an_index_that_an_interrupted_migration_left_unfinished_is_built_again(first: Store) -> None:
    with first.engine.begin() as connection:
        for instance in (1, 2):
            connection.exec_driver_sql(_NEW_RUN.format(instance))
    with (
        first.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection,
        pytest.raises(sa.exc.IntegrityError, match="could not create unique index"),
    ):
        connection.exec_driver_sql(
            "CREATE UNIQUE INDEX CONCURRENTLY ix_workflow_run_started ON workflow_run (log_count)"
        )
    assert _valid_indexes(first) == set()
    assert migrate.upgrade(first) == (tables.REVISION, "9000")
    assert _valid_indexes(first) == INDEXES


@pytest.mark.parametrize("database", ["mariadb"], indirect=True)
def test_mariadb_builds_an_index_only_beside_writers_and_waits_ten_seconds_for_them(
    empty: Store, next_version: None
) -> None:
    script = migrate.render_sql(empty)
    assert (
        "SET STATEMENT lock_wait_timeout = 10 FOR CREATE INDEX IF NOT EXISTS ix_workflow_run_started"
        " ON workflow_run (started_at) ALGORITHM=INPLACE LOCK=NONE;\n"
    ) in script


def _migrate_as_an_application(store: Store) -> tuple[str | None, str]:
    with store.engine.begin() as connection:
        return migrate.upgrade_connection(connection)


@contextmanager
def _in_background(store: Store) -> Iterator[None]:
    thread = threading.Thread(target=migrate.upgrade, args=(store,))
    thread.start()
    yield
    thread.join(30)
    assert not thread.is_alive()


def _wait_until(store: Store, count: str) -> None:
    with store.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        while not connection.exec_driver_sql(count).scalar_one():
            pass


def _valid_indexes(store: Store) -> set[str]:
    query = "SELECT indexrelid::regclass::text FROM pg_index WHERE indisvalid"
    with store.engine.connect() as connection:
        return INDEXES & set(connection.exec_driver_sql(query).scalars())


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_behind_a_pooler_no_settings_stay_on_the_connections_of_the_server(first: Store, empty_url: str) -> None:
    """PgBouncer in transaction mode gives a connection to the next client without a reset."""
    store = Store(empty_url, prepared_statements=False)
    settings = "SELECT name, setting FROM pg_settings WHERE source = 'session' AND name LIKE '%\\_timeout'"
    left: list[object] = []

    @sa.event.listens_for(store.engine, "invalidate")
    @sa.event.listens_for(store.engine, "close")
    def look(connection: Any, *_: object) -> None:
        connection.rollback()
        left.extend(connection.execute(settings).fetchall())

    assert migrate.upgrade(store) == (tables.REVISION, "9000")
    assert _valid_indexes(store) == INDEXES
    store.close()
    assert left == []
