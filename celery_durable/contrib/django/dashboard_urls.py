"""The dashboard in a Django project: ``path("durable/", include("celery_durable.contrib.django.dashboard_urls"))``.

Django's session and permissions apply. It requires the extra ``dashboard``.
"""

from __future__ import annotations

from django.urls import re_path

from celery_durable.contrib.django.dashboard import serve

app_name = "celery_durable_dashboard"

urlpatterns = [re_path(r"^(?P<path>.*)$", serve, name="page")]
