"""Django's migrations follow the store's."""

from __future__ import annotations

from django.db.migrations.loader import MigrationLoader

from celery_durable.contrib.django.store_revision import StoreRevision
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
