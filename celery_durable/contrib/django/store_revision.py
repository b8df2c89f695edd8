"""The operation by which ``manage.py migrate`` brings the tables of workflows to a revision."""

from __future__ import annotations

from typing import Any

from django.apps import AppConfig
from django.core.management.base import CommandError
from django.db import router
from django.db.migrations.loader import MigrationLoader
from django.db.migrations.operations.base import Operation

from celery_durable.contrib.django import wiring
from celery_durable.errors import StoreUnavailable, UnsupportedDatabase
from celery_durable.explain.remedies import is_pooler_rejection
from celery_durable.store.engine import Store
from celery_durable.store.engine.faults import describe_fault
from celery_durable.store.migrations import migrate
from celery_durable.store.schema.tables import REVISION


class StoreRevision(Operation):
    """Bring the tables to a revision of ``durable migrate``, or a newer one. It goes back to none.

    It runs on the store's own connection, and does nothing where the tables are new enough. So it takes over tables
    that ``durable migrate`` made, and both commands may be used.
    """

    reduces_to_sql = False
    reversible = True

    def __init__(self, revision: str) -> None:
        self.revision = revision

    def describe(self) -> str:
        """Say what `migrate --plan` shows."""
        return f"Bring the tables of workflows to revision {self.revision}"

    def state_forwards(self, app_label: str, state: Any) -> None:
        """Change nothing: the tables are not those of models."""

    def database_forwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        """Migrate, if the database is the one with the workflows."""
        if not _is_wanted(schema_editor.connection.alias, app_label):
            return
        store = wiring.find_durable().internals.store
        if schema_editor.collect_sql:
            schema_editor.collected_sql.append(migrate.render_sql(store))
            return
        _upgrade(store, self.revision)

    def database_backwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        """Keep the tables: migrations of the store only go forward."""


def create_without_migrations(sender: AppConfig, using: str, **_: Any) -> None:
    """Make the tables if migrations are off, as by ``pytest --nomigrations``: a receiver of ``post_migrate``."""
    module, _is_explicit = MigrationLoader.migrations_module(sender.label)
    if module is None and _is_wanted(using, sender.label):
        _upgrade(wiring.find_durable().internals.store, REVISION)


def _is_wanted(alias: str, app_label: str) -> bool:
    return alias == wiring.get_alias() and router.allow_migrate(alias, app_label)


def _upgrade(store: Store, revision: str) -> None:
    try:
        found = migrate.read_revision(store)
        if found is None or found < revision:
            migrate.upgrade(store)
    except UnsupportedDatabase as error:
        raise CommandError(str(error)) from error
    except StoreUnavailable as error:
        alias, answer = wiring.get_alias(), describe_fault(error)
        remedy = (
            "Behind PgBouncer in transaction mode, set CELERY_DURABLE_PREPARED_STATEMENTS = False."
            if is_pooler_rejection(answer)
            else f"Is the server of DATABASES[{alias!r}] running, and does it accept writes? Then run this again."
        )
        raise CommandError(f"The database {alias!r} cannot be used: {answer}\nHINT: {remedy}") from error
