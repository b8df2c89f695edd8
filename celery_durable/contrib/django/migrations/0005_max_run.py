"""A column for how long each run of an instance may take."""

from __future__ import annotations

from django.db import migrations

from celery_durable.contrib.django.store_revision import StoreRevision


class Migration(migrations.Migration):
    """Revision 0005 of the store."""

    atomic = False

    dependencies = [("celery_durable", "0004_attempts")]
    operations = [StoreRevision("0005")]
