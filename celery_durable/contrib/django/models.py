"""The instances as a Django model, for the admin and for queries. Nothing is written through it."""

from __future__ import annotations

from typing import Any, ClassVar

from django.db import models

from celery_durable.contrib.django import wiring


class InstanceManager(models.Manager["Instance"]):
    """Reads from the database of ``CELERY_DURABLE_DATABASE``."""

    def get_queryset(self) -> models.QuerySet[Any]:
        """Return all instances."""
        return super().get_queryset().using(wiring.get_alias())


class Instance(models.Model):
    """An instance of a workflow, as the table of the store has it. Change instances through their handles."""

    id: models.BigAutoField[int, int] = models.BigAutoField(primary_key=True)
    workflow: models.CharField[str, str] = models.CharField(max_length=255)
    instance_id: models.CharField[str, str] = models.CharField(max_length=255)
    status: models.CharField[str, str] = models.CharField(max_length=16)

    objects: ClassVar[InstanceManager] = InstanceManager()

    class Meta:
        """The table is the store's."""

        managed = False
        db_table = "workflow_instance"
        default_permissions = ("view",)
        permissions = (
            ("create_instance", "Can create instances over HTTP"),
            ("pause_instance", "Can pause and resume instances"),
            ("retry_instance", "Can retry and restart instances"),
            ("terminate_instance", "Can terminate instances"),
            ("send_event_instance", "Can send events to instances"),
            ("complete_step_instance", "Can complete steps by hand over HTTP"),
        )

    def __str__(self) -> str:
        return f"{self.workflow}/{self.instance_id}"


def join_key(workflow: str, instance_id: str) -> str:
    """Return the key of an instance in the admin."""
    return f"{workflow}/{instance_id}"


def split_key(key: str) -> tuple[str, str]:
    """Return the workflow, which may have slashes, and the instance's id, which has none."""
    workflow, _, instance_id = key.rpartition("/")
    return workflow, instance_id
