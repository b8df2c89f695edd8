"""The view that passes a request of Django to the dashboard, with Django's sessions and the permissions of the API."""

from __future__ import annotations

import functools
from typing import Any

from asgiref.sync import sync_to_async
from django.conf import settings
from django.contrib.auth.views import redirect_to_login
from django.core.handlers.asgi import ASGIRequest
from django.db import connections, transaction
from django.http import HttpRequest, HttpResponseBase
from django.urls import NoReverseMatch, reverse

from celery_durable.app import Durable
from celery_durable.contrib.django import wiring
from celery_durable.contrib.django.api import HOOKS, Call, build_scope, read_user
from celery_durable.dashboard import dashboard
from celery_durable.dashboard.visits import BUFFERED


async def serve(request: HttpRequest, path: str) -> HttpResponseBase:
    """Serve a page. A visitor who is not logged in is sent to the login of the admin, or to LOGIN_URL without it."""
    user, permissions = await sync_to_async(read_user)(request)
    if user is None:
        return redirect_to_login(request.get_full_path(), _find_login())
    pages = _make_pages(wiring.find_durable())
    is_async = isinstance(request, ASGIRequest)
    scope = build_scope(request, path, user, permissions) | {BUFFERED: not is_async}
    return await Call(pages, scope, request.body).respond(is_stream=is_async and path.endswith("/stream"))


serve.csrf_exempt = True  # type: ignore[attr-defined]  # the pages have tokens of their own, on every server
for _alias in connections.settings:  # as for the API
    transaction.non_atomic_requests(using=_alias)(serve)


@functools.lru_cache(maxsize=1)
def _make_pages(durable: Durable) -> Any:
    return dashboard(durable, authorize=HOOKS)


def _find_login() -> str:
    try:
        return reverse("admin:login")
    except NoReverseMatch:
        return str(settings.LOGIN_URL)
