"""What the tests of the admin do to its pages."""

from __future__ import annotations

import html
import re
from typing import Any

from django.contrib.admin.models import LogEntry
from django.contrib.admin.utils import quote
from django.test import Client

from celery_durable.testing import DurableHarness
from tests.contrib.django.workflows import wait

LIST = "/admin/celery_durable/instance/"


def address(instance_id: str, workflow: str = "wait") -> str:
    return f"{LIST}{quote(f'{workflow}/{instance_id}')}/change/"


def text_of(client: Client, where: str, **query: str) -> str:
    """The text of a page, without tags and repeated blanks."""
    response = client.get(where, query, follow=True)
    assert response.status_code == 200
    page = re.sub(r"<style>.*?</style>|<[^>]+>", " ", response.content.decode(), flags=re.DOTALL)
    return re.sub(r"\s+", " ", html.unescape(page))


def start(site: DurableHarness, alias: str, id: str, **options: Any) -> Any:
    handle = site.create(wait, alias, id=id, **options)
    site.run_until_idle()
    return handle


def changes() -> list[tuple[str, str, str]]:
    """Who has done what, as Django's log of changes has it."""
    entries = LogEntry.objects.order_by("id").select_related("user")
    return [(entry.user.get_username(), entry.object_id, entry.change_message) for entry in entries]
