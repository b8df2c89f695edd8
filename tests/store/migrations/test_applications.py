"""Migrations that an application runs: in its own transaction, or through `Durable.migrate`."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa
from celery import Celery

from celery_durable import Durable
from celery_durable.store.engine import Store
from celery_durable.store.migrations import migrate
from celery_durable.store.schema.tables import REVISION
from tests.store.migrations.tables import TABLES, VERSION_TABLE


@pytest.mark.parametrize("database", ["sqlite", "postgresql"], indirect=True)
def test_the_callers_rollback_undoes_the_upgrade(empty: Store, empty_url: str) -> None:
    engine = sa.create_engine(empty_url)  # the application's own
    with engine.connect() as connection:
        transaction = connection.begin()
        assert migrate.upgrade_connection(connection) == (None, REVISION)
        transaction.rollback()
    assert sa.inspect(engine).get_table_names() == []
    engine.dispose()
    assert migrate.read_revision(empty) is None


def test_the_callers_commit_keeps_the_upgrade(empty: Store, empty_url: str) -> None:
    engine = sa.create_engine(empty_url)
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE shop (id INTEGER)")
        assert migrate.upgrade_connection(connection) == (None, REVISION)
        connection.exec_driver_sql("INSERT INTO shop VALUES (1)")
    with engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT id FROM shop").scalars().all() == [1]
    engine.dispose()
    assert migrate.read_revision(empty) == REVISION


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_the_callers_lock_timeout_is_left_as_it_was(empty: Store, empty_url: str) -> None:
    engine = sa.create_engine(empty_url)
    with engine.begin() as connection:
        connection.exec_driver_sql("SET LOCAL lock_timeout = '7s'")
        migrate.upgrade_connection(connection)
        assert connection.exec_driver_sql("SHOW lock_timeout").scalar_one() == "7s"
    engine.dispose()


def test_an_applications_migration_can_use_its_op_afterwards(empty: Store, empty_url: str, tmp_path: Any) -> None:
    """The usual way to call us: `upgrade_connection(op.get_bind())` in a revision of the application's own."""
    from alembic import command
    from alembic.config import Config

    (tmp_path / "versions").mkdir()
    (tmp_path / "env.py").write_text(
        "from alembic import context\n"
        "connection = context.config.attributes['connection']\n"
        "context.configure(connection=connection)\n"
        "with context.begin_transaction():\n"
        "    context.run_migrations()\n"
        "context.get_context()\n"
    )
    (tmp_path / "versions" / "a1_workflows.py").write_text(
        "import sqlalchemy as sa\n"
        "from alembic import op\n"
        "from celery_durable.store.migrations.migrate import upgrade_connection\n"
        "revision, down_revision = 'a1', None\n"
        "def upgrade():\n"
        "    op.create_table('shop', sa.Column('id', sa.Integer, primary_key=True))\n"
        "    upgrade_connection(op.get_bind())\n"
        "    op.create_table('customer', sa.Column('id', sa.Integer, primary_key=True))\n"
    )
    config = Config()
    config.set_main_option("script_location", str(tmp_path))
    engine = sa.create_engine(empty_url)
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
    assert set(sa.inspect(engine).get_table_names()) == TABLES | {VERSION_TABLE, "alembic_version", "shop", "customer"}
    engine.dispose()
    assert migrate.read_revision(empty) == REVISION


@pytest.mark.parametrize("database", ["sqlite", "postgresql"], indirect=True)
def test_an_application_migrates_in_a_transaction_of_its_own_with_its_prefix(empty: Store, empty_url: str) -> None:
    app = Celery("shop", set_as_current=False)
    app.conf.durable_database_url, app.conf.durable_table_prefix = empty_url, "shop_"
    durable = Durable(app)
    with empty.engine.connect() as connection:
        transaction = connection.begin()
        assert durable.migrate(connection) == (None, REVISION)
        assert sa.inspect(connection).has_table("shop_workflow_instance")
        transaction.rollback()
    assert sa.inspect(empty.engine).get_table_names() == []
    durable.close()


def test_an_application_migrates_without_a_connection(empty: Store, empty_url: str) -> None:
    app = Celery("shop", set_as_current=False)
    app.conf.durable_database_url = empty_url
    durable = Durable(app)
    assert durable.migrate() == (None, REVISION)
    assert durable.migrate() == (REVISION, REVISION)
    durable.close()
    assert migrate.read_revision(empty) == REVISION
