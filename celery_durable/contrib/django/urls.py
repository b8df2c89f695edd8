"""The HTTP API in a Django project: ``path("api/", include("celery_durable.contrib.django.urls"))``.

Django's session, CSRF protection and permissions apply. It requires the extra ``http``.
"""

from __future__ import annotations

from django.urls import re_path

from celery_durable.contrib.django.api import serve

app_name = "celery_durable_api"

urlpatterns = [re_path(r"^(?P<path>.*)$", serve, name="api")]
