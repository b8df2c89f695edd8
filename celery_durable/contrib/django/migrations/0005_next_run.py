"""An instance can be asked to run once more when its run ends."""

from __future__ import annotations

from django.db import migrations

from celery_durable.contrib.django.checks import StoreRevision


class Migration(migrations.Migration):
    """Revision 0005 of the store."""

    atomic = False  # the store has a connection and a lock of its own

    dependencies = [("celery_durable", "0004_asks")]
    operations = [StoreRevision("0005")]
