"""The stores of an application, as its settings describe them."""

from __future__ import annotations

from typing import Any

from celery_durable.config import Settings
from celery_durable.errors import ConfigInvalid
from celery_durable.runtime import Runtime
from celery_durable.store.engine import Store


def open_store(settings: Settings, runtime: Runtime, **given: Any) -> Store:
    """Return the database with the instances. ``given``: the engine and the session factory of the application."""
    return _open(settings.database_url, settings, runtime, **given)


def open_read_store(settings: Settings, runtime: Runtime, store: Store) -> Store:
    """Return the database for lists and counts: the replica if the settings name one, else ``store``."""
    if settings.read_database_url is None:
        return store
    try:
        return _open(settings.read_database_url, settings, runtime)
    except ConfigInvalid as exc:  # it names the setting of the other database
        raise ConfigInvalid("durable_read_database_url", exc.value, exc.remedy) from None


def _open(url: str | None, settings: Settings, runtime: Runtime, **given: Any) -> Store:
    return Store(
        url,
        schema=settings.database_schema,
        prefix=settings.table_prefix,
        prepared_statements=settings.prepared_statements,
        runtime=runtime,
        **given,
    )
