"""The HTTP API: a router for your FastAPI application, or an ASGI application to mount anywhere.

The API refuses every request that your hooks do not allow (docs/reference/http.md). It cannot be created without hooks
unless you pass ``allow_anonymous=True``. It requires the extra ``http``.
"""

from celery_durable.http.access import Access, Actor, Authorize, Hook
from celery_durable.http.app import asgi, router
from celery_durable.http.problems import Forbidden, NoAuthorization, Unauthenticated
from celery_durable.model import Permission, Scope

__all__ = [
    "Access",
    "Actor",
    "Authorize",
    "Forbidden",
    "Hook",
    "NoAuthorization",
    "Permission",
    "Scope",
    "Unauthenticated",
    "asgi",
    "router",
]
