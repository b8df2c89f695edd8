"""Steps and workflows can share limits."""

from __future__ import annotations

from django.db import migrations

from celery_durable.contrib.django.checks import StoreRevision


class Migration(migrations.Migration):
    """Revision 0006 of the store."""

    atomic = False  # the store has a connection and a lock of its own

    dependencies = [("celery_durable", "0005_next_run")]
    operations = [StoreRevision("0006")]
