"""Django's system checks of the integration. Each says what to do."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

from celery.fixups.django import DjangoFixup
from django.apps import AppConfig
from django.core.checks import CheckMessage, Error, Warning  # noqa: A004  # Django's name
from django.core.management.base import CommandError
from django.db import DEFAULT_DB_ALIAS, connections, router
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.migrations.loader import MigrationLoader
from django.db.migrations.operations.base import Operation
from sqlalchemy.exc import DBAPIError

from celery_durable.app import Durable
from celery_durable.contrib.django import wiring
from celery_durable.errors import DurableError, StoreUnavailable, UnsupportedDatabase
from celery_durable.insight.explain.due import is_pooler_rejection
from celery_durable.store.engine import Store, server_info
from celery_durable.store.engine.faults import describe_fault
from celery_durable.store.migrations import migrate
from celery_durable.store.schema.tables import REVISION

_ENGINES = ("postgresql", "mysql", "sqlite")


def check_settings(**_: Any) -> list[CheckMessage]:
    """Check the settings, without a connection."""
    return list(_find_setting_faults())


def _find_setting_faults() -> Iterator[CheckMessage]:
    durable, alias = wiring.find_durable(), wiring.get_alias()
    if alias not in connections.settings:
        known = ", ".join(sorted(connections.settings))
        yield Error(
            f"CELERY_DURABLE_DATABASE = {alias!r} is not in DATABASES.",
            hint=f"Use one of: {known}.",
            id="celery_durable.E003",
        )
        return
    wrapper = connections[alias]
    yield from _find_engine_faults(wrapper)
    yield from _find_store_faults(durable, wrapper)
    yield from _find_workflow_faults(durable)
    yield from _find_pool_faults(wrapper)
    yield from _find_app_faults(durable)
    yield from _find_request_faults(wrapper)
    yield from _find_memory_faults(wrapper)


def _find_engine_faults(wrapper: BaseDatabaseWrapper) -> Iterator[CheckMessage]:
    if wrapper.vendor not in _ENGINES:
        yield Error(
            f"Workflows cannot be in the database {wrapper.alias!r}: its engine is {wrapper.settings_dict['ENGINE']}.",
            hint="Use PostgreSQL, MariaDB or SQLite, and name its alias in CELERY_DURABLE_DATABASE.",
            id="celery_durable.E003",
        )


def _find_pool_faults(wrapper: BaseDatabaseWrapper) -> Iterator[CheckMessage]:
    pool = wrapper.settings_dict["OPTIONS"].get("pool")
    size = pool.get("max_size", 4) if isinstance(pool, dict) else None
    if size is not None and size < _THREADS_OF_A_SMALL_WORKER:
        yield Warning(
            f"The pool of the database {wrapper.alias!r} has {size} connections.",
            hint='Set OPTIONS["pool"]["max_size"] to at least the worker\'s concurrency times the most branches of a '
            "workflow: a branch that writes holds a connection.",
            id="celery_durable.W004",
        )


_THREADS_OF_A_SMALL_WORKER = 8


def _find_request_faults(wrapper: BaseDatabaseWrapper) -> Iterator[CheckMessage]:
    """Find out whether the transactions of requests are on other databases only."""
    alias = wrapper.alias
    others = sorted(
        name for name, each in connections.settings.items() if each.get("ATOMIC_REQUESTS") and name != alias
    )
    if others and not wrapper.settings_dict["ATOMIC_REQUESTS"]:
        yield Warning(
            f"ATOMIC_REQUESTS is set for {', '.join(map(repr, others))}, but workflows are in the database {alias!r}: "
            "a workflow that a view starts stays if the view fails.",
            hint=f'Set DATABASES[{alias!r}]["ATOMIC_REQUESTS"] = True, or start workflows in transaction.on_commit.',
            id="celery_durable.W007",
        )


def _find_memory_faults(wrapper: BaseDatabaseWrapper) -> Iterator[CheckMessage]:
    if wrapper.vendor == "sqlite" and ":memory:" in str(wrapper.settings_dict["NAME"]):
        yield Warning(
            "The database is SQLite in memory: workers and other threads do not see it.",
            hint='Name a file. For tests name one in DATABASES["default"]["TEST"]["NAME"].',
            id="celery_durable.W005",
        )


def _find_store_faults(durable: Durable, wrapper: BaseDatabaseWrapper) -> Iterator[CheckMessage]:
    """Find out whether workflows would be in another database, or be stored in a way that this one does not allow."""
    if durable.internals.has_own_engine:
        yield Error(
            f"Durable(engine=...) and the database {wrapper.alias!r} of Django may be two databases.",
            hint="Leave out engine= and session_factory=: celery_durable.contrib.django connects by DATABASES.",
            id="celery_durable.E001",
        )
    try:
        settings = durable.internals.read_settings()
    except DurableError as error:
        yield Error(str(error), id="celery_durable.E004")
        return
    if settings.database_url is not None:
        yield Error(
            f"The database of CELERY_DURABLE_DATABASE_URL and the database {wrapper.alias!r} of Django may be two "
            "databases.",
            hint="Leave out CELERY_DURABLE_DATABASE_URL, and name the alias in CELERY_DURABLE_DATABASE.",
            id="celery_durable.E001",
        )
    if wrapper.settings_dict.get("DISABLE_SERVER_SIDE_CURSORS") and settings.prepared_statements:
        yield _warn_of_pooler(
            f"The database {wrapper.alias!r} seems to be behind a pooler in transaction mode, and workflows use "
            "prepared statements."
        )


def _warn_of_pooler(sentence: str) -> Warning:
    return Warning(
        sentence,
        hint="Set CELERY_DURABLE_PREPARED_STATEMENTS = False. Without a pooler, remove DISABLE_SERVER_SIDE_CURSORS.",
        id="celery_durable.W003",
    )


def _find_workflow_faults(durable: Durable) -> Iterator[CheckMessage]:
    if not len(durable.workflows):
        yield Warning(
            "No workflow is defined.",
            hint="Define workflows in the module workflows.py of an installed app.",
            id="celery_durable.W001",
        )


def _find_app_faults(durable: Durable) -> Iterator[CheckMessage]:
    """Find out whether the Celery app is the project's and was made for Django."""
    app: Any = durable.app
    if app.main == "default" and not app.fixups:  # as Celery makes the app of a process that has none
        yield Warning(
            "The project has no Celery app: workflows use Celery's default app, which has no settings.",
            hint="Import the app of proj/celery.py in proj/__init__.py, or name it in CELERY_DURABLE_APP.",
            id="celery_durable.W006",
        )
    elif not any(isinstance(each, DjangoFixup) for each in app._fixups):  # noqa: SLF001  # Celery has no other name for it
        yield Warning(
            f"The Celery app {app.main!r} was made before DJANGO_SETTINGS_MODULE was set: Celery does not close the "
            "connections of tasks.",
            hint='Call os.environ.setdefault("DJANGO_SETTINGS_MODULE", "proj.settings") before Celery(...).',
            id="celery_durable.W006",
        )


def check_database(databases: Iterable[str] | None = None, **_: Any) -> list[CheckMessage]:
    """Check the tables and the connection. Django runs it only for databases that are named."""
    alias = wiring.get_alias()
    if alias not in (databases or ()) or sys.argv[1:2] == ["migrate"]:  # `migrate` checks before it makes the tables
        return []
    try:
        return list(_find_database_faults(alias, wiring.find_durable().internals.store))
    except UnsupportedDatabase as error:
        return [Error(str(error), id="celery_durable.E005")]
    except (StoreUnavailable, DBAPIError) as error:
        answer = describe_fault(error)
        if is_pooler_rejection(answer):
            return [_warn_of_pooler(f"The database {alias!r} is behind a pooler in transaction mode: {answer}")]
        return [
            Error(
                f"The database {alias!r} cannot be used: {answer}",
                hint=f"Is the server of DATABASES[{alias!r}] running, and is this entry right? Then run this again.",
                id="celery_durable.E005",
            )
        ]


def _find_database_faults(alias: str, store: Store) -> Iterator[CheckMessage]:
    found = migrate.read_revision(store)
    if found is None or found < REVISION:
        # A warning, because an error would also stop `migrate` when it is called by a program.
        state = "do not exist" if found is None else f"are at revision {found}"
        option = "" if alias == DEFAULT_DB_ALIAS else f" --database {alias}"
        yield Warning(
            f"The tables of workflows {state}; this version needs revision {REVISION}.",
            # Django records our migrations also in databases that held no workflows when it ran.
            hint=f"Run: python manage.py migrate{option}. If it finds nothing to apply, run: python manage.py durable "
            "migrate",
            id="celery_durable.W002",
        )
    if not server_info.has_lock_timeout(store):
        yield Warning(
            f"Statements of workflows outside a transaction wait for locks in the database {alias!r} forever: "
            "lock_timeout is 0.",
            hint="Run: ALTER ROLE CURRENT_USER SET lock_timeout = '5s'. Behind a pooler in transaction mode, also set "
            "CELERY_DURABLE_PREPARED_STATEMENTS = False.",
            id="celery_durable.W008",
        )


# The operation by which ``manage.py migrate`` brings the tables of workflows to a revision.


class StoreRevision(Operation):
    """Bring the tables to a revision of ``durable migrate``, unless they are new enough: both commands may be used."""

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
