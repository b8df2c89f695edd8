"""The address of the backend for Django's tasks, `DurableBackend`.

The module of the backend is imported when the backend is used: Celery imports this one in every project, also in those
that have neither Django 6 nor the package ``django-tasks``.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

BACKEND = f"{__name__}.DurableBackend"
"""What the setting ``TASKS`` names."""


def __getattr__(name: str) -> Any:
    if name == "DurableBackend":
        return import_module("celery_durable.contrib.django.task_backend").DurableBackend
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
