"""Runs can be asked to stop."""

from __future__ import annotations

from django.db import migrations

from celery_durable.contrib.django.checks import StoreRevision


class Migration(migrations.Migration):
    """Revision 0003 of the store."""

    atomic = False  # the store has a connection and a lock of its own

    dependencies = [("celery_durable", "0002_held_tasks")]
    operations = [StoreRevision("0003")]
