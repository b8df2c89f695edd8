"""Settings for development. SHOP_DATABASE names a PostgreSQL database; without it, the shop uses a SQLite file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

BASE_DIR = Path(__file__).resolve().parent.parent
SECRET_KEY = "only for development"
DEBUG = True
ALLOWED_HOSTS = ["*"]

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.messages",
    "django.contrib.sessions",
    "django.contrib.staticfiles",
    "celery_durable.contrib.django",
    "shop",
]
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]
ROOT_URLCONF = "proj.urls"
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        },
    }
]
STATIC_URL = "static/"
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

_postgresql: dict[str, Any] = {
    "ENGINE": "django.db.backends.postgresql",
    "NAME": os.environ.get("SHOP_DATABASE"),
    "USER": os.environ.get("SHOP_DATABASE_USER", "postgres"),
    "HOST": os.environ.get("SHOP_DATABASE_HOST", "127.0.0.1"),
}
_sqlite: dict[str, Any] = {
    "ENGINE": "django.db.backends.sqlite3",
    "NAME": os.environ.get("SHOP_SQLITE", BASE_DIR / "shop.sqlite3"),
    # A file, because other threads do not see a database in memory.
    "TEST": {"NAME": os.environ.get("SHOP_SQLITE", str(BASE_DIR / "shop.sqlite3")) + ".test"},
}
DATABASES = {"default": _postgresql if "SHOP_DATABASE" in os.environ else _sqlite}

CELERY_BROKER_URL = os.environ.get("CELERY_BROKER_URL", "redis://127.0.0.1:6379/0")
CELERY_DURABLE_DISPATCHER = "worker"  # so that one `celery worker` is enough for development
CELERY_DURABLE_QUEUE = os.environ.get("SHOP_QUEUE", "durable")
CELERY_DURABLE_LEASE_SECONDS = float(os.environ.get("SHOP_LEASE_SECONDS", "30"))
CELERY_TASK_DEFAULT_QUEUE = os.environ.get("SHOP_TASK_QUEUE", "celery")
