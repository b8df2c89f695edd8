"""A request for a run that comes twice has no effect the second time."""

from __future__ import annotations

from django.db import migrations

from celery_durable.contrib.django.checks import StoreRevision


class Migration(migrations.Migration):
    """Revision 0008 of the store."""

    atomic = False  # the store has a connection and a lock of its own

    dependencies = [("celery_durable", "0007_linear_asks")]
    operations = [StoreRevision("0008")]
