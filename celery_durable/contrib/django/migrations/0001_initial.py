"""The tables, and the model of an instance."""

from __future__ import annotations

from django.db import migrations, models

from celery_durable.contrib.django.checks import StoreRevision


class Migration(migrations.Migration):
    """Revision 0001 of the store."""

    initial = True
    atomic = False  # the store has a connection and a lock of its own

    dependencies = []
    operations = [
        StoreRevision("0001"),
        migrations.CreateModel(
            "Instance",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("workflow", models.CharField(max_length=255)),
                ("instance_id", models.CharField(max_length=255)),
                ("status", models.CharField(max_length=16)),
            ],
            options={
                "db_table": "workflow_instance",
                "managed": False,
                "default_permissions": ("view",),
                "permissions": (
                    ("create_instance", "Can create instances over HTTP"),
                    ("pause_instance", "Can pause and resume instances"),
                    ("retry_instance", "Can retry and restart instances"),
                    ("terminate_instance", "Can terminate instances"),
                    ("send_event_instance", "Can send events to instances"),
                    ("complete_step_instance", "Can complete steps by hand over HTTP"),
                ),
            },
        ),
    ]
