"""The HTTP API: a router for your FastAPI application, or an ASGI application to mount anywhere.

Nobody gets in who is not let in (docs/http.md): without hooks there is no API. Needs the extra ``http``.
"""

from celery_durable.http.access import Access, Actor, Authorize, Hook, Permission
from celery_durable.http.app import asgi, router
from celery_durable.http.problems import Forbidden, NoAuthorization, Unauthenticated
from celery_durable.model import Scope

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
