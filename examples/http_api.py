"""The shop's orders over HTTP, for clients with an API key; each may do what its role says.

Shown here: the API in an application that has routes of its own, and hooks that decide by role and by instance.

From the folder above this one, once, and then in two terminals:

    celery -A examples.order_approval durable migrate
    celery -A examples.order_approval worker
    uvicorn examples.http_api:site

In another (`clerk` may create orders, read them and approve; `shop` may read alone):

    orders=http://127.0.0.1:8000/api/workflows/order/instances
    curl -H 'X-Api-Key: clerk' --json '{"id": "order-1", "params": {"order_id": "1", "cents": 12500}}' $orders
    curl -H 'X-Api-Key: shop' $orders/order-1
    curl -H 'X-Api-Key: shop' -N $orders/order-1/stream
    curl -H 'X-Api-Key: clerk' --json '{"type": "approval", "payload": {"approved": true}}' $orders/order-1/events
"""

from __future__ import annotations

import os
from hashlib import sha256

from fastapi import FastAPI

from celery_durable.http import Access, Permission, Unauthenticated, router
from examples.order_approval import durable

ROLES = {
    "clerk": {Permission.CREATION, Permission.READING, Permission.EVENTS},
    "shop": {Permission.READING},
    "prober": {Permission.HEALTH},
}


def _digest(key: str) -> bytes:
    return sha256(key.encode()).digest()


# In earnest: keys from your secrets. Digests are looked up, so that the time it takes tells nothing about a key.
KEYS = {_digest(os.environ.get(f"{role.upper()}_KEY", role)): role for role in ROLES}


def authorize(access: Access) -> bool:
    """Who is this, and may he? Asked before every request."""
    role = KEYS.get(_digest(access.request.headers.get("X-Api-Key", "")))
    if role is None:
        raise Unauthenticated("Send your API key as the header X-Api-Key.", challenge="ApiKey")
    if access.permission is Permission.CREATION and access.instance_id is not None:
        return role == "clerk" and access.instance_id.startswith("order-")
    return access.permission in ROLES[role]


site = FastAPI(title="Shop")
site.include_router(router(durable, authorize=authorize), prefix="/api")


@site.get("/")
def home() -> dict[str, str]:
    return {"orders": "/api/workflows/order/instances"}
