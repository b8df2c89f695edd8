"""Django's migrations follow the store's, and say what to do if the database cannot be used."""

from __future__ import annotations

from typing import Any

import pytest
from django.conf import settings
from django.core.management.base import CommandError
from django.db import connections
from django.db.migrations.loader import MigrationLoader

from celery_durable import Durable
from celery_durable.contrib.django import wiring
from celery_durable.contrib.django.checks import StoreRevision
from tests.contrib.django import site
from tests.docs.blocks import ROOT


def test_each_revision_of_the_store_has_a_migration() -> None:
    loader = MigrationLoader(None)
    ours = [migration for (label, _), migration in loader.disk_migrations.items() if label == "celery_durable"]
    revisions = sorted(
        operation.revision
        for migration in ours
        for operation in migration.operations
        if isinstance(operation, StoreRevision)
    )
    scripts = (ROOT / "celery_durable/store/migrations/versions").glob("0*.py")
    assert revisions == sorted(path.stem[:4] for path in scripts)
    assert loader.graph.leaf_nodes("celery_durable") == [("celery_durable", max(each.name for each in ours))]


@pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)
def test_a_migration_without_a_database_names_it_and_the_remedy(
    alias: str, make_app: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = make_app(durable_database_url=None)
    wiring.attach(Durable(app))
    monkeypatch.setattr(site, "app", app)
    monkeypatch.setattr(settings, "CELERY_DURABLE_APP", "tests.contrib.django.site:app", raising=False)
    monkeypatch.setattr(settings, "CELERY_DURABLE_DATABASE", alias, raising=False)
    with connections[alias].schema_editor(atomic=False) as editor, pytest.raises(CommandError) as refused:
        monkeypatch.setitem(connections.settings[alias], "PORT", "1")
        StoreRevision("0001").database_forwards("celery_durable", editor, None, None)
    error, hint = str(refused.value).splitlines()
    assert error.startswith(f"The database {alias!r} cannot be used: ")
    assert hint == (
        f"HINT: Is the server of DATABASES[{alias!r}] running, and does it accept writes? Then run this again."
    )
