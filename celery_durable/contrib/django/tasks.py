"""The address of `DurableBackend`. Its module needs Django 6 or ``django-tasks``; Celery always imports this one."""

from __future__ import annotations

from importlib import import_module
from typing import Any

BACKEND = f"{__name__}.DurableBackend"
"""What the setting ``TASKS`` names."""


def __getattr__(name: str) -> Any:
    if name == "DurableBackend":
        return import_module("celery_durable.contrib.django.task_backend").DurableBackend
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
