"""Steps of linear workflows can ask a person, too."""

from __future__ import annotations

from django.db import migrations

from celery_durable.contrib.django.checks import StoreRevision


class Migration(migrations.Migration):
    """Revision 0007 of the store."""

    atomic = False  # the store has a connection and a lock of its own

    dependencies = [("celery_durable", "0006_limits")]
    operations = [StoreRevision("0007")]
