from __future__ import annotations

from asgiref.sync import async_to_sync, sync_to_async
from django.contrib import admin
from django.db import transaction
from django.http import HttpRequest, HttpResponse
from django.urls import include, path

from tests.contrib.django.workflows import book, wait


async def place(request: HttpRequest) -> HttpResponse:
    """An async view: its block is on the thread of the connection, and its workflow is created by async code."""
    alias, name = request.POST["alias"], request.POST["id"]

    async def create() -> None:
        await wait.acreate(alias, id=name)

    def write() -> None:
        with transaction.atomic(using=alias):
            book(alias, name, "placed")
            async_to_sync(create)()
            if request.POST["fails"] == "1":
                raise RuntimeError("the view fails")

    await sync_to_async(write)()
    return HttpResponse(name)


place.csrf_exempt = True  # type: ignore[attr-defined]  # Django 4.2 has the decorator for sync views alone

urlpatterns = [
    path("admin/", admin.site.urls),
    path("api/", include("celery_durable.contrib.django.urls")),
    path("durable/", include("celery_durable.contrib.django.dashboard_urls")),
    path("orders/", place),
]
