"""A table of the attempts that did not succeed."""

from __future__ import annotations

from django.db import migrations

from celery_durable.contrib.django.store_revision import StoreRevision


class Migration(migrations.Migration):
    """Revision 0004 of the store."""

    atomic = False

    dependencies = [("celery_durable", "0003_open_items")]
    operations = [StoreRevision("0004")]
