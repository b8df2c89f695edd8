"""The dashboard: web pages that show and change instances, as an ASGI application to mount anywhere.

It asks the hooks of the HTTP API, and cannot be created without them unless you pass ``allow_anonymous=True``. It
requires the extra ``dashboard``.
"""

from celery_durable.dashboard.app import dashboard

__all__ = ["dashboard"]
