"""Attaches the project's Celery app and its Durable to the database of a Django alias."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from asgiref.sync import sync_to_async
from celery import Celery
from celery._state import get_current_app  # current_app is a proxy, which later is another app
from django.conf import settings
from django.db import connections
from django.utils.module_loading import import_string

from celery_durable.app import Durable
from celery_durable.config import Settings
from celery_durable.contrib.django.database import DjangoDatabase
from celery_durable.contrib.django.engines import make_own_engine
from celery_durable.errors import AliasMismatch, ConfigInvalid
from celery_durable.runtime import Runtime
from celery_durable.store.engine.framework_store import FrameworkStore

T = TypeVar("T")


def get_alias() -> str:
    """Return the alias of the database with the workflows: the setting ``CELERY_DURABLE_DATABASE``."""
    return str(getattr(settings, "CELERY_DURABLE_DATABASE", "default"))


def find_app() -> Celery:
    """Return the Celery app: that of the setting ``CELERY_DURABLE_APP``, or the current one."""
    name = getattr(settings, "CELERY_DURABLE_APP", None)
    if name is None:
        return get_current_app()
    found = import_string(str(name).replace(":", "."))
    if not isinstance(found, Celery):
        raise ConfigInvalid("CELERY_DURABLE_APP", name, 'name your Celery app, for example "proj.celery:app"')
    return found


def find_durable() -> Durable:
    """Return the Durable of the Celery app. It is made if the project has made none."""
    app = find_app()
    found = vars(app).get("durable")
    return found if isinstance(found, Durable) else Durable(app)


_names_at_start: dict[str, Any] = {}
"""The names of the databases when the process started. A test runner replaces them."""


def attach(durable: Durable) -> None:
    """Put the workflows into the database of the alias. Nothing connects yet, and no setting of Celery is read."""
    durable.internals.make_store = _make_store
    join_calls(durable)
    _names_at_start.update((alias, connections.settings[alias]["NAME"]) for alias in connections.settings)


def join_calls(durable: Durable, alias: str | None = None) -> None:
    """Run async calls where Django's run, and compare ``using`` with the alias; None: that of the settings."""
    durable.internals.call_async = call_async
    durable.internals.check_using = lambda using: check_using(using, alias or get_alias())


def check_using(using: str, alias: str) -> None:
    """Check the option ``using`` of a call; raises AliasMismatch if it is not the alias of the workflows."""
    if using != alias:
        raise AliasMismatch(using, alias, is_known=using in connections.settings)


async def call_async(call: Callable[[], T], /) -> T:
    """Call a function for async code on the thread of Django's own async methods, to join their ``atomic()``."""
    return await sync_to_async(call, thread_sensitive=True)()


def _make_store(durable_settings: Settings, runtime: Runtime) -> FrameworkStore:
    alias = get_alias()
    if durable_settings.database_url is not None:
        raise ConfigInvalid(
            "durable_database_url",
            "***",
            f"leave it out: the workflows are in the database {alias!r} of DATABASES (CELERY_DURABLE_DATABASE)",
        )
    return make_store(DjangoDatabase(alias), durable_settings, runtime)


def is_test_database(alias: str) -> bool:
    """Whether a test runner has replaced the database of this alias since the process started."""
    return _names_at_start.get(alias) not in (None, connections[alias].settings_dict["NAME"])


def make_store(
    database: DjangoDatabase, durable_settings: Settings, runtime: Runtime, *, is_closed: bool = False
) -> FrameworkStore:
    """Make a store; unless ``is_closed``, no connection stays open to a test's database, which is dropped."""
    keeps_connections = is_closed or not is_test_database(database.alias)
    engine = make_own_engine(
        database.alias, prepared_statements=durable_settings.prepared_statements, keeps_connections=keeps_connections
    )
    return FrameworkStore(
        database,
        engine,
        owns_engine=keeps_connections,
        schema=durable_settings.database_schema,
        prefix=durable_settings.table_prefix,
        prepared_statements=durable_settings.prepared_statements,
        runtime=runtime,
    )
