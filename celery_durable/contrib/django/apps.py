"""The Django app: it attaches Celery's app to the database, and finds the workflows of the installed apps."""

from __future__ import annotations

from django.apps import AppConfig, apps
from django.conf import settings
from django.core.checks import register
from django.db.models.signals import post_migrate
from django.utils.module_loading import import_string

from celery_durable.contrib.django import checks, step_transactions, tasks, wiring


class DurableConfig(AppConfig):
    """The app ``celery_durable``."""

    name = "celery_durable.contrib.django"
    label = "celery_durable"
    verbose_name = "Durable workflows"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Attach the Durable, and import the module ``workflows`` of each installed app."""
        durable = wiring.find_durable()
        wiring.attach(durable)
        step_transactions.connect()
        post_migrate.connect(checks.create_without_migrations, sender=self)
        register(checks.check_settings, "celery_durable")
        register(checks.check_database, "database")
        if any(each.get("BACKEND") == tasks.BACKEND for each in getattr(settings, "TASKS", {}).values()):
            import_string(tasks.BACKEND)  # workers have to know its workflow and its Celery task
        durable.autodiscover([config.name for config in apps.get_app_configs()], with_entry_points=False)
