"""`python -m celery_durable.http` prints the OpenAPI description of the whole API."""

from __future__ import annotations

import json

from celery_durable.app import Durable
from celery_durable.http import asgi

_SCHEMES = {
    "apiKey": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
    "bearer": {"type": "http", "scheme": "bearer"},
}
"""Examples. Each application chooses its own security schemes."""


def text() -> str:
    """Return the description as JSON text, including the tick route."""
    described = asgi(Durable(), allow_anonymous=True, tick=True, security_schemes=_SCHEMES).openapi()
    return json.dumps(described, indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    print(text(), end="")  # noqa: T201  # printing is its purpose
