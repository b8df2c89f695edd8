"""An index for the open items of maps."""

from __future__ import annotations

from django.db import migrations

from celery_durable.contrib.django.store_revision import StoreRevision


class Migration(migrations.Migration):
    """Revision 0003 of the store."""

    atomic = False

    dependencies = [("celery_durable", "0002_indexes")]
    operations = [StoreRevision("0003")]
