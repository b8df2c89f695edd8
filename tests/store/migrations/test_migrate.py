"""Migrations: what they make, where, and once."""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from celery_durable.errors import SchemaIncomplete, SchemaOutdated
from celery_durable.store.engine import Store
from celery_durable.store.engine.server_info import ensure_database_id
from celery_durable.store.instances import instances
from celery_durable.store.migrations import migrate
from celery_durable.store.schema.tables import REVISION, build_tables
from tests.store.migrations.tables import TABLES, VERSION_TABLE, described, drop_all

MAKERS = [migrate.upgrade, lambda store: store.tables.metadata.create_all(store.engine)]


# --- what is made -------------------------------------------------------------------------------


def test_a_migrated_database_is_the_same_as_a_fresh_one(empty: Store) -> None:
    migrate.upgrade(empty)
    migrated = described(empty.engine)
    drop_all(empty.engine)
    empty.tables.metadata.create_all(empty.engine)
    fresh = described(empty.engine)
    assert migrated == fresh
    assert set(migrated) == TABLES
    for name in TABLES:  # and the inspection does look at something
        assert migrated[name]["columns"]
        assert migrated[name]["primary key"]["constrained_columns"]
    assert {name for name in TABLES if migrated[name]["indexes"]} >= {
        "workflow_instance",
        "workflow_event",
        "workflow_log",
    }


@pytest.mark.parametrize("make", MAKERS, ids=["migrated", "fresh"])
@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_postgresql_keeps_more_statistics_of_what_the_sweep_searches(empty: Store, make: Any) -> None:
    make(empty)
    query = (
        "SELECT attstattarget FROM pg_attribute "
        "WHERE attrelid = 'workflow_instance'::regclass AND attname = 'next_check_at'"
    )
    with empty.engine.connect() as connection:
        assert connection.exec_driver_sql(query).scalar_one() == 1000


@pytest.mark.parametrize("make", MAKERS, ids=["migrated", "fresh"])
@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_postgresql_keeps_room_on_the_pages_of_instances(empty: Store, make: Any) -> None:
    make(empty)
    query = "SELECT reloptions FROM pg_class WHERE oid = 'workflow_instance'::regclass"
    with empty.engine.connect() as connection:
        assert connection.exec_driver_sql(query).scalar_one() == ["fillfactor=70"]


@pytest.mark.parametrize("database", ["mariadb"], indirect=True)
def test_mariadb_compares_keys_byte_by_byte_without_padding(empty: Store) -> None:
    migrate.upgrade(empty)
    query = (
        "SELECT DISTINCT collation_name FROM information_schema.columns WHERE table_schema = database()"
        f" AND collation_name IS NOT NULL AND table_name <> '{VERSION_TABLE}'"
    )
    with empty.engine.connect() as connection:
        assert connection.exec_driver_sql(query).scalars().all() == ["utf8mb4_nopad_bin"]


def test_importing_the_store_does_not_import_alembic() -> None:
    code = "import sys, celery_durable.store.migrations.migrate; assert 'alembic' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# --- upgrade ------------------------------------------------------------------------------------


def test_an_upgrade_returns_the_revisions_before_and_after(empty: Store) -> None:
    assert migrate.read_revision(empty) is None
    assert migrate.upgrade(empty) == (None, REVISION)
    assert migrate.read_revision(empty) == REVISION


def test_a_second_upgrade_changes_nothing(empty: Store) -> None:
    migrate.upgrade(empty)
    before = described(empty.engine)
    assert migrate.upgrade(empty) == (REVISION, REVISION)
    assert described(empty.engine) == before


def test_a_newer_database_stays_unchanged(empty: Store) -> None:
    migrate.upgrade(empty)
    with empty.engine.begin() as connection:
        connection.execute(sa.text(f"UPDATE {VERSION_TABLE} SET version_num = '9999'"))
    assert migrate.upgrade(empty) == ("9999", "9999")
    migrate.check_revision(empty)


@pytest.mark.parametrize("database", ["mariadb"], indirect=True)
def test_an_interrupted_upgrade_can_be_repeated(empty: Store) -> None:
    migrate.upgrade(empty)
    complete = described(empty.engine)
    with empty.engine.begin() as connection:  # MariaDB commits table by table
        connection.exec_driver_sql("DROP TABLE workflow_log")
        connection.exec_driver_sql("DROP INDEX ix_workflow_event_waiting ON workflow_event")
        connection.exec_driver_sql(f"DELETE FROM {VERSION_TABLE}")
    assert migrate.upgrade(empty) == (None, REVISION)
    assert described(empty.engine) == complete


@pytest.mark.parametrize("database", ["sqlite", "postgresql"], indirect=True)
def test_a_foreign_table_of_the_same_name_stops_the_upgrade_without_changes(empty: Store) -> None:
    with empty.engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE workflow_log (id INTEGER)")
    with pytest.raises(sa.exc.DBAPIError, match="already exists"):
        migrate.upgrade(empty)
    assert sa.inspect(empty.engine).get_table_names() == ["workflow_log"]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_simultaneous_upgrades_do_not_disturb_each_other(empty: Store) -> None:
    url = empty.engine.url.render_as_string(hide_password=False)
    empty.close()
    fork = multiprocessing.get_context("fork")
    start, answers = fork.Barrier(3), fork.Queue()
    rivals = [fork.Process(target=_upgrade, args=(url, start, answers)) for _ in range(3)]
    for rival in rivals:
        rival.start()
    earlier = [answers.get(timeout=30) for _ in rivals]
    for rival in rivals:
        rival.join()
    assert sorted(earlier, key=str) == sorted([(None, REVISION), (REVISION, REVISION), (REVISION, REVISION)], key=str)
    assert set(described(empty.engine)) == TABLES


def _upgrade(url: str, start: Any, answers: Any) -> None:
    store = Store(url)
    start.wait(30)
    try:
        answers.put(migrate.upgrade(store))
    except Exception as error:
        answers.put(repr(error))
    store.close()


# --- the database's id ---------------------------------------------------------------------------


def test_a_migration_gives_the_database_a_random_id_that_stays(empty: Store, empty_url: str) -> None:
    found = []
    for _ in range(2):
        migrate.upgrade(empty)
        migrate.upgrade(empty)
        first, again = Store(empty_url), Store(empty_url)
        found.append({first.transact(ensure_database_id), again.transact(ensure_database_id)})
        first.close()
        again.close()
        drop_all(empty.engine)
    assert [len(each) for each in found] == [1, 1]
    (one,), (other,) = found
    assert (len(one), one != other) == (32, True)
    assert set(one) <= set("0123456789abcdef")


# --- schema and prefix --------------------------------------------------------------------------


def test_a_prefix_goes_before_every_name(empty: Store, empty_url: str) -> None:
    store = Store(empty_url, prefix="shop_")
    assert migrate.upgrade(store) == (None, REVISION)
    found = described(store.engine)
    assert set(found) == {f"shop_{name}" for name in TABLES}
    assert sa.inspect(store.engine).has_table("shop_workflow_schema_version")
    named = [json.loads(row)["name"] for table in found.values() for row in (*table["unique"], *table["indexes"])]
    assert {name.startswith("shop_") for name in named} == {True}
    assert migrate.read_revision(empty) is None  # the tables without a prefix are another store's
    _is_usable(store)
    store.close()


def test_two_prefixes_live_side_by_side(empty: Store, empty_url: str) -> None:
    for prefix in ("", "shop_", "Shop "):
        store = Store(empty_url, prefix=prefix)
        assert migrate.upgrade(store) == (None, REVISION)
        _is_usable(store)
        store.close()


@pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)
def test_a_schema_holds_all_tables(empty: Store, empty_url: str) -> None:
    schema = f"{empty.engine.url.database}_durable"
    with empty.engine.begin() as connection:
        connection.exec_driver_sql(f"DROP SCHEMA IF EXISTS {schema}")
        connection.exec_driver_sql(f"CREATE SCHEMA {schema}")
    store = Store(empty_url, schema=schema, prefix="p_")
    try:
        assert migrate.read_revision(store) is None
        assert migrate.upgrade(store) == (None, REVISION)
        assert migrate.upgrade(store) == (REVISION, REVISION)
        expected = {f"p_{name}" for name in TABLES}
        assert set(sa.inspect(store.engine).get_table_names(schema=schema)) == expected | {f"p_{VERSION_TABLE}"}
        assert sa.inspect(store.engine).get_table_names() == []
        migrated = described(store.engine, schema)
        drop_all(store.engine, schema)
        build_tables(schema, "p_").metadata.create_all(store.engine)
        assert described(store.engine, schema) == migrated
        _is_usable(store)
    finally:
        drop_all(store.engine, schema)
        with store.engine.begin() as connection:
            connection.exec_driver_sql(f"DROP SCHEMA {schema}")
        store.close()


def _is_usable(store: Store) -> None:
    given: dict[str, Any] = {"params": "{}", "queue": "q", "grace": timedelta(0), "commit_id": "c"}
    assert store.transact(lambda tx: instances.insert(tx, workflow="order", instance_id="o-1", **given)) is True
    assert store.read(lambda tx: instances.read(tx, "order", "o-1")).instance_id == "o-1"


# --- check --------------------------------------------------------------------------------------


def test_the_error_for_missing_tables_names_the_command(empty: Store) -> None:
    with pytest.raises(SchemaOutdated) as caught:
        migrate.check_revision(empty)
    assert str(caught.value) == (
        f"The database has no celery_durable tables; this version needs revision '{REVISION}'. "
        "Bring it up to date: celery -A <your app> durable migrate"
    )


def test_the_error_for_an_older_database_names_both_revisions(empty: Store) -> None:
    migrate.upgrade(empty)
    with empty.engine.begin() as connection:
        connection.execute(sa.text(f"UPDATE {VERSION_TABLE} SET version_num = '0000'"))
    with pytest.raises(SchemaOutdated) as caught:
        migrate.check_revision(empty)
    assert str(caught.value) == (
        f"The database is at revision '0000'; this version needs revision '{REVISION}'. "
        "Bring it up to date: celery -A <your app> durable migrate"
    )


def test_a_database_that_is_up_to_date_passes(empty: Store) -> None:
    migrate.upgrade(empty)
    migrate.check_revision(empty)
    migrate.check_tables(empty)


def test_missing_tables_and_columns_are_named_although_the_revision_is_current(empty: Store) -> None:
    migrate.upgrade(empty)
    with empty.engine.begin() as connection:
        connection.execute(sa.text("DROP TABLE workflow_label"))
        connection.execute(sa.text("ALTER TABLE workflow_run RENAME COLUMN log_count TO log_lines"))
    migrate.check_revision(empty)
    with pytest.raises(SchemaIncomplete) as caught:
        migrate.check_tables(empty)
    assert caught.value.missing == ("workflow_label", "workflow_run.log_count")
    assert str(caught.value) == (
        "The database lacks workflow_label, workflow_run.log_count, although its revision is current. Restore what is "
        "missing from a backup, or create it as this shows: celery -A <your app> durable migrate --sql"
    )


def test_tables_and_columns_of_a_newer_revision_pass(empty: Store) -> None:
    migrate.upgrade(empty)
    with empty.engine.begin() as connection:
        connection.execute(sa.text("ALTER TABLE workflow_run ADD COLUMN of_tomorrow INTEGER"))
        connection.execute(sa.text("CREATE TABLE workflow_of_tomorrow (id INTEGER)"))
        connection.execute(sa.text(f"UPDATE {VERSION_TABLE} SET version_num = '0099'"))
    migrate.check_tables(empty)


# --- offline ------------------------------------------------------------------------------------


def test_the_offline_script_makes_the_same_database(empty: Store) -> None:
    script = migrate.render_sql(empty)
    for name in TABLES | {VERSION_TABLE}:
        assert f"CREATE TABLE {name} (" in script or f"CREATE TABLE IF NOT EXISTS {name} (" in script
    assert sa.inspect(empty.engine).get_table_names() == []
    with empty.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        for statement in script.split(";\n"):
            text = "\n".join(line for line in statement.splitlines() if not line.startswith("--")).strip()
            if text:
                connection.exec_driver_sql(text).close()
    offline = described(empty.engine)
    assert migrate.read_revision(empty) == REVISION
    assert migrate.upgrade(empty) == (REVISION, REVISION)
    drop_all(empty.engine)
    migrate.upgrade(empty)
    assert described(empty.engine) == offline


def test_the_offline_script_honours_schema_and_prefix(empty: Store, empty_url: str) -> None:
    store = Store(empty_url, schema="durable", prefix="shop_")
    script = migrate.render_sql(store)
    for name in TABLES | {VERSION_TABLE}:
        assert f"durable.shop_{name} (" in script
    assert " workflow_" not in script
    store.close()
