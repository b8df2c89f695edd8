"""Empty databases of a Django project, and harnesses on them."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import sqlalchemy as sa
from django.db import connections

from celery_durable.config import Settings
from celery_durable.contrib.django import step_transactions as body_connections
from celery_durable.contrib.django import wiring
from celery_durable.contrib.django.database import DjangoDatabase
from celery_durable.runtime import Runtime
from celery_durable.store.migrations import migrate
from celery_durable.testing import DurableHarness, databases
from celery_durable.testing.databases import MakeStore
from tests.contrib.django import project, workflows
from tests.contrib.django.booking.models import Booking, Name


@pytest.fixture
def alias(database: str, request: pytest.FixtureRequest) -> Iterator[str]:
    """The alias of an empty, migrated database, in which the tables of the application are empty, too."""
    if database not in connections.settings:
        own = request.getfixturevalue(f"{database}_database")
        server = {"default": {}, database: project.server(sa.make_url(own.url))}
        connections.settings[database] = connections.configure_settings(server)[database]
    _migrate(database)
    _empty_tables(database)
    yield database
    connections[database].close()


@functools.cache
def _migrate(alias: str) -> None:
    store = wiring.make_store(DjangoDatabase(alias), Settings(), Runtime())
    migrate.upgrade(store)
    store.close()


def _empty_tables(alias: str) -> None:
    store = wiring.make_store(DjangoDatabase(alias), Settings(), Runtime())
    databases.wipe(store)
    store.close()
    present = connections[alias].introspection.table_names()
    for model in (Booking, Name):
        if model._meta.db_table in present:
            model.objects.using(alias).all().delete()
        else:
            with connections[alias].schema_editor() as editor:
                editor.create_model(model)


@pytest.fixture
def make_store(alias: str) -> MakeStore:
    """Makes stores on the alias."""
    return functools.partial(wiring.make_store, DjangoDatabase(alias))


@pytest.fixture
def harness(make_store: MakeStore, alias: str) -> Iterator[DurableHarness]:
    """A harness on the alias, with the workflows of these tests."""
    with DurableHarness(workflows.ALL, make_store=make_store, unused_mocks=True) as harness:
        wiring.join_calls(harness.durable, alias)
        yield harness


@pytest.fixture(autouse=True)
def connections_of_bodies() -> None:
    """Closes connections around bodies, as the app's ``ready`` has it done."""
    body_connections.connect()
