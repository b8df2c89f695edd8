"""The Django project of this process, with an alias for each database.

PyMySQL stands in for mysqlclient, unless DURABLE_TEST_MYSQLCLIENT=1: mysqlclient needs a compiler.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import django
import pymysql
import sqlalchemy as sa
from django.conf import settings

from celery_durable.contrib.django.tasks import BACKEND

_FOLDER = tempfile.TemporaryDirectory(prefix="durable-django-")  # it is removed when the process ends


_TEMPLATES = {
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


def sqlite(file: Path | str) -> dict[str, Any]:
    return {"ENGINE": "django.db.backends.sqlite3", "NAME": str(file), "OPTIONS": {"timeout": 30}}


def server(url: sa.URL) -> dict[str, Any]:
    engine = "postgresql" if url.get_backend_name() == "postgresql" else "mysql"
    return {
        "ENGINE": f"django.db.backends.{engine}",
        "NAME": url.database,
        "USER": url.username or "",
        "PASSWORD": url.password or "",
        "HOST": url.host or "",
        "PORT": str(url.port or ""),
    }


def set_up() -> None:
    """Configure Django, once. The servers get their aliases when a test wants them."""
    if settings.configured:
        return
    if os.environ.get("DURABLE_TEST_MYSQLCLIENT") != "1":
        # Django refuses PyMySQL by the version of mysqlclient that it claims to be.
        pymysql.version_info = (2, 3, 1, "final", 0)
        pymysql.install_as_MySQLdb()
        # Otherwise Django imports its modules again, and `pymysql.err` becomes another module with other classes.
        modules = [(name, module) for name, module in sys.modules.items() if name.startswith("pymysql.")]
        sys.modules.update((name.replace("pymysql", "MySQLdb"), module) for name, module in modules)
    site = sqlite(Path(_FOLDER.name) / "site.sqlite3")
    settings.configure(
        DATABASES={"default": site, "sqlite": site},
        INSTALLED_APPS=[
            "django.contrib.admin",
            "django.contrib.auth",
            "django.contrib.contenttypes",
            "django.contrib.messages",
            "django.contrib.sessions",
            "tests.contrib.django.booking.apps.UnattachedDurableConfig",
            "tests.contrib.django.booking.apps.BookingConfig",
        ],
        MIDDLEWARE=[
            "django.contrib.sessions.middleware.SessionMiddleware",
            "django.middleware.csrf.CsrfViewMiddleware",
            "django.contrib.auth.middleware.AuthenticationMiddleware",
            "django.contrib.messages.middleware.MessageMiddleware",
        ],
        ROOT_URLCONF="tests.contrib.django.urls",
        TEMPLATES=[_TEMPLATES],
        SECRET_KEY="for tests",
        ALLOWED_HOSTS=["testserver"],
        STATIC_URL="static/",
        TASKS={
            "default": {"BACKEND": BACKEND, "QUEUES": ["default", "media"]},
            "priorities": {"BACKEND": BACKEND, "OPTIONS": {"PRIORITIES": True}},
        },
        USE_TZ=True,
        DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
    )
    django.setup()


set_up()
