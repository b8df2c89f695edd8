"""The Django site of these tests over the Durable of a harness. Its users are on another alias than the workflows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from celery import Celery
from django.apps import apps
from django.conf import settings
from django.contrib.admin.models import LogEntry
from django.contrib.auth.management import create_permissions
from django.contrib.auth.models import Permission, User
from django.core.management import call_command
from django.test import Client

from celery_durable.testing import DurableHarness

app = Celery("shop", set_as_current=False)


@pytest.fixture(scope="session")
def users() -> None:
    """The tables of users and permissions."""
    for label in ("contenttypes", "auth", "admin", "sessions"):
        call_command("migrate", label, verbosity=0)
    create_permissions(apps.get_app_config("celery_durable"), verbosity=0)


@pytest.fixture
def site(alias: str, harness: DurableHarness, users: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[DurableHarness]:
    """The site over the harness's Durable."""
    monkeypatch.setattr(settings, "CELERY_DURABLE_APP", "tests.contrib.django.site:app", raising=False)
    monkeypatch.setattr(settings, "CELERY_DURABLE_DATABASE", alias, raising=False)
    vars(app)["durable"] = harness.durable
    yield harness
    LogEntry.objects.all().delete()
    User.objects.all().delete()


def log_in(*permissions: str) -> Client:
    """Log alice in, with exactly these permissions."""
    user, _ = User.objects.get_or_create(username="alice", is_staff=True)
    wanted = Permission.objects.filter(content_type__app_label="celery_durable", codename__in=permissions)
    assert len(wanted) == len(permissions)
    user.user_permissions.set(wanted)
    client = Client()
    client.force_login(user)
    return client
