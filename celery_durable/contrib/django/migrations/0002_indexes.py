"""Indexes for what people read across all instances."""

from __future__ import annotations

from django.db import migrations

from celery_durable.contrib.django.store_revision import StoreRevision


class Migration(migrations.Migration):
    """Revision 0002 of the store."""

    atomic = False

    dependencies = [("celery_durable", "0001_initial")]
    operations = [StoreRevision("0002")]
