"""Indexes for lists that no other statement uses."""

from __future__ import annotations

from django.db import migrations

from celery_durable.contrib.django.store_revision import StoreRevision


class Migration(migrations.Migration):
    """Revision 0006 of the store."""

    atomic = False

    dependencies = [("celery_durable", "0005_max_run")]
    operations = [StoreRevision("0006")]
